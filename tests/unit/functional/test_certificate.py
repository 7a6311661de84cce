"""The certificate's verdicts, three of them derived again with nothing but numpy."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import numpy as np
import pytest

from keel.functional import Certificate, certificate
from keel.functional.estimators import ESTIMATORS, EXACT, LOSS_FORMS, RIGHT

Vector = np.ndarray
LOSS_ON_POLICY = ("loss", "on-policy")


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str, str], Certificate]:
    return {(row.estimator, row.placement, row.sampling): row for row in certificate()}


def test_every_estimator_is_certified_in_every_place(rows):
    reward = {(name, "reward") for name in (*ESTIMATORS, EXACT)}
    loss = {(name, "loss") for name in (*ESTIMATORS, *LOSS_FORMS, EXACT)}
    expected = {
        (name, placement, sampling)
        for name, placement in reward | loss
        for sampling in ("on-policy", "off-policy")
    }
    assert set(rows) == expected
    assert len(certificate(policies=1)) == len(expected)


@pytest.mark.parametrize(("placement", "sampling"), RIGHT)
def test_the_table_of_right_ones_is_what_the_certificate_finds(rows, placement, sampling):
    found = {
        row.estimator for row in rows.values() if row.right and row[1:3] == (placement, sampling)
    }
    assert found == set(RIGHT[placement, sampling])


@pytest.mark.parametrize(
    ("estimator", "placement", "sampling", "descends"),
    [
        ("k1", "loss", "on-policy", "nothing (zero gradient)"),
        ("k2", "loss", "on-policy", "KL(π‖ref)"),
        ("k3", "loss", "on-policy", "KL(ref‖π)"),
        ("abs", "loss", "on-policy", "2·TV(π, ref)"),
        ("k1", "loss", "off-policy", "−KL(old‖π)"),
        ("k2", "loss", "off-policy", "E_old[k2(π)]"),
        ("k3", "loss", "off-policy", "E_old[k3(π)]"),
        ("abs", "loss", "off-policy", "E_old[abs(π)]"),
        ("weighted_k2", "loss", "off-policy", "KL(π‖ref)"),
        ("ratio_k3", "loss", "off-policy", "KL(π‖ref)"),
        ("straight_through", "loss", "off-policy", "KL(π‖ref)"),
        ("full", "loss", "off-policy", "KL(π‖ref)"),
        ("k1", "reward", "on-policy", "KL(π‖ref)"),
        ("k2", "reward", "on-policy", "E_π[k2] − KL(π‖ref)"),
        ("k3", "reward", "on-policy", "KL(π‖ref) − KL(ref‖π)"),
        ("full", "reward", "on-policy", "nothing (zero gradient)"),
        ("k1", "reward", "off-policy", "KL(π‖ref) − KL(π‖old)"),
        ("k3", "reward", "off-policy", "E_π[k3(old)]"),
    ],
)
def test_verdicts(rows, estimator: str, placement: str, sampling: str, descends: str):
    assert rows[estimator, placement, sampling].descends == descends


def test_a_right_row_has_the_direction_and_the_length_of_the_gradient(rows):
    for row in rows.values():
        assert row.right == (row.descends == "KL(π‖ref)") == (row.gradient_bias < 1e-9)
        assert not row.right or row.cosine == pytest.approx(1.0)


def test_a_vanishing_gradient_points_nowhere_and_misses_everything(rows):
    row = rows["k1", "loss", "on-policy"]
    assert (row.cosine, row.gradient_bias) == (0.0, pytest.approx(1.0))


def test_a_wrong_direction_is_measured(rows):
    """The worst of 16 policies: forward KL points elsewhere, and −KL(old‖π) away."""
    assert 0.0 < rows["k3", "loss", "on-policy"].cosine < 0.99
    assert rows["k1", "loss", "off-policy"].cosine < 0.0


def test_the_worst_of_all_policies_counts(rows):
    """The first of the sixteen on its own looks better in every respect."""
    first = next(row for row in certificate(policies=1) if row[:3] == ("k2", "reward", "on-policy"))
    worst = rows["k2", "reward", "on-policy"]
    assert worst.gradient_bias > first.gradient_bias
    assert worst.value_bias > first.value_bias
    assert worst.cosine < first.cosine


@pytest.mark.parametrize(
    ("estimator", "unbiased"), [("k1", True), ("k2", False), ("k3", True), ("abs", False)]
)
def test_on_policy_values(rows, estimator: str, unbiased: bool):
    """As values k1 and k3 are unbiased, wherever they stand: a value is not a gradient."""
    for placement in ("reward", "loss"):
        assert (rows[estimator, placement, "on-policy"].value_bias < 1e-9) == unbiased


def test_a_gradient_that_nothing_explains_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch):
    module = import_module("keel.functional.gradient_certificate")
    monkeypatch.setattr(module, "OBJECTIVES", {"KL(π‖ref)": module.OBJECTIVES["KL(π‖ref)"]})
    verdicts = {row.estimator: row.descends for row in certificate() if row[1:3] == LOSS_ON_POLICY}
    assert verdicts["k2"] == "KL(π‖ref)"
    assert verdicts["k3"] == "no known objective"


def test_one_seed_one_certificate():
    assert certificate(policies=2, seed=3) == certificate(policies=2, seed=3)
    assert certificate(policies=2) == certificate(policies=2, seed=0)
    assert certificate(policies=2, seed=3) != certificate(policies=2, seed=4)


# --- the same verdicts from finite differences, without torch -----------------------------------

LOGITS, REF, OLD = np.random.default_rng(0).normal(size=(3, 4))


def softmax(logits: Vector) -> Vector:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def kl(p: Vector, q: Vector) -> float:
    return float(np.sum(p * np.log(p / q)))


def slope(function: Callable[[Vector], float], h: float = 1e-6) -> Vector:
    """Central differences at LOGITS."""
    return np.array(
        [(function(LOGITS + h * e) - function(LOGITS - h * e)) / (2 * h) for e in np.eye(4)]
    )


def expectation(term: Callable[[Vector], Vector], sampler: Vector) -> Callable[[Vector], float]:
    """E[term] over a *fixed* sampler, as a function of the policy's logits."""
    return lambda logits: float(np.sum(sampler * term(np.log(softmax(logits)))))


