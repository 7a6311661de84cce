"""The controller of β: safe where others are not."""

from __future__ import annotations

import math

import pytest

import keel
from keel.controllers.controllers import Outcome, ProportionalPenalty
from keel.errors import InputError, KeelError
from keel.types import HyperParams


def after(kl: float, coef: float = 0.1, **settings) -> float:
    rule = ProportionalPenalty(**{"target": 0.1, "horizon": 100.0, "samples": 50, **settings})
    _, hparams = rule(rule.init(), Outcome(0.0, 0.0, kl_reference=kl), HyperParams(kl_coef=coef))
    return hparams.kl_coef


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


# --- under verl's names ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "n_steps", "expected"),
    [
        (0.1, 256, 0.2),  # at the target
        (0.11, 256, 0.2 * (1 + 0.1 * 256 / 10_000)),
        (0.5, 256, 0.2 * (1 + 0.2 * 256 / 10_000)),  # the error is clipped at 0.2: 0.201024
        (0.0, 256, 0.2 * (1 - 0.2 * 256 / 10_000)),
        (-0.01, 256, 0.2 * (1 - 0.2 * 256 / 10_000)),  # an estimate below 0
        (0.5, 10_000, 0.2 * 1.2),
        (0.5, 0, 0.2),
    ],
)
def test_the_adaptive_controller_by_hand(kl: float, n_steps: int, expected: float) -> None:
    """Ziegler et al. 2019: β · (1 + clip(KL/target − 1, ±0.2) · n/horizon)."""
    controller = keel.AdaptiveKLController(init_kl_coef=0.2, target_kl=0.1, horizon=10_000)
    assert controller.value == 0.2
    assert controller.update(current_kl=kl, n_steps=n_steps) is None
    assert controller.value == pytest.approx(expected, rel=1e-12)


def test_updates_of_the_adaptive_controller_multiply() -> None:
    controller = keel.AdaptiveKLController(0.1, 0.05, 1_000)
    for kl in (0.2, 0.2, 0.0):
        controller.update(kl, 500)
    assert controller.value == pytest.approx(0.1 * 1.1 * 1.1 * 0.9)


@pytest.mark.parametrize("kl", [0.0, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("samples", [1, 50, 1000])
def test_both_controllers_have_one_rule(kl: float, samples: int) -> None:
    controller = keel.AdaptiveKLController(0.1, 0.1, 100)
    controller.update(kl, samples)
    assert controller.value == after(kl, samples=samples)


def test_the_adaptive_controller_never_turns_negative_either() -> None:
    controller = keel.AdaptiveKLController(0.1, 0.1, 100)
    controller.update(0.0, 1_000)
    assert controller.value == pytest.approx(0.08)


def test_the_fixed_controller_stays() -> None:
    controller = keel.FixedKLController(kl_coef=0.3)
    controller.update(current_kl=9.0, n_steps=10_000)
    assert controller.value == 0.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-0.1, 0.1, 100), "init_kl_coef: expected a number of 0 or more, got -0.1"),
        ((0.1, 0.0, 100), "target_kl: expected a number above 0, got 0.0"),
        ((0.1, 0.1, 0), "horizon: expected a number above 0, got 0"),
    ],
)
def test_impossible_arguments_are_named(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        keel.AdaptiveKLController(*arguments)


def test_what_cannot_be_steered_by_is_refused() -> None:
    controller = keel.AdaptiveKLController(0.1, 0.1, 100)
    for kl in (math.nan, math.inf):
        with pytest.raises(KeelError, match="is no KL to steer by"):
            controller.update(kl, 10)
    with pytest.raises(InputError, match="n_steps: expected no negative number, got -1"):
        controller.update(0.1, -1)
    assert controller.value == 0.1
    with pytest.raises(InputError, match="kl_coef: expected a number of 0 or more, got nan"):
        keel.FixedKLController(math.nan)
