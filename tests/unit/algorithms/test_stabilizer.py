"""The line-search stabilizer, and its recovery."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.controllers.controllers import Outcome, Stabilizer, State
from keel.types import HyperParams

GOOD = Outcome(kl=0.02, return_mean=math.nan, accepted=True, gain_ratio=0.9, curvature_min=0.1)
FAILED = Outcome(kl=0.0, return_mean=math.nan, accepted=False)
POOR = Outcome(kl=0.02, return_mean=math.nan, accepted=True, gain_ratio=0.1, curvature_min=0.1)
BENT = Outcome(kl=0.02, return_mean=math.nan, accepted=True, gain_ratio=0.9, curvature_min=-1e-3)
RULE = Stabilizer(max_kl=0.02, damping=0.05)
BEGIN = HyperParams(max_kl=0.02, damping=0.05)


def after(
    outcomes: list[Outcome], rule: Stabilizer = RULE, hparams: HyperParams = BEGIN
) -> HyperParams:
    state: State = rule.init()
    for outcome in outcomes:
        state, hparams = rule(state, outcome, hparams)
    return hparams


def test_nineteen_failures_change_nothing_and_the_twentieth_tightens() -> None:
    """The note's numbers: max_kl × 0.8, damping × 1.2."""
    assert after([FAILED] * 19) == BEGIN
    tight = after([FAILED] * 20)
    assert tight.max_kl == pytest.approx(0.016)
    assert tight.damping == pytest.approx(0.06)
    assert after([FAILED] * 39) == tight
    assert after([FAILED] * 40).max_kl == pytest.approx(0.0128)


def test_it_ends_at_the_notes_limits() -> None:
    tight = after([FAILED] * 400)
    assert (tight.max_kl, tight.damping) == (0.005, 0.2)


def test_one_success_begins_the_count_anew() -> None:
    assert after([*[FAILED] * 19, GOOD, *[FAILED] * 19]) == BEGIN


def test_it_recovers_one_tightening_at_a_time_and_no_further_than_it_began() -> None:
    tight = after([FAILED] * 40)
    once = after([GOOD] * 20, hparams=tight)
    assert once.max_kl == pytest.approx(0.016)
    assert once.damping == pytest.approx(0.06)
    assert after([GOOD] * 19, hparams=tight) == tight
    assert after([GOOD] * 400, hparams=tight) == BEGIN
    never = Stabilizer(max_kl=0.02, damping=0.05, recovery=0)
    assert after([GOOD] * 400, never, tight) == tight


def test_steps_that_bring_too_little_count_as_failures() -> None:
    assert after([POOR] * 20).max_kl == pytest.approx(0.016)
    lenient = Stabilizer(max_kl=0.02, damping=0.05, min_gain=0.0)
    assert after([POOR] * 20, lenient) == BEGIN


def test_curvature_that_is_not_positive_raises_the_damping_at_once() -> None:
    once = after([BENT])
    assert (once.max_kl, once.damping) == (0.02, pytest.approx(0.06))
    assert after([BENT] * 400).damping == 0.2


@given(st.lists(st.sampled_from([GOOD, FAILED, POOR, BENT]), max_size=200))
def test_it_stays_within_its_limits_whatever_happens(outcomes: list[Outcome]) -> None:
    hparams = after(outcomes)
    assert 0.005 <= hparams.max_kl <= 0.02
    assert 0.05 * (1 - 1e-9) <= hparams.damping <= 0.2


def test_limits_beyond_where_it_began_are_no_jump() -> None:
    """A bound that begins below the least, or a damping above the most, is left as it is."""
    hparams = HyperParams(max_kl=0.001, damping=0.5)
    rule = Stabilizer(max_kl=0.001, damping=0.5)
    assert after([FAILED] * 100, rule, hparams) == hparams
