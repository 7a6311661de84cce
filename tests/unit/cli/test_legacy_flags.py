"""Every command line of the five notes, as printed, and what it comes to in Keel.

The notes are those of docs/origins/the-five-notes.md. Notes 000 and 003 print no command; their
settings are tried one by one below.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from keel.cli import main
from keel.cli.arguments import split_flags, take_list
from keel.cli.environments import resolve
from keel.cli.legacy_flags import (
    ALIASES,
    AMBIGUOUS,
    IN_CONTEXT,
    REWARD_PARAMETERS,
    SWITCHES,
    settle,
    take,
    translate_train,
)
from keel.config.origins import leaves
from keel.config.values import named_values
from keel.presets import preset


class Command(NamedTuple):
    """A command of a note, the program's name in it, Keel's in its place, and what it sets."""

    note: str
    printed: str
    program: str
    ours: str
    settings: Mapping[str, Any]
    preset: str = ""
    """from which everything else comes"""


V2 = {
    "program": "python train_optimized.py",
    "ours": "keel train Breakout --preset breakout-trpo-stabilized",
}
TRAIN = {"program": "python train.py", "ours": "keel train CartPole-v1"}
COMMANDS = [
    Command(
        "001, test 1",
        "python train.py --config baseline_config.yaml --seed 42",
        "python train.py",
        "keel train",
        {"env": "Pendulum-v1", "seed": 42, "region.max_log_ratio": 20.0},
    ),
    Command(
        "001, test 3, no normalization",
        "python train.py --normalize_advantage=false --seed=$seed --tag=no_norm",
        **TRAIN,
        settings={"advantage.normalize": "none", "seed": 42, "tag": "no_norm"},
        preset="CartPole",
    ),
    Command(
        "001, test 3, global normalization (current)",
        "python train.py --normalize_advantage=true --group_norm=true --seed=$seed "
        "--tag=global_norm",
        **TRAIN,
        settings={"advantage.normalize": "global", "seed": 42, "tag": "global_norm"},
        preset="CartPole",
    ),
    Command(
        "001, test 3, per-group normalization",
        "python train.py --normalize_advantage=true --group_norm=false --seed=$seed "
        "--tag=group_norm",
        **TRAIN,
        settings={"advantage.normalize": "group", "seed": 42, "tag": "group_norm"},
        preset="CartPole",
    ),
    Command(
        "002, 8.1",
        "jupyter notebook train.ipynb",
        "jupyter notebook train.ipynb",
        "keel train Breakout --preset breakout-trpo-one-env",
        {},
        "breakout-trpo-one-env",
    ),
    Command(
        "002, 8.2, default",
        "python train_optimized.py",
        **V2,
        settings={},
        preset="breakout-trpo-stabilized",
    ),
    Command(
        "002, 8.2, own",
        """python train_optimized.py \\
    --n_envs 8 \\
    --total_steps 10000000 \\
    --entropy_coef 0.05 \\
    --max_kl 0.02
""",
        **V2,
        settings={
            "envs.num": 8,
            "total_steps": 10_000_000,
            "explore.entropy_coef": 0.05,
            "region.max_kl": 0.02,
        },
        preset="breakout-trpo-stabilized",
    ),
    Command(
        "002, 8.3, unstable",
        "python train_optimized.py --max_kl 0.01 --damping 0.1",
        **V2,
        settings={"region.max_kl": 0.01, "natural.damping": 0.1},
        preset="breakout-trpo-stabilized",
    ),
    Command(
        "002, 8.3, exploration",
        "python train_optimized.py --entropy_coef 0.08 --entropy_decay 0.9999",
        **V2,
        settings={"explore.entropy_coef": 0.08, "explore.entropy_decay": 0.9999},
        preset="breakout-trpo-stabilized",
    ),
    Command(
        "002, 8.3, memory",
        "python train_optimized.py --n_envs 4 --batch_size 64 --rollout_steps 256",
        **V2,
        settings={"envs.num": 4, "region.minibatch": 64, "rollout_steps": 256},
        preset="breakout-trpo-stabilized",
    ),
    Command(
        "002, 9.4",
        """python train_optimized.py \\
  --total_steps 10000000 \\
  --n_envs 8 \\
  --max_kl 0.02 \\
  --damping 0.05 \\
  --ls_fail_threshold 20
