"""The estimates of the KL beside the exact one: k1 under note 001's name, k3 under SB3's."""

from __future__ import annotations

import math

import pytest
import torch

from keel.functional import policy_ratio
from keel.regions.measure import Measurement, chunks, kl_metrics
from keel.rollout.batch import Rows


def test_the_estimates_by_hand() -> None:
    """Ratios 2 and 1/4, and a row that does not count.

    k1 = (−ln 2 + ln 4)/2 = ln 2 / 2; k3 = ((2 − 1 − ln 2) + (¼ − 1 + ln 4))/2 = (¼ + ln 2)/2.
    """
    weight = torch.tensor([1.0, 1.0, 0.0])
    log_prob = torch.log(torch.tensor([0.8, 0.1, 0.9]))
    old = torch.log(torch.tensor([0.4, 0.4, 0.1]))
    kl = torch.tensor([0.1, 0.3, 7.0])
    measured = Measurement(kl, 2.0 * kl, policy_ratio(log_prob, old, weight), torch.zeros(3))
    rows = Rows(
        obs={},
        behaviour={},
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
    rows = Rows({}, {}, torch.zeros(2, dtype=torch.int64), nothing, nothing, None)
    metrics = kl_metrics(measured, rows)
    names = ("kl_approx", "approx_kl", "kl_k1", "kl_max", "kl_p99")
    assert {metrics[f"train/{name}"] for name in names} == {0.0}


@pytest.mark.parametrize(("shape", "pieces"), [((1, 1, 1), [512, 488]), ((1, 1), [1000])])
def test_images_are_measured_in_small_pieces(shape: tuple[int, ...], pieces: list[int]) -> None:
    weight = torch.ones(1000)
    obs = {"obs": torch.zeros(1000, *shape)}
    rows = Rows(obs, {}, torch.zeros(1000, dtype=torch.int64), weight, weight, None)
    assert [len(weight[part]) for part in chunks(rows)] == pieces
