"""Rules of entropy and actions: each fires on a conjunction, never on the entropy alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from firing import FLAT, RETURN, RISING, STD, Case, check_fires, check_silent, check_skipped
from logs import findings_of, make_log

H, COEF, SHARE = "train/entropy", "train/entropy_coef", "rollout/action_share_max"
ACTION_STD, PULSE = "train/action_std", "train/temp_is_pulsing"
FOUR = {"facts.actions": 4}
LOG4 = math.log(4)
LOST = {RETURN: [*np.linspace(20, 300, 12), *([25.0] * 8)], STD: 10.0}
"""A return that was gained and lost."""

CASES = [
    Case(
        "entropy-stuck",
        FLAT | {H: LOG4, COEF: 5.0},
        RISING,
        "its entropy is 100.0% of log K = 1.386 after 20,480 steps, held there by an entropy "
        "bonus of 5",
        value=LOG4,
        settings=FOUR,
    ),
    Case(
        "entropy-collapsed",
        FLAT | {H: [1.2, 0.6, *([0.01] * 18)]},
        RISING | {H: np.linspace(1.2, 0.2, 20).tolist()},
        "its entropy is 0.01 nats since step 3,072, while the return is 20.5, and has not risen",
        value=0.01,
        settings=FOUR,
    ),
    Case(
        "entropy-oscillates",
        FLAT | {H: [1.3, 0.4] * 10},
        {H: np.linspace(1.3, 0.4, 20).tolist()},
        "entropy swings up and down 19 times by more than 20% of log K",
        level="watch",
        value=19.0,
        settings=FOUR,
    ),
    Case(
        "entropy-grows",
        FLAT | {H: np.linspace(-2.0, 9.0, 20).tolist(), COEF: 0.5},
        RISING,
        "entropy grows from -1.71 to 8.71 nats while the return goes from 20.5 to 20.5: its bonus "
        "of 0.5",
        value=8.711,
    ),
    Case(
        "entropy-leaps",
        LOST | {H: [*([0.5] * 12), *([1.3] * 8)]},
        RISING,
        "entropy leaps from 0.5 to 1.3 nats at step 13,312, and 100% of the return",
        value=1.3,
    ),
    Case(
        "entropy-falls",
        RISING | {H: np.linspace(1.3, 0.3, 20).tolist()},
        FLAT,
        "that is learning, no collapse",
        level="usual",
    ),
    Case(
        "entropy-below-floor",
        FLAT | {H: 0.1},
        {H: 0.45},
        "entropy is 0.1 nats, below half of its floor of 0.5",
        level="watch",
        value=0.1,
        settings={"explore.entropy_floor": 0.5},
    ),
    Case(
        "action-share-high",
        FLAT | {SHARE: 0.995},
        {SHARE: 0.5},
        "one action takes 99.5% of all steps",
        value=0.995,
        settings=FOUR,
    ),
    Case(
        "actions-unused",
        FLAT | {"env/share_S": 1.0, "env/share_M": 0.0, "env/share_L": 0.0},
        {"env/share_S": 0.5, "env/share_M": 0.3, "env/share_L": 0.2},
        "L, M is never chosen: S has 100%",
        level="watch",
        value=1.0,
    ),
    Case(
        "action-std-exploded",
        FLAT | {ACTION_STD: np.linspace(1.0, 50.0, 20).tolist(), COEF: 0.1},
        {ACTION_STD: np.linspace(1.0, 0.4, 20).tolist()},
        "from 2.29 to 48.7, pushed by an entropy bonus of 0.1",
        value=48.71,
    ),
    Case(
        "action-std-vanished",
        FLAT | {ACTION_STD: np.geomspace(1.0, 0.001, 20).tolist()},
        {ACTION_STD: np.linspace(1.0, 0.3, 20).tolist()},
        "their standard deviation fell from 0.848 to 0.00122",
        value=0.00122,
    ),
    Case(
        "pulses-dead",
        FLAT | {PULSE: 0.0},
        {PULSE: [0.0, 1.0] * 10},
        "temperature pulses are on and none came in 20 updates",
        value=0.0,
        settings={"explore.pulses": True, "explore.pulse_interval": 8},
    ),
    Case(
        "action-without-effect",
        {"rollout/action_effect": 0.0},
        {"rollout/action_effect": 0.3},
        "the action changes nothing",
        value=0.0,
    ),
]
IDS = [f"{case.rule}-{index}" for index, case in enumerate(CASES)]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_rule_fires_on_its_fault(case: Case) -> None:
    check_fires(case)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_rule_is_silent_beside_it(case: Case) -> None:
    check_silent(case)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_rule_is_skipped_without_its_metrics(case: Case) -> None:
    check_skipped(case)


def test_low_entropy_is_no_collapse_where_the_return_rose() -> None:
    columns = RISING | {H: np.linspace(1.3, 0.01, 20).tolist()}
    assert findings_of("entropy-collapsed", make_log(columns, settings=FOUR)) is None


def test_policy_that_dies_in_the_first_updates_is_named_though_its_mean_return_lags() -> None:
    """LunarLander with 100 × the learning rate: means over 100 episodes rise for three updates."""
    returns = [-195.0, -166.0, -131.0, *([-126.0, -134.0] * 11)]
    columns = {RETURN: returns, STD: 45.0, H: 1e-7}
    finding = findings_of("entropy-collapsed", make_log(columns, settings=FOUR))
    assert finding is not None
    assert finding.level == "sick"


def test_confident_critic_of_a_dead_policy_is_called_collapse() -> None:
    columns = FLAT | {H: [1.2, 0.6, *([0.01] * 18)], "train/explained_variance": 0.99}
    finding = findings_of("entropy-collapsed", make_log(columns, settings=FOUR))
    assert finding is not None
    assert "collapse, not success" in finding.evidence[-1].text


def test_end_of_a_good_run_is_flat_and_no_collapse() -> None:
    """A log that begins in the middle of a run cannot say that nothing was learned."""
    log = make_log(FLAT | {H: 0.01}, settings=FOUR)
    for series in log.series.values():
        series.step[:] += 1_000_000
    assert findings_of("entropy-collapsed", log) is None