""",
        **V2,
        settings={
            "total_steps": 10_000_000,
            "envs.num": 8,
            "region.max_kl": 0.02,
            "natural.damping": 0.05,
            "stabilizer.ls_fail_threshold": 20,
        },
        preset="breakout-trpo-stabilized",
    ),
    Command(
        "004",
        """python -m vidur.main \\
  --global_scheduler_config_type ppo_modular \\
  --cluster_config_num_replicas 4 \\
  --p_p_o_global_scheduler_modular_config_entropy_coef 0.25 \\
  --p_p_o_global_scheduler_modular_config_latency_threshold 6.0 \\
  --p_p_o_global_scheduler_modular_config_latency_penalty_scale 0.5 \\
  --p_p_o_global_scheduler_modular_config_load_balance_penalty 0.15 \\
  --p_p_o_global_scheduler_modular_config_throughput_target 0.05 \\
  --p_p_o_global_scheduler_modular_config_absolute_weight 0.8 \\
  --p_p_o_global_scheduler_modular_config_delta_weight 0.2 \\
  --p_p_o_global_scheduler_modular_config_alpha 0.1 \\
  --p_p_o_global_scheduler_modular_config_kappa 0.05 \\
  --p_p_o_global_scheduler_modular_config_sigma 2.0 \\
  --p_p_o_global_scheduler_modular_config_target_kl 0.01 \\
  --p_p_o_global_scheduler_modular_config_entropy_min 0.5 \\
  --p_p_o_global_scheduler_modular_config_kl_coef 0.2 \\
  --p_p_o_global_scheduler_modular_config_enable_dynamic_temperature \\
  # ... 其他现有参数
""",
        "python -m vidur.main",
        "keel train serving",
        {
            "env": "serving",
            "envs.options": {
                "setting": "light-load",
                "reward": "throughput",
                "version": "after",
                "replicas": 4,
                "latency_threshold": 6.0,
                "latency_penalty_scale": 0.5,
                "load_balance_penalty": 0.15,
                "throughput_target": 0.05,
                "absolute_weight": 0.8,
                "delta_weight": 0.2,
                "alpha": 0.1,
                "kappa": 0.05,
                "sigma": 2.0,
            },
            "explore.entropy_coef": 0.25,
            "region.target_kl": 0.01,
            "explore.entropy_floor": 0.5,
            "region.kl_coef": 0.2,
            "explore.pulses": True,
        },
        "router-rebalanced",
    ),
]


def ours(command: Command) -> list[str]:
    """The words after `keel`, as a shell would split them."""
    assert command.printed.startswith(command.program)
    line = command.printed.replace(command.program, command.ours, 1)
    line = line.replace("\\\n", " ").replace("$seed", "42")
    program, *words = shlex.split(line, comments=True)
    assert program == "keel"
    return words


def in_force(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    """Every setting that a command line comes to, and its source."""
    assert main([*words, "--print-config", "--json"]) == 0
    settings: dict[str, dict[str, Any]] = json.loads(capsys.readouterr().out)
    return settings


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which a command line is refused, with status 2."""
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return str(line)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda x: x.note)
def test_the_notes_commands_set_what_the_notes_mean(
    command: Command,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "baseline_config.yaml").write_text(
        "env: Pendulum-v1\nregion: {max_log_ratio: 20.0}\n"
    )
    monkeypatch.chdir(tmp_path)
    settings = in_force(capsys, *ours(command))
    values = {name: setting["value"] for name, setting in settings.items()}
    expected = dict(command.settings)
    if "envs.options" in expected:
        assert named_values(values["envs.options"], "options") == expected.pop("envs.options")
        values.pop("envs.options")
    assert {name: values[name] for name in expected} == expected
    if command.preset:  # nothing else has changed
        others = dict(leaves(preset(command.preset)))
        changed = {name for name in values if values[name] != others[name]}
        assert changed <= {*expected, "env"}


