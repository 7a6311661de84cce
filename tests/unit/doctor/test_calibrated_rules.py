"""What the writing half of the calibration corpus taught: false alarms that are quiet, and gaps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from firing import FLAT, RISING
from logs import findings_of, make_log

import keel
from keel.doctor.api import all_rules
from keel.doctor.examine import examine
from keel.doctor.known_envs import with_facts

Columns = Mapping[str, Sequence[float] | float]
KL, CLIP, EV, LOSS = "approx_kl", "clip_fraction", "explained_variance", "value_loss"
QUIET = {f"train/{KL}": [0.004, 0.005] * 10, f"train/{CLIP}": 0.05}


def train(**columns: Any) -> dict[str, Any]:
    return {f"train/{name}": values for name, values in columns.items()}


def test_every_rule_that_is_named_exists() -> None:
    known = {entry.id for entry in all_rules()}
    for entry in all_rules():
        assert set(entry.suppresses) <= known, entry.id
        assert entry.id not in entry.suppresses


@pytest.mark.parametrize("count", [1, 2])
def test_one_bad_evaluation_is_no_lost_normalizer(count: int) -> None:
    """The likeliest action of a young policy is often bad: Acrobot, LunarLander, land."""
    evaluated = [float("nan")] * (20 - count) + [20.0] * count
    columns = RISING | {"eval/return_mean": evaluated}
    assert findings_of("evaluation-far-below-training", make_log(columns)) is None
    columns = RISING | {"eval/return_mean": [float("nan")] * 17 + [20.0] * 3}
    finding = findings_of("evaluation-far-below-training", make_log(columns))
    assert finding is not None
    assert finding.level == "sick"


def test_one_leap_that_the_return_survives_means_nothing() -> None:
    kl = [0.002] * 10 + [0.6] + [0.002] * 9
    assert findings_of("kl-spikes", make_log(RISING | train(approx_kl=kl))) is None
    lost = {"rollout/return_mean": [20.0] * 3 + [300.0] * 8 + [30.0] * 9}
    finding = findings_of("kl-spikes", make_log(RISING | lost | train(approx_kl=kl)))
    assert finding is not None
    assert finding.level == "sick"


def test_adaptive_rates_may_leap_in_the_beginning() -> None:
    kl = [0.002, 0.4, 0.3, 0.002, 0.5, *[0.002] * 15]
    assert findings_of("kl-spikes", make_log(FLAT | train(approx_kl=kl))) is None


def test_a_policy_that_is_decided_makes_small_steps() -> None:
    small = FLAT | train(approx_kl=1e-7, clip_fraction=0.0)
    assert findings_of("steps-too-small", make_log(small | train(entropy=0.001))) is None
    finding = findings_of("steps-too-small", make_log(small | train(entropy=0.5)))
    assert finding is not None


def test_explained_variance_may_be_low_while_the_return_rises() -> None:
    nothing = train(explained_variance=0.02, value_loss=30.0)
    assert findings_of("explained-variance-zero", make_log(RISING | nothing)) is None
    assert findings_of("explained-variance-zero", make_log(FLAT | nothing)) is not None


def test_the_mean_ratio_follows_from_both_estimates_of_cleanrl() -> None:
    """mean r = 1 + k3 − k1, of the same minibatch: 1 + 0.9 − 0.4 = 1.5."""
    log = make_log(train(kl_k1=0.4, approx_kl=0.9), framework="cleanrl")
    finding = findings_of("ratio-mean-off", log)
    assert finding is not None
    assert finding.evidence[0].value == pytest.approx(1.5)
    same = make_log(train(kl_k1=0.39, approx_kl=0.4), framework="cleanrl")
    assert findings_of("ratio-mean-off", same) is None
    others = make_log(train(kl_k1=0.4, approx_kl=0.9), framework="rllib")
    assert findings_of("ratio-mean-off", others) is None  # of other rows, as far as we know


def test_a_kl_that_is_a_sum_is_a_constant_factor_too_large() -> None:
    """5 % beyond 1 ± 0.2: σ = 0.2/1.96 = 0.102, so the KL is about 0.0052; 128 rows make 0.67."""
    clip = np.linspace(0.04, 0.06, 20)
    kl = 128 * 0.0052 * (clip / 0.05)
    log = make_log(RISING | train(approx_kl=kl.tolist(), clip_fraction=clip.tolist()))
    finding = findings_of("kl-beyond-clip", log)
    assert finding is not None
    assert "about 1.3e+02 times what 5 % clipped ratios imply" in finding.cause
    mean = train(approx_kl=(kl / 128).tolist(), clip_fraction=clip.tolist())
    assert findings_of("kl-beyond-clip", make_log(RISING | mean)) is None


def test_a_few_huge_ratios_are_no_sum() -> None:
    kl = [0.005] * 12 + [3.0, 0.01, 40.0, 0.005, 2.0, 0.01, 7.0, 0.02]
    log = make_log(RISING | train(approx_kl=kl, clip_fraction=0.05))
    assert findings_of("kl-beyond-clip", log) is None


def test_a_critic_that_stands_still_shows_in_its_loss() -> None:
    still = train(explained_variance=[0.002, -0.004] * 10, value_loss=[27.0, 28.5] * 10)
    finding = findings_of("critic-stands-still", make_log(RISING | still))
    assert finding is not None
    assert finding.level == "watch"
    assert finding.fix.changes[0].times == 30.0
    learning = still | train(value_loss=np.linspace(28.0, 4.0, 20).tolist())
    assert findings_of("critic-stands-still", make_log(RISING | learning)) is None
    held_back = still | train(explained_variance=[0.012, 0.06] * 10)
    assert findings_of("critic-stands-still", make_log(RISING | held_back)) is None
    known = still | train(value_mean=0.0)
    assert findings_of("critic-stands-still", make_log(RISING | known)) is None


def test_a_known_environment_says_how_many_actions_there_are() -> None:
    settings = {"env": "CartPole-v1"}
    assert with_facts(settings)["facts.actions"] == 2
    assert with_facts({"env": "HalfCheetah-v5"})["facts.actions"] == 0
    assert with_facts({"env": "Own-v3"}) == {"env": "Own-v3"}
    assert with_facts(settings | {"facts.actions": 5})["facts.actions"] == 5


def test_entropy_of_continuous_actions_may_grow_in_logs_that_name_the_environment() -> None:
    grows = FLAT | train(entropy=np.linspace(1.5, 2.9, 20).tolist())
    assert findings_of("entropy-grows", make_log(grows, framework="cleanrl")) is None
    known = make_log(grows, framework="cleanrl", settings={"facts.actions": 0})
    assert findings_of("entropy-grows", known) is not None


def test_a_bonus_that_holds_the_policy_is_no_small_step() -> None:
    held = FLAT | train(approx_kl=5e-5, clip_fraction=0.0, entropy=0.692)
    facts = {"facts.actions": 2, "explore.entropy_coef": 10.0}
    assert findings_of("steps-too-small", make_log(held, settings=facts)) is None
    facts["explore.entropy_coef"] = 0.0
    assert findings_of("steps-too-small", make_log(held, settings=facts)) is not None


def test_who_survives_from_the_first_episode_on_has_a_constant_reward() -> None:
    """200 points in 200 steps is a time limit; an untrained policy does not reach it by merit."""
    same = {"rollout/return_mean": 200.0, "rollout/length_mean": 200.0}
    finding = findings_of("rewards-constant", make_log(same))
    assert finding is not None
    learned = same | {"rollout/return_mean": [20.0] * 5 + [200.0] * 15}
    assert findings_of("rewards-constant", make_log(learned)) is None


def test_a_discount_that_sees_nothing_explains_a_critic_that_does_not_either() -> None:
    columns = (
        FLAT
        | train(explained_variance=[0.001, -0.001] * 10, value_loss=3.0)
        | {"rollout/length_mean": 200.0}
    )
    diagnosis = examine(make_log(columns, settings={"advantage.gamma": 0.5}))
    assert diagnosis.findings[0].rule == "horizon-beyond-discount"
    assert "explained-variance-zero" in {one.finding.rule for one in diagnosis.suppressed}


def test_samples_of_another_policy_make_ratios_that_no_step_makes() -> None:
    columns = FLAT | train(kl_k1=0.3, approx_kl=0.7, clip_fraction=0.4)
    diagnosis = examine(make_log(columns, framework="cleanrl"))
    assert diagnosis.findings[0].rule == "ratio-mean-off"
    assert diagnosis.findings[0].level == "sick"
    assert "kl-over-target" not in {finding.rule for finding in diagnosis.findings}


def test_steps_that_begin_anew_are_two_runs(tmp_path: Path) -> None:
    def log_of(steps: Sequence[int]) -> Any:
        rows = [{"global_step": s, "losses/approx_kl": 0.01, "losses/clipfrac": 0} for s in steps]
        file = tmp_path / "log.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return keel.diagnose(file)

    once = list(range(0, 20_000, 1000))
    found = [finding.rule for finding in log_of([*once, *once]).findings]
    assert "counter-goes-back" in found
    late = [*once[:10], 300, *once[10:]]  # one row that came late
    for steps in (once, late):
        assert "counter-goes-back" not in [f.rule for f in log_of(steps).findings]


def test_a_penalty_can_leave_the_reward_no_say() -> None:
    columns = {"rollout/return_mean": [0.1, 0.12] * 10} | train(kl_reference=0.002)
    log = make_log(columns, framework="trl", settings={"kl.coef": 20.0})
    finding = findings_of("penalty-dominates", log)
    assert finding is not None
    assert finding.fix.changes[0].setting == "kl.coef"
    small = make_log(columns, framework="trl", settings={"kl.coef": 0.04})
    assert findings_of("penalty-dominates", small) is None
    far = make_log(columns | train(kl_reference=0.5), framework="trl", settings={"kl.coef": 20.0})
    assert findings_of("penalty-dominates", far) is None


def test_a_negative_coefficient_is_the_wrong_sign() -> None:
    """The loss is β × KL with β = −0.5: it falls by 0.5 × 2.4 = 1.2."""
    kl = np.linspace(0.0, 2.4, 20)
    columns = RISING | train(kl_reference=kl.tolist(), loss=(-0.5 * kl).tolist())
    log = make_log(columns, framework="trl", settings={"kl.coef": -0.5})
    assert findings_of("kl-penalty-sign", log) is not None


def test_a_policy_that_learns_to_do_worse() -> None:
    falls = np.linspace(-1200.0, -1650.0, 20).tolist()
    surer = train(entropy=np.linspace(1.4, 0.6, 20).tolist())
    worse = {"rollout/return_mean": falls, "rollout/return_std": 100.0} | surer
    finding = findings_of("objective-against-return", make_log(worse))
    assert finding is not None
    assert "from -1212 to -1638" in finding.cause
    unsure = worse | train(entropy=np.linspace(0.6, 1.4, 20).tolist())
    assert findings_of("objective-against-return", make_log(unsure)) is None
    lost = {"rollout/return_mean": [*np.linspace(0, 900, 10), *np.linspace(900, -300, 10)]}
    assert findings_of("objective-against-return", make_log(worse | lost)) is None


def test_a_reward_function_of_hundreds_drowns_one_of_a_half() -> None:
    parts = {"rollout/reward/echo": 0.06, "rollout/reward/length": np.linspace(500, 800, 20)}
    columns = {"rollout/return_mean": np.linspace(500, 800, 20).tolist()} | parts
    finding = findings_of("component-dominates", make_log(columns, framework="trl"))
    assert finding is not None
    assert "echo is 0.06 and does not rise" in finding.cause
    both = columns | {"rollout/reward/echo": np.linspace(0.05, 0.9, 20)}
    assert findings_of("component-dominates", make_log(both, framework="trl")) is None


def test_adapters_may_be_few_while_something_is_learned() -> None:
    few = {"rollout/return_mean": [0.1, 0.12] * 10} | train(parameters_trained=0.001, entropy=2.6)
    assert findings_of("optimizer-empty", make_log(few, framework="trl")) is not None
    moves = few | train(entropy=np.linspace(2.6, 2.2, 20).tolist())
    assert findings_of("optimizer-empty", make_log(moves, framework="trl")) is None


def test_cut_completions_explain_a_reward_that_is_always_0() -> None:
    columns = {"rollout/return_mean": 0.0, "rollout/return_std": 0.0, "rollout/ended": 0.05}
    diagnosis = examine(make_log(columns, framework="trl"))
    assert "rewards-constant" in {one.finding.rule for one in diagnosis.suppressed}


def test_a_penalty_that_is_missing_in_the_loss_of_one_step_shows_as_0() -> None:
    """Centred advantages and one step leave β × KL alone in TRL's loss: 0.5 × 0.4 = 0.2."""
    facts = {"kl.coef": 0.5, "region.epochs": 1}
    without = RISING | train(kl_reference=0.4, loss=[1e-8, -1e-8] * 10)
    finding = findings_of("beta-not-forwarded", make_log(without, framework="trl", settings=facts))
    assert finding is not None
    assert "coefficient is 0.5" in finding.cause
    there = RISING | train(kl_reference=0.4, loss=0.2)
    assert (
        findings_of("beta-not-forwarded", make_log(there, framework="trl", settings=facts)) is None
    )
    twice = make_log(without, framework="trl", settings=facts | {"region.epochs": 2})
    assert findings_of("beta-not-forwarded", twice) is None


