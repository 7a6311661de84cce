"""Adaptive rules by hand."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest

import keel
from keel.controllers.controllers import (
    AdaptiveClip,
    AdaptivePenalty,
    AdaptiveRate,
    Controller,
    Decay,
    Outcome,
    TemperaturePulses,
)
from keel.errors import InputError
from keel.types import HyperParams

RULES: list[Controller] = [
    AdaptivePenalty(0.1),
    AdaptiveRate(0.1),
    AdaptiveClip(0.1, 0.3),
    Decay("bc_coef", 0.5, 0.1),
    TemperaturePulses(),
]


def turned(rule: Controller, kl: float, hparams: HyperParams) -> HyperParams:
    return rule(rule.init(), Outcome(kl, math.nan), hparams)[1]


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(0.19, 1.0), (0.2, 1.0), (0.21, 1 / 1.5), (0.05, 1.0), (0.049, 1.5)],
)
def test_rate_and_clip_turn_outside_of_half_and_twice_the_target(kl: float, factor: float) -> None:
    rate = turned(AdaptiveRate(0.1), kl, HyperParams(learning_rate=1e-3)).learning_rate
    assert rate == pytest.approx(1e-3 * factor)
    clip = turned(AdaptiveClip(0.1, widest=1.0), kl, HyperParams(clip_low=0.1, clip_high=0.2))
    assert (clip.clip_low, clip.clip_high) == pytest.approx((0.1 * factor, 0.2 * factor))


@pytest.mark.parametrize(
    ("kl", "before", "after"),
    [
        (0.16, 0.5, 1.0),
        (0.15, 0.5, 0.5),
        (0.07, 0.5, 0.5),
        (0.06, 0.5, 0.25),
        (0.0, 1.5e-4, 1e-4),
        (9.0, 80.0, 100.0),
    ],
)
def test_a_penalty_doubles_above_one_and_a_half_times_the_target(
    kl: float, before: float, after: float
) -> None:
    """And is halved below 0.1 / 1.5 = 0.0667, between 1e-4 and 100."""
    assert turned(AdaptivePenalty(0.1), kl, HyperParams(kl_coef=before)).kl_coef == pytest.approx(
        after
    )


def test_a_pulse_doubles_the_temperature_every_eight_updates() -> None:
    rule, hparams = TemperaturePulses(), HyperParams()
    state, seen = rule.init(), []
    for _ in range(10):
        state, hparams = rule(
            state, Outcome(0.0, math.nan, temperature=hparams.temperature), hparams
        )
        seen.append(hparams.temperature)
    assert seen == [1.0] * 7 + [2.0, 1.0, 1.0]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_rule_cannot_change(rule: Controller) -> None:
    with pytest.raises(FrozenInstanceError):
        rule.target = 1.0  # type: ignore[attr-defined]


def test_an_update_is_accepted_unless_told() -> None:
    assert Outcome(0.0, 0.0).accepted


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_the_target_of_a_kl_is_a_number_above_zero(wrong: float) -> None:
    with pytest.raises(InputError, match="target_kl: expected a number above 0"):
        keel.AdaptiveKLController(0.1, wrong, 1000)