def test_the_notes_command_for_help_shows_the_note(capsys: pytest.CaptureFixture[str]) -> None:
    """Note 002, 8.2: `python train_optimized.py --help`."""
    words = ours(Command("", "python train_optimized.py --help", **V2, settings={}))
    assert main(words) == 0
    assert "--natural.damping" in capsys.readouterr().out


def test_the_notes_command_compares_runs_by_their_tags(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Note 001, test 3: `python compare_runs.py --tags no_norm global_norm group_norm`."""
    monkeypatch.chdir(tmp_path)
    small = ["--total-steps", "64", "--rollout-steps", "16", "--envs.num", "2",
             "--region.minibatch", "32", "--evaluation.episodes", "1", "--quiet"]  # fmt: skip
    for tag in ("no_norm", "global_norm", "group_norm", "other"):
        assert main(["train", "CartPole-v1", "--name", tag, "--tag", tag, *small]) == 0
    capsys.readouterr()
    assert main(["compare", "--tags", "no_norm", "global_norm", "group_norm", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    pairs = {(pair["variant"], pair["baseline"]) for pair in compared["pairs"]}
    assert pairs == {("global_norm", "no_norm"), ("group_norm", "no_norm")}
    line = complaint(capsys, "compare", "--tags", "no_norm", "globl_norm")
    assert line.endswith("did you mean 'global_norm'?")


def test_tags_end_at_the_next_flag() -> None:
    assert take_list(split_flags(["runs", "--tags", "a", "b", "--by=tag"]), "--tags") == (
        ["a", "b"], ["runs", "--by", "tag"],
    )  # fmt: skip
    assert take_list(split_flags(["--tags=a", "b"]), "--tags") == (["a", "b"], [])
    assert take_list(["runs/A", "runs/B"], "--tags") == ([], ["runs/A", "runs/B"])


# --- one by one -----------------------------------------------------------------------------------

COLLAPSE = ("serving", "--preset", "router-collapse")


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (("CartPole-v1", "--actor_lr", "5e-5"), {"region.learning_rate": 5e-5}),
        (("CartPole-v1", "--ent_coef", "0.08"), {"explore.entropy_coef": 0.08}),
        (("CartPole-v1", "--cliprange", "0.2"), {"region.clip": 0.2}),
        (("CartPole-v1", "--normalize_advantage", "true"), {"advantage.normalize": "batch"}),
        (("CartPole-v1", "--normalize-advantage"), {"advantage.normalize": "batch"}),
        (("CartPole-v1", "--normalize_advantage", "False"), {"advantage.normalize": "none"}),
        (("CartPole-v1", "--normalize-advantage", "robust"), {"advantage.normalize": "robust"}),
        (("CartPole-v1", "--group_norm", "false"), {"advantage.normalize": "group"}),
        (
            ("CartPole-v1", "--demos.path", "shown", "--bc_coef", "0.5"),
            {"demos.coef": 0.5, "demos.control": "adaptive"},
        ),
        (
            ("CartPole-v1", "--demos.path", "shown", "--adaptive_bc_coef", "false"),
            {"demos.control": "fixed"},
        ),
        (("CartPole-v1", "--demos.path", "x", "--adaptive_bc_coef"), {"demos.control": "adaptive"}),
        ((*COLLAPSE, "--enable_dynamic_temperature"), {"explore.pulses": True}),
        ((*COLLAPSE, "--enable_dynamic_temperature=false"), {"explore.pulses": False}),
        (("CartPole-v1", "--enable_decoupled_ac"), {"network.kind": "decoupled"}),
        ((*COLLAPSE, "--enable_decoupled_ac", "false"), {"network.kind": "auto"}),
        (("language", "--actor_lr", "1e-6", "--cliprange", "0.1", "--ent_coef", "0.001"),
         {"region.learning_rate": 1e-6, "region.clip": 0.1, "region.entropy_coef": 0.001}),
    ],
)  # fmt: skip
def test_a_notes_name_sets_its_setting(
    words: tuple[str, ...], settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = in_force(capsys, "train", *words)
    assert {name: found[name]["value"] for name in settings} == settings
    changed = settings.keys() - {"demos.control"}
    assert all(found[name]["source"] == "flag" for name in changed)


@pytest.mark.parametrize("scale", [500.0, 2000.0, 3000.0])
def test_a_legacy_scale_divides_the_rewards_of_land(
    scale: float, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["land", "--reward_scale", f"{scale:g}", "--actor_lr", "5e-5", "--ent_coef", "0.08"]
    found = in_force(capsys, "train", *words, "--envs.options", "reward=legacy")
    options = named_values(found["envs.options"]["value"], "options")
    assert options == {"reward": "legacy", "scale": scale}
    assert found["region.learning_rate"]["value"] == 5e-5
    assert found["explore.entropy_coef"]["value"] == 0.08


@pytest.mark.parametrize("flag", [*REWARD_PARAMETERS, *AMBIGUOUS])
@pytest.mark.parametrize("version", ["before", "after"])
def test_parameters_of_the_throughput_reward_go_with_its_presets(flag: str, version: str) -> None:
    """Into `envs.options`, beside those of the preset, and from there into the reward."""
    from keel.apps.serving.vector import vector_env

    name = flag[2:].replace("-", "_")
    words = ["serving", "--preset", f"note-004-{version}", f"--{name}", "0.625"]
    config = resolve(settle(translate_train(words), resolve)).options.config
    before = named_values(preset(f"note-004-{version}").envs.options, "options")
    options = named_values(config.envs.options, "options")
    assert options == {**before, name: 0.625}
    assert getattr(vector_env(1, **options).reward_rules, name) == 0.625


def test_a_file_or_flag_with_that_reward_will_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("env: serving\nenvs: {options: {reward: note-004, refresh: 2.0}}\n")
    found = in_force(capsys, "train", "--config", str(file), "--alpha", "0.3")
    options = named_values(found["envs.options"]["value"], "options")
    assert options == {"reward": "note-004", "refresh": 2.0, "alpha": 0.3}
    words = ["serving", "--envs.options", "reward=note-004", "--kappa", "0.2", "--kappa", "0.1"]
    found = in_force(capsys, "train", *words)
    options = named_values(found["envs.options"]["value"], "options")
    assert options == {"reward": "note-004", "kappa": 0.1}


def test_code_that_a_file_names_is_not_trusted_for_a_notes_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options of the file are repeated on the command line, and are not the user's own."""
    file = tmp_path / "mine.yaml"
    file.write_text("env: serving\nenvs: {options: {reward: note-004, hook: 'mine:thing'}}\n")
    words = ["train", "--config", str(file), "--alpha", "0.3"]
    assert "names code from outside of Keel" in complaint(capsys, *words)
    assert "names code from outside of Keel" in complaint(capsys, *words, "--seeds", "0", "1")


def test_a_named_preset_goes_before_that_of_the_scheduler(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*COLLAPSE, "--global_scheduler_config_type", "ppo_modular"]
    found = in_force(capsys, "train", *words)
    assert found["explore.pulse_interval"]["source"] == "preset router-collapse"


# --- what is refused, and what is told ------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--alpha", "--kappa", "--sigma"])
@pytest.mark.parametrize("env", ["CartPole-v1", "serving"])
def test_ambiguous_names_are_unknown_without_the_note(
    env: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"train: unrecognized options: {flag}" in complaint(capsys, "train", env, flag, "0.1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "serving --throughput_target 0.05",
            "--throughput_target: a parameter of the throughput reward, which is not in use; begin "
            "with keel train serving --preset router-rebalanced",
        ),
        (
            "serving --preset router-rebalanced --latency_threshold six",
            "--latency_threshold: expected a number, got 'six'",
        ),
        ("serving --preset router-rebalanced --alpha", "--alpha: expected a value"),
        (
            "CartPole-v1 --reward_scale 3000",
            "--reward_scale: only land divides its rewards by a number; on CartPole-v1 use "
            "--envs.normalize-reward, which divides by the deviation of the return",
        ),
        (
            "Hopper-v5 --algo trpo --actor_lr 1e-4",
            "--actor_lr: the step of TRPO's policy has no learning rate, --max_kl bounds it; "
            "--critic_lr is the critic's",
        ),
        (
            "CartPole-v1 --actor_lr 1e-4 --learning_rate 1e-3",
            "--actor_lr: 1e-4, but --region.learning-rate is set to 0.001 as well; say one of them",
        ),
        (
            "CartPole-v1 --normalize_advantage=false --group_norm=true",
            "--group_norm: --normalize_advantage asks for 'none'; say one of them, or "
            "--advantage.normalize none|batch|group|robust",
        ),
        ("CartPole-v1 --group_norm maybe", "--group_norm: expected true or false, got 'maybe'"),
        ("CartPole-v1 --bc_coef 0.5", "demos.coef: needs demonstrations, --demos.path DIR"),
        (
            "serving --global_scheduler_config_type round_robin",
            "--global_scheduler_config_type: only ppo_modular is trained, got 'round_robin'; "
            "heuristics are judged by keel serving judge",
        ),
        (
            "CartPole-v1 --cluster_config_num_replicas 4",
            "--cluster_config_num_replicas: belongs to serving, this is CartPole-v1",
        ),
        (
            "serving --cluster_config_num_replicas 1.5",
            "--cluster_config_num_replicas: expected a whole number, got '1.5'",
        ),
    ],
)
def test_what_keel_has_not_is_refused_in_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint(capsys, "train", *words.split()) == f"keel: {message}"