pi, ref, old = softmax(LOGITS), softmax(REF), softmax(OLD)


def test_k1_in_a_loss_has_no_gradient_on_policy():
    measured = slope(expectation(lambda log_pi: log_pi - np.log(ref), pi))
    assert measured == pytest.approx(np.zeros(4), abs=1e-8)


def test_k1_in_a_loss_repels_off_policy():
    measured = slope(expectation(lambda log_pi: log_pi - np.log(ref), old))
    assert measured == pytest.approx(slope(lambda z: -kl(old, softmax(z))), abs=1e-8)


def test_k2_in_a_loss_descends_reverse_kl_on_policy():
    measured = slope(expectation(lambda log_pi: 0.5 * (log_pi - np.log(ref)) ** 2, pi))
    assert measured == pytest.approx(slope(lambda z: kl(softmax(z), ref)), abs=1e-8)


def test_k3_in_a_loss_descends_forward_kl_on_policy():
    def k3(log_pi: Vector) -> Vector:
        delta = log_pi - np.log(ref)
        return np.exp(-delta) - 1.0 + delta

    assert slope(expectation(k3, pi)) == pytest.approx(
        slope(lambda z: kl(ref, softmax(z))), abs=1e-8
    )


def test_abs_in_a_loss_descends_twice_the_total_variation_on_policy():
    measured = slope(expectation(lambda log_pi: np.abs(log_pi - np.log(ref)), pi))
    variation = slope(lambda z: np.abs(softmax(z) - ref).sum())
    assert measured == pytest.approx(variation, abs=1e-8)


def test_k1_and_k3_in_a_reward_on_policy():
    """The score-function gradient Σ π(a) ∇log π(a) · penalty(a), penalty detached."""
    delta = np.log(pi / ref)
    reverse, forward = slope(lambda z: kl(softmax(z), ref)), slope(lambda z: kl(ref, softmax(z)))

    def score_gradient(penalty: Vector) -> Vector:
        return slope(expectation(lambda log_pi: log_pi * penalty, pi))

    assert score_gradient(delta) == pytest.approx(reverse, abs=1e-8)
    assert score_gradient(np.exp(-delta) - 1.0 + delta) == pytest.approx(
        reverse - forward, abs=1e-8
    )
