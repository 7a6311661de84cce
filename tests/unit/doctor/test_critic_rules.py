"""Rules of the critic: each fires on its fault, with its numbers, and not on the run beside it."""

from __future__ import annotations

import numpy as np
import pytest
from firing import FLAT, RISING, Case, check_fires, check_silent, check_skipped
from logs import findings_of, make_log

from keel.doctor.examine import examine

EV, LOSS = "train/explained_variance", "train/value_loss"
VALUE, TARGET, TARGET_STD = "train/value_mean", "train/target_mean", "train/target_std"
LEARNED = np.linspace(0.0, 0.9, 20).tolist()
AGENTS = {f"train/advantage_raw_std/{name}": std for name, std in (("wolf", 30.0), ("hare", 1.0))}

CASES = [
    Case(
        "explained-variance-negative",
        FLAT | {EV: -0.8},
        {EV: LEARNED},
        "explained variance is -0.80, so its values are 1.8 times as far",
        value=-0.8,
    ),
    Case(
        "explained-variance-zero",
        FLAT | {EV: [0.01, -0.01] * 10},
        {EV: LEARNED},
        "explained variance is 0 in the whole second half of the log (10 updates)",
        value=0.0,
    ),
    Case(
        "critic-too-slow",
        FLAT | {EV: 0.0, VALUE: 0.3, TARGET: 6.5, TARGET_STD: 2.0},
        {VALUE: 6.0, EV: 0.5},
        "its mean value is 0.3 where its targets are 6.5, in 18 of 20 updates",
        value=0.3,
    ),
    Case(
        "critic-too-fast",
        FLAT | {EV: 0.0, LOSS: 9.0, VALUE: 40.0, TARGET: 41.0, TARGET_STD: 4.0},
        {EV: LEARNED},
        "explained variance is exactly 0 in 100% of the updates, with values that follow the mean",
        value=1.0,
    ),
    Case(
        "critic-too-fast",
        FLAT | {EV: [0.5, -2.5] * 10, LOSS: 9.0},
        {EV: [0.5, 0.2] * 10},
        "explained variance changes by 3 between updates, down to -2.5",
        value=3.0,
    ),
    Case(
        "value-loss-exploded",
        FLAT | {EV: 0.0, LOSS: 2e6},
        {LOSS: 20.0},
        "its value loss is 2e+06, so it misses returns by 2e+03 and explains 0 of the variance",
        value=2e6,
    ),
    Case(
        "value-targets-large",
        FLAT | {EV: 0.02, TARGET: -900.0, TARGET_STD: 300.0},
        {TARGET: -9.0, TARGET_STD: 3.0},
        "value targets are large (-900 ± 300) and the critic explains 0.02 of them",
        value=1200.0,
    ),
    Case(
        "critic-dominates",
        FLAT | {LOSS: 50.0, "train/gradient_norm": 80.0, "train/gradient_clipped": 1.0},
        {"train/gradient_norm": 2.0},
        "the gradient's norm is 80, cut to 0.5",
        level="watch",
        value=80.0,
        settings={"network.share": True, "network.kind": "cnn", "region.max_grad_norm": 0.5},
    ),
    Case(
        "value-clip-active",
        FLAT | {"train/value_clip_fraction": 0.7},
        {"train/value_clip_fraction": 0.2},
        "a clip of ±0.2 holds the critic back: it decides for 70% of the rows",
        level="watch",
        value=0.7,
        settings={"region.value_clip": 0.2},
    ),
    Case(
        "targets-impossible",
        {TARGET: -3.0, "rollout/reward_min": 0.0},
        {TARGET: 3.0},
        "value targets of -3 cannot come from these rewards: every reward is at least 0",
        value=-3.0,
    ),
    Case(
        "targets-impossible",
        {TARGET: 130.0, "rollout/reward_abs_max": 1.0},
        {TARGET: 99.0},
        "largest reward / (1 − γ) = 100",
        value=130.0,
        settings={"advantage.gamma": 0.99, "envs.normalize_reward": False},
    ),
    Case(
        "units-dead",
        FLAT | {"train/dead_units": 0.8},
        {"train/dead_units": 0.1},
        "80% of the hidden units are dead",
        value=0.8,
    ),
    Case(
        "agents-unequal",
        {"train/advantage_raw_std": 15.0} | AGENTS,
        {"train/advantage_raw_std/hare": 10.0},
        "wolf drowns hare: its advantages vary 30 times as much",
        level="watch",
        value=30.0,
        settings={"agents.sharing": "all"},
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


@pytest.mark.parametrize("rule", ["explained-variance-negative", "explained-variance-zero"])
def test_solved_task_has_no_variance_to_explain(rule: str) -> None:
    """CartPole at 500: every return is the same, and explained variance is what rounding gives."""
    solved = make_log(
        {
            "rollout/return_mean": [*np.linspace(20, 500, 10), *([500.0] * 10)],
            "rollout/return_std": [*([30.0] * 10), *([0.0] * 10)],
            EV: [*np.linspace(0, 0.05, 10), *([-0.8] * 10)],
        }
    )
    assert findings_of(rule, solved) is None


def test_one_row_shows_an_exploded_value_loss() -> None:
    """The table people paste: one row is enough, and names √(2 × loss)."""
    pasted = {EV: 0.0, LOSS: 8e5}
    log = make_log(pasted, rows=1, framework="sb3")
    finding = findings_of("value-loss-exploded", log)
    assert finding is not None
    assert "misses returns by 1.26e+03" in finding.cause
    assert finding.level == "watch"  # after 1,024 steps; later it is sick
    assert findings_of("value-loss-exploded", make_log({EV: 0.9, LOSS: 8e5}, rows=1)) is None


def test_steady_negative_variance_asks_for_a_faster_critic() -> None:
    """Values that stand still while targets move are as far off in every update."""
    still = findings_of("explained-variance-negative", make_log(FLAT | {EV: -4.0}))
    swings = findings_of("explained-variance-negative", make_log(FLAT | {EV: [-0.6, -4.0] * 10}))
    assert still is not None
    assert still.fix.changes[0].times == 10.0
    assert swings is not None
    assert swings.fix.changes[0].times == 0.3


def test_rising_return_makes_a_slow_critic_a_matter_to_watch() -> None:
    columns = RISING | {EV: 0.0, VALUE: 0.3, TARGET: 6.5, TARGET_STD: 2.0}
    finding = findings_of("critic-too-slow", make_log(columns))
    assert finding is not None
    assert finding.level == "watch"


def test_large_targets_are_the_cause_of_a_critic_that_explains_nothing() -> None:
    """Pendulum without normalized rewards, whose critic is of no use."""
    columns = FLAT | {EV: [0.0002, 0.0003] * 10, TARGET: -139.0, TARGET_STD: 28.0}
    log = make_log(columns)
    finding = findings_of("value-targets-large", log)
    assert finding is not None
    assert finding.fix.changes[0].setting == "envs.normalize_reward"
    diagnosis = examine(log)
    assert [f.rule for f in diagnosis.findings] == ["value-targets-large"]
    risen = findings_of("value-targets-large", make_log({**columns, **RISING}))
    assert risen is not None
    assert risen.level == "watch"
    assert "explained-variance-zero" in {s.finding.rule for s in diagnosis.suppressed}


def test_separate_networks_are_not_dominated_by_the_critic() -> None:
    columns = FLAT | {LOSS: 50.0, "train/gradient_norm": 80.0, "train/gradient_clipped": 1.0}
    settings = {"network.share": True, "network.kind": "mlp"}
    assert findings_of("critic-dominates", make_log(columns, settings=settings)) is None