def test_actor_and_critic_have_learning_rates_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["CartPole-v1", "--actor_lr", "1e-4", "--critic_lr", "1e-3"]
    settings = in_force(capsys, "train", *words)
    assert settings["region.learning_rate"]["value"] == 1e-4
    assert settings["region.critic_learning_rate"]["value"] == 1e-3
    trpo = in_force(capsys, "train", "Hopper-v5", "--algo", "trpo", "--critic_lr", "2e-3")
    assert trpo["region.learning_rate"]["value"] == 2e-3


def test_one_learning_rate_twice_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["CartPole-v1", "--actor_lr", "1e-4", "--learning_rate", "1e-4"]
    assert in_force(capsys, "train", *words)["region.learning_rate"]["value"] == 1e-4


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("CartPole-v1", "--group_norm", "true"),
            "keel: --group_norm true normalizes advantages over the whole batch "
            "(--advantage.normalize global)",
        ),
        (
            (*COLLAPSE, "--latency_penalty_scale", "5"),
            "keel: --latency_penalty_scale scales env/latency_threshold_penalty, which the "
            'throughput reward logs and does not subtract; --envs.options "…,mode=instant" or '
            "mode=delta does",
        ),
    ],
)
def test_a_name_that_misleads_says_what_it_does(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words, "--print-config"]) == 0
    assert capsys.readouterr().err == f"{told}\n"