def test_a_row_of_zero_reward_that_counts_as_a_step_shows_too() -> None:
    """Episodes of 20, 21, … 39 points have a step more, and earn 20/21 … a step."""
    points = np.arange(20.0, 40.0)
    columns = {
        "rollout/return_mean": points.tolist(),
        "rollout/length_mean": (points + 1.0).tolist(),
        "rollout/reward_mean": (points / (points + 1.0)).tolist(),
    }
    assert findings_of("autoreset-rows", make_log(columns)) is not None
    honest = columns | {"rollout/length_mean": points.tolist(), "rollout/reward_mean": 1.0}
    assert findings_of("autoreset-rows", make_log(honest)) is None


def test_a_policy_without_noise_makes_every_step_a_leap() -> None:
    columns = FLAT | train(action_std=0.0009, approx_kl=3e4, clip_fraction=0.9)
    diagnosis = examine(make_log(columns))
    assert diagnosis.findings[0].rule == "action-std-none"
    assert "from the first update on" in diagnosis.findings[0].cause
    assert "learning-rate-too-high" in {one.finding.rule for one in diagnosis.suppressed}


def test_units_that_never_answer_explain_steps_that_go_nowhere() -> None:
    columns = FLAT | train(dead_units=1.0, approx_kl=1e-7, clip_fraction=0.0)
    diagnosis = examine(make_log(columns))
    assert diagnosis.findings[0].rule == "units-dead"
    assert "steps-too-small" in {one.finding.rule for one in diagnosis.suppressed}


def test_huge_observations_are_worth_a_word_although_something_is_learned() -> None:
    columns = RISING | {"rollout/obs_abs_max": 2500.0}
    finding = findings_of("observations-unscaled", make_log(columns))
    assert finding is not None
    assert finding.level == "watch"
    large = RISING | {"rollout/obs_abs_max": 28.0}  # Acrobot's velocities
    assert findings_of("observations-unscaled", make_log(large)) is None


def test_a_pulse_beyond_the_end_of_the_run_never_comes() -> None:
    columns = RISING | {"train/temp_is_pulsing": 0.0}
    settings = {"explore.pulses": True, "explore.pulse_interval": 1000, "total_steps": 20 * 1024}
    finding = findings_of("pulses-dead", make_log(columns, settings=settings))
    assert finding is not None
    settings["total_steps"] = 5000 * 1024
    assert findings_of("pulses-dead", make_log(columns, settings=settings)) is None
