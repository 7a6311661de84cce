"""Rules of the reward, its course, the environment and what acts beside the reward."""

from __future__ import annotations

import numpy as np
import pytest
from firing import FLAT, RETURN, RISING, STD, Case, check_fires, check_silent, check_skipped
from logs import findings_of, make_log

LENGTH, REWARD = "rollout/length_mean", "rollout/reward_mean"
TARGET = "train/target_mean"
LOST = {RETURN: [*np.linspace(20, 300, 12), *([25.0] * 8)], STD: 10.0}
UP = np.linspace(0.2, 0.9, 20).tolist()
SPIKE = [*([0.01] * 12), 0.9, *([0.01] * 7)]

CASES = [
    Case(
        "rewards-constant",
        {RETURN: 0.0, STD: 0.0, LENGTH: 12.0},
        {RETURN: UP, STD: 0.4},
        "every completion of 20 updates got exactly 0",
        value=0.0,
        framework="trl",
    ),
    Case(
        "rewards-constant",
        {RETURN: 3.0, STD: 0.0, LENGTH: np.linspace(10, 40, 20).tolist()},
        {STD: 1.0},
        "every episode of 20 updates got exactly 3",
        value=3.0,
    ),
    Case(
        "rewards-sparse",
        {RETURN: -200.0, STD: 0.0, LENGTH: 200.0},
        {RETURN: np.linspace(-200, -150, 20).tolist(), STD: 20.0},
        "every episode so far returned exactly -200",
        level="watch",
        value=-200.0,
    ),
    Case(
        "rewards-sparse",
        FLAT | {"rollout/reward_zero_share": 0.98},
        {"rollout/reward_zero_share": 0.3},
        "98.0% of all rewards are 0",
        level="watch",
        value=0.98,
    ),
    Case(
        "advantages-vanish",
        FLAT | {"train/advantage_raw_std": 0.0},
        {"train/advantage_raw_std": 1.0},
        "their standard deviation is 0 in 20 of 20 updates",
        value=0.0,
    ),
    Case(
        "rewards-clipped",
        FLAT | {"rollout/reward_clipped_share": 0.6},
        {"rollout/reward_clipped_share": 0.01},
        "60% of the rewards are cut at ±1",
        value=0.6,
        settings={"envs.clip_reward": 1.0},
    ),
    Case(
        "rewards-clipped",
        FLAT | {REWARD: -6.0},
        {REWARD: -0.5},
        "rewards are cut at ±1, and their mean is -6",
        value=6.0,
        settings={"envs.clip_reward": 1.0, "envs.normalize_reward": False},
    ),
    Case(
        "component-dominates",
        FLAT | {"rollout/reward_share_max": 0.95},
        {"rollout/reward_share_max": 0.5},
        "one component makes 95% of the reward",
        level="watch",
        value=0.95,
    ),
    Case(
        "component-dead",
        FLAT | {"rollout/reward/task": UP, "rollout/reward/format": 0.0},
        {"rollout/reward/format": UP},
        "format was exactly 0 in all 20 updates",
        level="watch",
        value=0.0,
    ),
    Case(
        "returns-flat",
        FLAT,
        RISING,
        "the return did not rise: 20.5 at the start, 20.5 after 20,480 steps",
        level="watch",
        value=20.5,
    ),
    Case(
        "returns-collapsed",
        LOST | {"train/kl_exact": SPIKE},
        RISING,
        "collapsed from 287.3 to 25 after step 12,288: 100% of the gain is lost; before it "
        "train/kl_exact rose to 0.9, 90 times its usual 0.01",
        value=25.0,
    ),
    Case(
        "reward-hacked",
        RISING | {"eval/reward_heldout": [*UP[:10], *np.linspace(0.5, 0.1, 10)]},
        {"eval/reward_heldout": UP},
        "it rises from 30 to 390 while eval/reward_heldout falls from 0.532 to 0.189",
        value=0.189,
    ),
    Case(
        "evaluation-far-below-training",
        RISING | {"eval/return_mean": 20.0},
        {"eval/return_mean": np.linspace(20, 390, 20).tolist()},
        "evaluation is far below training: 20 against 390, so 103% of what was gained is missing",
        value=20.0,
    ),
    Case(
        "below-baseline",
        FLAT | {"baseline/noop_return": 80.0},
        {"baseline/noop_return": 10.0},
        "the noop policy is better: it earns 80, this one 20.5",
        value=80.0,
    ),
    Case(
        "suicide-incentive",
        {
            RETURN: np.linspace(-300, -30, 20).tolist(),
            STD: 20.0,
            LENGTH: np.linspace(200, 12, 20).tolist(),
            REWARD: np.linspace(-1.5, -2.5, 20).tolist(),
        },
        {REWARD: np.linspace(-1.0, -0.98, 20).tolist()},
        "they shorten from 195.1 to 16.95 steps, and a step costs more than before (-2.47, was "
        "-1.53)",
        level="watch",
    ),
    Case(
        "horizon-beyond-discount",
        FLAT | {LENGTH: 200.0},
        {},
        "γ = 0.5 sees 2 steps ahead, and an episode has 200 (its time limit)",
        settings={"advantage.gamma": 0.5, "facts.horizon": 200},
        healthy_settings={"advantage.gamma": 0.9},
    ),
    Case(
        "truncations-not-bootstrapped",
        {"rollout/bootstrap_error": 1.0, "rollout/truncated_share": 0.4},
        {"rollout/bootstrap_error": 0.0},
        "100% of the truncations are learned from as ends",
        value=1.0,
    ),
    Case(
        "terminations-bootstrapped",
        FLAT | {TARGET: 95.0, LENGTH: 20.0},
        {TARGET: 12.0},
        "targets are 95 where whole episodes return 21 ± 10",
        value=95.0,
        settings={"advantage.gamma": 0.99, "envs.normalize_reward": False},
    ),
    Case(
        "autoreset-rows",
        {RETURN: 20.0, LENGTH: 20.0, REWARD: 20.0 / 21.0},
        {REWARD: 1.0},
        "every step earns 1, the mean reward is 0.9524",
        value=20.0 / 21.0,
    ),
    Case(
        "observations-unscaled",
        FLAT | {"rollout/obs_abs_max": 5e4},
        {"rollout/obs_abs_max": 4.8},
        "observations reach 5e+04 and are not normalized",
        value=5e4,
    ),
    Case(
        "observations-dead",
        {"rollout/obs_dead_dims": 0.25},
        {"rollout/obs_dead_dims": 0.0},
        "25% of the dimensions of an observation never change",
        level="watch",
        value=0.25,
    ),
    Case(
        "imitation-dominates",
        FLAT | {"train/bc_gradient_ratio": 9.0},
        {"train/bc_gradient_ratio": 0.8},
        "their gradient is 9 times that of the reward, 90% of both",
        value=9.0,
    ),
    Case(
        "demonstrations-wrong",
        FLAT | {"train/bc_loss": 5.0},
        {"train/bc_loss": np.linspace(1.4, 0.3, 20).tolist()},
        "their loss stays at 5 nats; a policy without preference has 1.39",
        value=5.0,
        settings={"facts.actions": 4},
    ),
    Case(
        "coefficient-runs-away",
        FLAT | {"train/kl_coef": np.geomspace(0.2, 2e9, 20).tolist()},
        {"train/kl_coef": np.linspace(0.2, 0.4, 20).tolist()},
        "train/kl_coef grew",
        value=2e9,
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


def test_collapse_without_a_sign_before_it_is_to_be_watched() -> None:
    """A return that fell, alone, is not sick."""
    finding = findings_of("returns-collapsed", make_log(LOST))
    assert finding is not None
    assert finding.level == "watch"


def test_format_up_and_accuracy_down_is_hacking() -> None:
    columns = {
        RETURN: np.linspace(0.2, 0.9, 20).tolist(),
        STD: 0.3,
        "rollout/reward/format": UP,
        "rollout/reward/accuracy": np.linspace(0.5, 0.1, 20).tolist(),
    }
    finding = findings_of("reward-hacked", make_log(columns, framework="trl"))
    assert finding is not None
    assert "rollout/reward/accuracy falls from 0.5" in finding.cause


def test_success_that_fell_early_and_stays_down_is_a_hack_still() -> None:
    """Most of such a series is flat, so that it has no trend after its best."""
    rising = {RETURN: [0.4, 0.5, 0.6, 0.7, 0.8, 0.9, *[1.0] * 44], STD: 0.05}
    fallen = [0.44, 0.45, 0.3, 0.2, 0.1, *[0.0] * 45]
    settings = {"env": "language"}
    log = make_log(rising | {"rollout/success": fallen}, rows=50, settings=settings)
    finding = findings_of("reward-hacked", log)
    assert finding is not None
    assert "rollout/success falls from 0.45 to 0" in finding.cause
    assert [(c.setting, c.to, c.times) for c in finding.fix.changes] == [
        ("kl.place", "loss", None), ("kl.coef", None, 5.0),
    ]  # fmt: skip
    unused = {**settings, "kl.place": "none", "kl.coef": 0.01}
    log = make_log(rising | {"rollout/success": fallen}, rows=50, settings=unused)
    finding = findings_of("reward-hacked", log)
    assert finding is not None
    assert finding.fix.changes[1].to == 1.0  # 5 × a coefficient that nothing used is no pull
    steady = [0.44, 0.45, 0.43, 0.44, 0.43, *[0.44, 0.43] * 22, 0.44]
    log = make_log(rising | {"rollout/success": steady}, rows=50, settings=settings)
    assert findings_of("reward-hacked", log) is None


def test_falling_part_of_a_rising_reward_is_drowned() -> None:
    columns = RISING | {"env/reward_speed": UP, "env/reward_height": UP[::-1]}
    finding = findings_of("component-dominates", make_log(columns))
    assert finding is not None
    assert "height falls from 0.882 to 0.218" in finding.cause
    costs = RISING | {"env/reward_forward": UP, "env/reward_ctrl": [-v for v in UP]}
    assert findings_of("component-dominates", make_log(costs)) is None


def test_evaluation_of_another_task_is_not_compared() -> None:
    """A gap of several gains was there before anything was learned."""
    columns = RISING | {"eval/return_mean": -2000.0}
    assert findings_of("evaluation-far-below-training", make_log(columns)) is None


def test_atari_rewards_are_cut_on_purpose() -> None:
    columns = FLAT | {"rollout/reward_clipped_share": 0.6}
    settings = {"envs.clip_reward": 1.0, "env": "ALE/Breakout-v5"}
    assert findings_of("rewards-clipped", make_log(columns, settings=settings)) is None


def test_acrobot_that_reaches_its_goal_sooner_is_no_suicide() -> None:
    """−1 a step and 0 at the goal: a step costs less on average, the shorter the episode."""
    lengths = np.linspace(500, 90, 20)
    columns = {
        RETURN: (-lengths + 1).tolist(),
        STD: 30.0,
        LENGTH: lengths.tolist(),
        REWARD: (-(lengths - 1) / lengths).tolist(),
    }
    assert findings_of("suicide-incentive", make_log(columns)) is None
    assert findings_of("autoreset-rows", make_log(columns)) is None


def test_first_steps_of_a_long_run_may_be_flat() -> None:
    log = make_log(FLAT, settings={"total_steps": 10_000_000})
    assert findings_of("returns-flat", log) is None