def test_the_legacy_reward_has_nothing_to_tell(capsys: pytest.CaptureFixture[str]) -> None:
    options = "reward=note-004,mode=instant"
    words = ["serving", "--envs.options", options, "--latency_penalty_scale", "5", "--print-config"]
    assert main(["train", *words]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("ask", ["--help", "--help-all"])
def test_the_notes_names_are_hidden(ask: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) if ask == "--help-all" else nullcontext():
        main(["train", *COLLAPSE, ask, "--alpha", "0.1"])
    words = capsys.readouterr().out.replace("│", " ").split()
    hidden = {*ALIASES, *SWITCHES, *IN_CONTEXT, "--group-norm", "--normalize-advantage"}
    assert not hidden & {word.rstrip(",") for word in words}


def test_words_without_a_notes_name_are_left_alone() -> None:
    words = ["CartPole-v1", "--seed", "3", "--region.max-kl", "0.1", "--seeds", "0", "1"]
    assert translate_train(words) == words
    assert settle(words, resolve) == words
    assert take(["--a", "--b", "1"], "--a", "true") == ("true", ["--b", "1"])


def test_ablate_and_tune_know_the_notes_names(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serving", "--preset", "router-rebalanced", "--vary", "seed=1,2", "--dry-run"]
    assert main(["ablate", *words, "--alpha", "0.3", "--enable_dynamic_temperature"]) == 0
    assert main(["ablate", "land-causes", "--dry-run", "--actor_lr", "1e-4"]) == 0
    capsys.readouterr()
    line = complaint(capsys, "tune", "CartPole-v1", "--reward_scale", "2", "--trials", "1")
    assert "only land divides its rewards" in line
