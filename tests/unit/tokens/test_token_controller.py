"""The controller of β: safe where others are not."""

from __future__ import annotations

import math

import pytest

from keel.errors import KeelError
from keel.regions.controllers import Outcome, ProportionalPenalty
from keel.types import Knobs


def after(kl: float, coef: float = 0.1, **settings) -> float:
    rule = ProportionalPenalty(**{"target": 0.1, "horizon": 100.0, "samples": 50, **settings})
    _, knobs = rule(rule.init(), Outcome(0.0, 0.0, kl_reference=kl), Knobs(kl_coef=coef))
    return knobs.kl_coef


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 0.1),
        (0.11, 0.1 * (1 + 0.1 * 0.5)),
        (0.5, 0.1 * (1 + 0.2 * 0.5)),  # bounded at 0.2
        (0.0, 0.1 * (1 - 0.2 * 0.5)),
    ],
)
def test_numbers_by_hand(kl: float, expected: float) -> None:
    assert after(kl) == pytest.approx(expected)


def test_the_factor_never_turns_negative() -> None:
    """verl and OpenRLHF multiply by 1 − 0.2·n/horizon, which is −1 for n = 10·horizon."""
    assert after(0.0, samples=1000) == pytest.approx(0.08)


@pytest.mark.parametrize("kl", [-1e-3, math.nan, math.inf])
def test_a_kl_that_cannot_be_is_a_fault(kl: float) -> None:
    with pytest.raises(KeelError, match="never negative"):
        after(kl)


def test_beta_stays_inside_its_bounds() -> None:
    assert after(9.0, coef=9.9) == 10.0
    assert after(0.0, coef=1.1e-5) == pytest.approx(1e-5)
    assert after(0.0, coef=0.0105, low=0.01) == 0.01
