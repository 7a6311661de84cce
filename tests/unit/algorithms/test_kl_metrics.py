"""The estimates of the KL beside the exact one: k1 as `kl_approx`, k3 under SB3's name."""

from __future__ import annotations

import math

import pytest
import torch

from keel.experience.batch import CHUNK, Batch, chunks
from keel.functional import policy_ratio
from keel.trust_region.measure import (
    Measurement,
    exact_kl,
    group_moments,
    kl_between,
    kl_metrics,
    measure,
)

from .conftest import build


def test_the_estimates_by_hand() -> None:
    """Ratios 2 and 1/4, and a row that does not count.

    k1 = (−ln 2 + ln 4)/2 = ln 2 / 2; k3 = ((2 − 1 − ln 2) + (¼ − 1 + ln 4))/2 = (¼ + ln 2)/2.
    """
    weight = torch.tensor([1.0, 1.0, 0.0])
    log_prob = torch.log(torch.tensor([0.8, 0.1, 0.9]))
    old = torch.log(torch.tensor([0.4, 0.4, 0.1]))
    kl = torch.tensor([0.1, 0.3, 7.0])
    measured = Measurement(kl, 2.0 * kl, policy_ratio(log_prob, old, weight), torch.zeros(3))
    rows = Batch(
        obs={},
        behavior={},
        action=torch.zeros(3, dtype=torch.int64),
        log_prob=old,
        weight=weight,
        group_axis=None,
    )
    metrics = kl_metrics(measured, rows)
    k1, k3 = math.log(2.0) / 2.0, (0.25 + math.log(2.0)) / 2.0
    assert metrics["train/kl_approx"] == metrics["train/kl_k1"] == pytest.approx(k1, rel=1e-6)
    assert metrics["train/approx_kl"] == pytest.approx(k3, rel=1e-6)
    assert metrics["train/kl_error"] == pytest.approx(k1 - 0.2, rel=1e-6)  # exact: (0.1 + 0.3)/2
    assert metrics["train/kl_reverse"] == pytest.approx(0.4, rel=1e-6)
    assert metrics["train/kl_max"] == pytest.approx(0.3)
    assert metrics["train/kl_p99"] == pytest.approx(0.1 + 0.99 * 0.2)


def test_no_row_that_counts_is_no_divergence() -> None:
    nothing = torch.zeros(2)
    measured = Measurement(nothing, nothing, policy_ratio(nothing, nothing, nothing), nothing)
    rows = Batch({}, {}, torch.zeros(2, dtype=torch.int64), nothing, nothing, None)
    metrics = kl_metrics(measured, rows)
    names = ("kl_approx", "approx_kl", "kl_k1", "kl_max", "kl_p99")
    assert {metrics[f"train/{name}"] for name in names} == {0.0}


@pytest.mark.parametrize(("shape", "pieces"), [((1, 1, 1), [512, 488]), ((1, 1), [1000])])
def test_images_are_measured_in_small_pieces(shape: tuple[int, ...], pieces: list[int]) -> None:
    weight = torch.ones(1000)
    obs = {"obs": torch.zeros(1000, *shape)}
    rows = Batch(obs, {}, torch.zeros(1000, dtype=torch.int64), weight, weight, None)
    assert [len(weight[part]) for part in chunks(rows)] == pieces


def test_a_long_rollout_is_measured_in_pieces_that_are_put_together() -> None:
    """Row by row what the distributions give at once, of two pieces."""
    setting = build((CHUNK + 50,))
    params = setting.opt_state.params * 1.1
    with torch.no_grad():
        now = setting.agent.policy(params, setting.batch.obs)
    dist, old = setting.agent.dist, setting.batch.behavior
    measured = measure(setting.agent, params, setting.batch, 1.0)
    torch.testing.assert_close(measured.kl, dist.kl(old, now), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(measured.kl_reverse, dist.kl(now, old), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(measured.entropy, dist.entropy(now), rtol=1e-4, atol=1e-6)
    weight = setting.batch.weight.double()
    mean = (dist.kl(old, now).double() * weight).sum() / weight.sum()
    measured_mean = exact_kl(setting.agent, params, setting.batch, 1.0)
    assert measured_mean.item() == pytest.approx(mean.item(), rel=1e-4)
    before = (setting.opt_state.params, setting.batch)
    between = kl_between(setting.agent, before, (params, setting.batch), 1.0)
    torch.testing.assert_close(between, dist.kl(old, now), rtol=1e-4, atol=1e-7)


def test_moments_by_hand() -> None:
    """0.1, 0.2 and 0.4 with weights 1, 1 and 2: a mean of 1.1/4, a mean square of 0.37/4; 9 has no
    weight."""
    weight, nothing = torch.tensor([1.0, 1.0, 2.0, 0.0]), torch.zeros(4)
    rows = Batch({}, {}, nothing, nothing, weight, None)
    mean, variance = group_moments(torch.tensor([0.1, 0.2, 0.4, 9.0]), rows)
    assert mean.item() == pytest.approx(1.1 / 4)
    assert variance.item() == pytest.approx(0.37 / 4 - (1.1 / 4) ** 2)


@pytest.mark.parametrize(("value", "count"), [(0.1, 3), (0.7, 7), (2.7, 3), (0.5, 4)])
def test_no_variance_is_negative(value: float, count: int) -> None:
    """Of equal numbers it is 0, and rounding may not take it below."""
    nothing = torch.zeros(count)
    rows = Batch({}, {}, nothing, nothing, torch.ones(count), None)
    _, variance = group_moments(torch.full((count,), value, dtype=torch.float64), rows)
    assert 0.0 <= variance.item() < 1e-14
