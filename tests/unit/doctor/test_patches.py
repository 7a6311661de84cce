"""Fixes in the words of other frameworks: names, values, and what is not known."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import yaml

import keel.doctor.rules
from keel.apps.language.config import Language
from keel.config import Config
from keel.config.origins import leaves
from keel.doctor.dialects import DIALECTS, SAME, dialect_of
from keel.doctor.finding import Change, Fix
from keel.doctor.patches import patch, patched, snippet

KEEL = {name for config in (Config(), Language()) for name, _ in leaves(config)}
RATE = Fix("lower the learning rate", (Change("region.learning_rate", times=0.3),))
KNOWN = {"region.learning_rate": 0.0025, "rollout_steps": 128, "envs.num": 4}


@pytest.mark.parametrize(
    ("framework", "lines"),
    [
        ("keel", ["- region.learning_rate: 0.0025", "+ region.learning_rate: 0.00075"]),
        ("sb3", ["- learning_rate=0.0025", "+ learning_rate=0.00075  # PPO(…)"]),
        ("cleanrl", ["- --learning-rate 0.0025", "+ --learning-rate 0.00075"]),
        ("trl", ["- learning_rate=0.0025", "+ learning_rate=0.00075  # GRPOConfig(…)"]),
        (
            "verl",
            [
                "- actor_rollout_ref.actor.optim.lr=0.0025",
                "+ actor_rollout_ref.actor.optim.lr=0.00075",
            ],
        ),
        ("openrlhf", ["- --actor_learning_rate 0.0025", "+ --actor_learning_rate 0.00075"]),
        ("rllib", ["- lr=0.0025", "+ lr=0.00075  # .training(…)"]),
        ("rsl_rl", ["- algorithm.learning_rate: 0.0025", "+ algorithm.learning_rate: 0.00075"]),
        ("swift", ["- --learning_rate 0.0025", "+ --learning_rate 0.00075"]),
        ("csv", ["- region.learning_rate: 0.0025", "+ region.learning_rate: 0.00075"]),
    ],
)
def test_a_learning_rate_in_every_framework(framework: str, lines: list[str]) -> None:
    (change,) = patch(RATE, framework, KNOWN)
    assert change.lines() == lines
    assert change.new == pytest.approx(0.3 * 0.0025)


def test_a_factor_of_an_unknown_value_stays_a_factor() -> None:
    (change,) = patch(RATE, "sb3", {})
    assert change.lines() == ["+ learning_rate=0.3 × its value  # PPO(…)"]
    assert (change.old, change.new, change.as_dict()["times"]) == (None, None, 0.3)


def test_whole_numbers_stay_whole_and_positive() -> None:
    fix = Fix("", (Change("region.epochs", times=0.3), Change("rollout_steps", times=2.0)))
    epochs, steps = patch(fix, "keel", {"region.epochs": 1, "rollout_steps": 128})
    assert (epochs.new, steps.new) == (1, 256)


def test_minibatches_are_counted_where_the_framework_counts_them() -> None:
    """512 rows in minibatches of 64 are 8 of them; twice as large they are 4."""
    fix = Fix("", (Change("region.minibatch", times=2.0),))
    (change,) = patch(fix, "cleanrl", {**KNOWN, "region.minibatch": 64})
    assert change.lines()[0] == "- --num-minibatches 8"
    assert change.lines()[1].startswith("+ --num-minibatches 4 ")
    (unknown,) = patch(fix, "cleanrl", {})
    assert unknown.value == "0.5 × its value"


def test_values_are_translated_with_the_names() -> None:
    fix = Fix("", (Change("advantage.normalize", to="batch"), Change("network.log_std", to=0.0)))
    normalize, _ = patch(fix, "sb3", {})
    assert (normalize.name, normalize.new) == ("normalize_advantage", True)
    _, std = patch(fix, "rsl_rl", {})
    assert (std.name, std.new) == ("init_noise_std", 1.0)
    (loss,) = patch(Fix("", (Change("region.reduction", to="token-mean"),)), "trl", {})
    assert loss.line(loss.value) == "loss_type='dapo'"


def test_a_setting_that_a_framework_lacks_is_said_to_be_missing() -> None:
    fix = Fix("", (Change("natural.damping", to=0.2),))
    (change,) = patch(fix, "cleanrl", {})
    assert change.name is None
    assert change.lines() == ["  natural.damping → 0.2 (there is no setting for it)"]
    assert snippet([change], "cleanrl", {}) == ["# natural.damping: 0.2: no setting for it"]


def test_the_algorithm_decides_between_names() -> None:
    (change,) = patch(Fix("", (Change("region.epochs", to=1),)), "trl", {"algo": "ppo"})
    assert (change.where, change.name) == ("PPOConfig", "num_ppo_epochs")
    (change,) = patch(Fix("", (Change("region.max_kl", to=0.01),)), "sb3", {"algo": "trpo"})
    assert (change.where, change.name) == ("TRPO", "target_kl")


def test_kinds_of_runs_that_name_a_setting_differently() -> None:
    fix = Fix("", (Change("explore.entropy_coef", times=2.0),))
    (change,) = patch(fix, "keel", {"region.entropy_coef": 0.01})
    assert (change.setting, change.new) == ("region.entropy_coef", 0.02)
    (change,) = patch(fix, "verl", {})
    assert change.name == "actor_rollout_ref.actor.entropy_coeff"


@pytest.mark.parametrize(
    ("framework", "lines"),
    [
        ("sb3", ["PPO(learning_rate=0.00075, …)", "VecNormalize(norm_reward=True, …)"]),
        ("cleanrl", ["# envs.normalize_reward: true: no setting for it",
                     "python ppo.py --learning-rate 0.00075 …"]),
        ("verl", ["# envs.normalize_reward: true: no setting for it",
                  "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.optim.lr=0.00075 …"]),
        ("rsl_rl", ["# envs.normalize_reward: true: no setting for it",
                    "algorithm:", "  learning_rate: 0.00075"]),
    ],
)  # fmt: skip
def test_snippets(framework: str, lines: list[str]) -> None:
    fix = Fix("", (*RATE.changes, Change("envs.normalize_reward", to=True)))
    told = snippet(patch(fix, framework, KNOWN), framework, KNOWN)
    assert [line.replace("True:", "true:") for line in told] == lines


@pytest.mark.parametrize("value", [3e-05, 0.1, 1e-7, 12, True, None, "group"])
def test_yaml_reads_values_as_they_were(value: object) -> None:
    """YAML 1.1 takes 3e-05 for a word."""
    (change,) = patch(Fix("", (Change("region.learning_rate", to=value),)), "rsl_rl", {})
    assert yaml.safe_load(f"x: {change.value}") == {"x": value}


def test_patched_settings_leave_out_what_is_not_known() -> None:
    changes = patch(Fix("", (*RATE.changes, Change("region.target_kl", times=2.0))), "keel", KNOWN)
    assert patched(KNOWN, changes) == {**KNOWN, "region.learning_rate": 0.00075}


@pytest.mark.parametrize("framework", DIALECTS)
def test_every_name_belongs_to_a_setting_of_keel(framework: str) -> None:
    assert set(DIALECTS[framework].names) <= KEEL


def test_other_names_are_settings_of_keel() -> None:
    assert set(SAME.values()) <= KEEL


def test_names_of_stable_baselines() -> None:
    """They are keywords of its classes, where it is installed."""
    sb3 = pytest.importorskip("stable_baselines3")
    vec_normalize = pytest.importorskip("stable_baselines3.common.vec_env").VecNormalize
    calls = {"PPO": sb3.PPO, "VecNormalize": vec_normalize}
    for there in DIALECTS["sb3"].names.values():
        if (call := calls.get(there.where or "PPO")) is not None:
            name = there.name.partition("[")[0]
            assert name in inspect.signature(call.__init__).parameters, name


def test_every_fix_of_a_rule_is_a_setting_of_keel() -> None:
    """`Change("…")` in the source of the rules, so that `--fix` can write it."""
    for file in sorted(Path(keel.doctor.rules.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Change":
                name = node.args[0] if node.args else None
                if isinstance(name, ast.Constant):
                    assert name.value in KEEL | set(SAME), f"{file.name}:{node.lineno}"


def test_keel_and_tables_of_unknown_origin_have_keels_own_names() -> None:
    assert dialect_of("keel", {}) is None
    assert dialect_of("csv", {"algo": "ppo"}) is None
