"""The registry: complete, unambiguous, and able to translate what others log."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from keel.errors import InputError
from keel.tracking import metrics
from keel.tracking.metrics import (
    DOMINATES,
    REGISTRY,
    SOURCES,
    Canonical,
    canonical,
    documentation,
    metric,
)

REQUIRED = """
rollout/return_mean rollout/return_std rollout/length_mean rollout/episodes rollout/reward_mean
train/kl_exact train/kl_requested train/kl_reverse train/kl_p99 train/kl_max train/kl_approx
train/kl_error train/approx_kl train/kl_k1 train/kl_step train/kl_normaliser train/kl_is_exact
train/max_kl train/alpha train/rollbacks train/walk_back train/clip_fraction train/entropy
train/entropy_coef train/policy_loss train/value_loss train/loss train/explained_variance
train/learning_rate train/clip_range train/kl_coef train/temperature train/temp_is_pulsing
train/epochs train/early_stop_epoch train/early_stop_kl train/gradient_norm train/gradient_clipped
train/non_finite_gradients train/ratio_p01 train/ratio_p50 train/ratio_p99 train/ratio_min
train/ratio_max train/log_ratio_max train/effective_sample_size train/gate_log_ratio
train/advantage_raw_min train/advantage_raw_max train/advantage_raw_mean train/advantage_raw_std
train/advantage_min train/advantage_max train/advantage_mean train/advantage_std
train/advantage_sign_flips train/value_mean train/target_mean train/target_std
warn/large_log_ratio warn/extreme_ratio_max warn/extreme_ratio_min warn/ratio_all_nonfinite
error/non_finite_ratio_count error/non_finite_ratio_frac
eval/return_mean eval/return_std eval/length_mean eval/episodes
time/steps time/seconds time/steps_per_second time/rollout_seconds time/update_seconds
time/certify_seconds train/kl_temperature train/gate_all_rows time/gate_seconds
train/entropy_is_exact train/critic_learning_rate
""".split()  # noqa: SIM905


def test_the_registry_holds_every_metric_of_the_product():
    assert set(REQUIRED) <= set(REGISTRY)


@pytest.mark.parametrize("name", REGISTRY)
def test_an_entry_is_complete(name):
    entry = REGISTRY[name]
    assert entry.name == name
    assert entry.formula
    assert entry.reduction
    assert entry.unit
    assert entry.meaning.endswith(".")
    assert set(entry.aliases) <= set(SOURCES)
    if entry.healthy is not None:
        low, high = entry.healthy
        assert low is not None or high is not None
        assert low is None or high is None or low <= high


@pytest.mark.parametrize("source", SOURCES)
def test_a_foreign_name_means_one_thing(source):
    names = [a.name for m in REGISTRY.values() for a in m.aliases.get(source, ())]
    assert names
    assert len(names) == len(set(names))
    for entry in REGISTRY.values():
        for alias in entry.aliases.get(source, ()):
            found = canonical(alias.name.replace("*", "default_policy"), source)
            expected = (entry.name, alias.scale, alias.offset)
            assert found == expected


def test_a_metric_of_one_agent_is_found_by_its_suffix():
    assert metric("train/kl_exact/industry") is REGISTRY["train/kl_exact"]
    assert metric("train/kl_exact") is REGISTRY["train/kl_exact"]


def test_an_unknown_metric_is_an_error_with_a_suggestion():
    with pytest.raises(InputError, match=r"did you mean 'train/kl_exact'\?"):
        metric("train/kl_exakt")


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("train/entropy_loss", "sb3", ("train/entropy", -1.0)),  # theirs is −H
        ("train/value_loss", "sb3", ("train/value_loss", 0.5)),  # theirs lacks the half
        ("losses/value_loss", "cleanrl", ("train/value_loss", 1.0)),
        ("losses/old_approx_kl", "cleanrl", ("train/kl_k1", 1.0)),
        ("train/kl_divergence_loss", "sb3", ("train/kl_reverse", 1.0)),
        ("train/policy_objective", "sb3", ("train/policy_loss", -1.0)),
        ("objective/kl", "trl", ("train/kl_reference", 1.0)),  # to the reference, not to old
        ("actor/ppo_kl", "verl", ("train/kl_k1", 1.0)),
        ("learners/default_policy/mean_kl_loss", "rllib", ("train/approx_kl", 1.0)),
        ("learners/industry/entropy", "rllib", ("train/entropy/industry", 1.0)),
        ("info/learner/p0/learner_stats/vf_loss", "rllib", ("train/value_loss/p0", 0.5)),
        ("ray/tune/env_runners/episode_return_mean", "rllib", ("rollout/return_mean", 1.0)),
        ("curr_kl_coeff", "rllib", ("train/kl_coef", 1.0)),
        ("train/approx_kl", "sb3", ("train/approx_kl", 1.0)),  # k3
        ("train/approx_kl", "origins", ("train/kl_approx", 1.0)),  # k1: old − new log-prob
        ("train/kl_approx", "origins", ("train/kl_approx", 1.0)),
        ("clipfrac", "origins", ("train/clip_fraction", 1.0)),
        ("train/frac_reward_zero_std", "trl", ("rollout/informative", -1.0, 1.0)),
        ("eval_reward", "trl", ("eval/return_mean", 1.0)),
        ("eval/completions/mean_length", "trl", ("eval/length_mean", 1.0)),
        ("rewards/format/mean", "trl", ("rollout/reward/format", 1.0)),
        ("reward_std", "swift", ("rollout/reward_std_group", 1.0)),
        ("reward_std", "trl", ("rollout/reward_std", 1.0)),
        ("response_length/clip_ratio", "verl", ("rollout/ended", -1.0, 1.0)),
        ("val-core/openai/gsm8k/acc/mean@1", "verl", ("eval/reward_heldout", 1.0)),
        ("train/ppo_kl", "openrlhf", ("train/kl_k1", 1.0)),
        ("Mean value_function loss", "rsl_rl", ("train/value_loss", 0.5)),
        ("Loss/value", "rsl_rl", ("train/value_loss", 0.5)),
        ("LS_OK", "origins", ("train/line_search_success", 1.0)),
    ],
)
def test_foreign_names_are_translated_with_sign_and_scale(name, source, expected):
    assert canonical(name, source) == Canonical(*expected)


def test_a_share_of_the_others_is_translated_with_an_offset():
    ended = canonical("completions/clipped_ratio", "trl")
    assert ended == Canonical("rollout/ended", -1.0, 1.0)
    assert ended.convert(0.25) == 0.75
    assert "trl 1 − `completions/clipped_ratio`" in documentation()


@pytest.mark.parametrize("name", ["train/n_updates", "learners/p0/cross_entropy", "x/entropy", ""])
def test_a_foreign_name_without_counterpart_is_none(name):
    assert canonical(name, "rllib") is None


def test_an_unknown_source_is_an_error():
    with pytest.raises(InputError, match="did you mean 'cleanrl'"):
        canonical("losses/entropy", "cleanrll")


def test_healthy_ranges_by_rule_of_thumb_are_recorded():
    clip = metric("train/clip_fraction")
    assert clip.healthy == (None, 0.3)  # less than 0.1 is no alarm
    assert "rule of thumb: 0.1–0.3" in clip.healthy_note
    assert "target_kl" in metric("train/approx_kl").healthy_note
    assert metric("warn/extreme_ratio_max").healthy == (None, 10.0)
    assert "falls slowly" in metric("train/entropy").healthy_note


def test_healthy_ranges_judge_values():
    clip = metric("train/clip_fraction")
    assert [clip.is_healthy(x) for x in (0.0, 0.1, 0.3, 1.0)] == [True, True, True, False]
    assert clip.is_healthy(float("nan")) is False
    assert metric("warn/extreme_ratio_max").is_healthy(-5.0) is True
    assert metric("train/entropy").is_healthy(1.0) is None
    kl = metric("train/kl_exact")
    assert [kl.is_healthy(x) for x in (0.0, 0.05, 0.06)] == [True, True, False]
    assert kl.is_healthy(0.06, {"train/max_kl": 0.1}) is True
    assert kl.is_healthy(0.04, {"train/max_kl": 0.02}) is False


def test_the_documentation_page_describes_every_metric():
    page = documentation()
    headings = [line for line in page.splitlines() if line.startswith("### ")]
    assert sorted(headings) == sorted(f"### `{name}`" for name in REGISTRY)
    assert page.count("- **Formula:** ") == len(REGISTRY)
    assert "−`train/entropy_loss`" in page
    assert "0.5 × `train/value_loss`" in page
    assert "- **Healthy:** 0 … `train/max_kl`: Keel: at most max_kl" in page
    assert "- **Healthy:** ≥ 0.3, mean of 20 updates: rule of thumb: below 30 %" in page


def test_reading_runs_needs_no_torch():
    script = "import sys, keel.tracking; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_no_entry_stands_twice_in_a_file_of_the_catalogue():
    """YAML itself would let the last one win without a word."""
    for path in (Path(metrics.__file__).parent / "catalogue").glob("*.yaml"):
        names = re.findall(r"^(\S+):", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert names
        assert len(names) == len(set(names)), path.name


def test_demonstrations_dominate_where_the_registry_says_so():
    assert metric("train/bc_gradient_ratio").healthy == (None, DOMINATES)
