"""Logs of every framework as it prints them, each a small true sample, in Keel's names."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from keel.errors import InputError
from keel.tracking.logs import FORMATS, find_logs, read_log
from keel.tracking.logs.layouts import read_blocks, read_dicts, read_steps, read_table
from keel.tracking.logs.names import Names, keel_name, recognize
from keel.tracking.metrics import Canonical

SAMPLES = Path(__file__).parents[2] / "data" / "logs"

EXPECTED = [
    ("sb3_console.txt", "sb3", "console tables", "train/entropy", [512, 768, 1024], [0.693, 0.692]),
    (
        "sb3_progress.csv",
        "sb3",
        "sb3_progress.csv",
        "rollout/return_mean",
        [256, 512, 768, 1024],
        [],
    ),
    ("sb3.monitor.csv", "sb3", "monitor.csv", "rollout/length_mean", None, [25.0, 55.0, 14.0]),
    ("trl_console.txt", "trl", "a Python dictionary a line", "rollout/ended", range(1, 7), [0.5]),
    ("trl_console_2025.txt", "trl", "a Python dictionary a line", "rollout/ended", [1, 2], [0.875]),
    ("trainer_state.json", "trl", "trainer_state.json", "eval/return_mean", [3, 6], []),
    (
        "verl_console.txt",
        "verl",
        "console lines step:N - name:value",
        "train/sampler_gap",
        [1, 2, 3],
        [0.0041, 0.0041, 0.0041],
    ),
    ("verl_file.jsonl", "verl", "JSON lines", "rollout/ended", [1, 2, 3], [0.78125]),
    (
        "openrlhf_console.txt",
        "openrlhf",
        "a Python dictionary a line",
        "rollout/ended",
        [1, 2, 3],
        [0.96875],
    ),
    ("rllib_progress.csv", "rllib", "rllib_progress.csv", "train/value_loss", [4000, 8000], [4.1]),
    ("rllib_result.json", "rllib", "JSON lines", "train/value_loss", [4000, 8000], [4.0, 4.0]),
    (
        "rsl_rl_console.txt",
        "rsl_rl",
        "console blocks",
        "train/value_loss",
        [98304, 196608, 294912, 393216],
        [0.02105, math.inf, 0.06315],
    ),
    ("rsl_rl_console_old.txt", "rsl_rl", "console blocks", "train/action_std", [824868864], [0.93]),
    ("swift_logging.jsonl", "swift", "JSON lines", "rollout/informative", [1, 2, 3], [0.625]),
    ("wandb_export.csv", "verl", "wandb_export.csv", "train/kl_k1", [1, 2], [0.0001, 0.0003]),
    ("wandb_history.jsonl", "cleanrl", "JSON lines", "train/approx_kl", [2048, 4096], [0.004]),
    ("own.jsonl", "csv", "JSON lines", "train/approx_kl", [1, 2], [0.01, 0.02]),
]


@pytest.mark.parametrize(("name", "framework", "layout", "metric", "steps", "values"), EXPECTED)
def test_a_log_is_recognized_and_read(name, framework, layout, metric, steps, values):
    log = read_log(SAMPLES / name)
    assert (log.framework, log.layout) == (framework, layout)
    points = log.points[metric]
    if steps is not None:
        assert points.step.tolist() == list(steps)
    assert points.values[: len(values)].tolist() == pytest.approx(values)


def test_every_sample_is_read():
    assert {path.name for path in SAMPLES.iterdir()} == {row[0] for row in EXPECTED}


def test_evaluations_stand_at_their_own_steps():
    """Two evaluations in six rows; a table has NaN where there is no value."""
    log = read_log(SAMPLES / "trainer_state.json")
    assert log.rows == 6
    table = log.table_of(["eval/return_mean", "rollout/return_mean"])
    assert np.isnan(table["eval/return_mean"]).tolist() == [True, True, False, True, True, False]
    assert not np.isnan(table["rollout/return_mean"]).any()
    printed = read_log(SAMPLES / "trl_console.txt")
    assert printed.points["eval/return_mean"].step.tolist() == [3, 6]
    assert printed.damage == ("the log has no steps: its rows are counted",)


def test_labels_are_the_names_in_the_log():
    log = read_log(SAMPLES / "trl_console.txt")
    assert log.labels["rollout/ended"] == "completions/clipped_ratio"
    assert log.labels["rollout/reward/exact"] == "rewards/exact/mean"
    assert "completions/min_length" in log.unmatched


def test_nan_is_told_from_silence_and_infinity_stays():
    log = read_log(SAMPLES / "trl_console_2025.txt")
    assert log.points["train/gradient_norm"].step.tolist() == [1]
    assert {name: steps.tolist() for name, steps in log.nans.items()} == {
        "train/gradient_norm": [2]
    }
    assert log.points["train/kl_reference"].values.tolist() == [0.0, math.inf]
    assert read_log(SAMPLES / "verl_console.txt").nans["train/gradient_norm"].tolist() == [3]


def test_of_two_names_of_a_metric_the_better_one_counts():
    log = read_log(SAMPLES / "openrlhf_console.txt")
    assert log.labels["rollout/return_mean"] == "rollout/reward_mean"
    assert log.points["rollout/return_mean"].values.tolist() == pytest.approx([0.43, 0.44, 0.45])


def test_a_line_that_was_cut_off_counts_up_to_the_cut():
    log = read_log(SAMPLES / "verl_console.txt")
    assert log.points["train/policy_loss"].step.tolist() == [1, 2, 3, 4]
    assert log.points["rollout/return_mean"].step.tolist() == [1, 2, 3]


def test_held_out_rewards_of_verl_are_read_in_their_own_row():
    points = read_log(SAMPLES / "verl_console.txt").points["eval/reward_heldout"]
    assert (points.step.tolist(), points.values.tolist()) == ([0], [0.31])


def test_settings_come_from_rllibs_results():
    settings = read_log(SAMPLES / "rllib_result.json").settings
    assert settings["region.learning_rate"] == 5e-05
    assert settings["advantage.lam"] == 1.0
    assert "model" not in settings


def test_settings_come_from_arguments_beside_the_log(tmp_path: Path):
    (tmp_path / "args.json").write_text('{"learning_rate": 1e-6, "beta": 0.04, "model": "x"}')
    (tmp_path / "logging.jsonl").write_text((SAMPLES / "swift_logging.jsonl").read_text())
    assert read_log(tmp_path / "logging.jsonl").settings == {
        "region.learning_rate": 1e-6,
        "kl.coef": 0.04,
    }


def test_settings_of_rsl_rl_come_from_isaaclabs_folder(tmp_path: Path):
    (tmp_path / "console.log").write_text((SAMPLES / "rsl_rl_console.txt").read_text())
    (tmp_path / "params").mkdir()
    agent = tmp_path / "params" / "agent.yaml"
    agent.write_text("seed: 42\nalgorithm:\n  clip_param: 0.2\n  desired_kl: 0.01\n")
    settings = read_log(tmp_path / "console.log").settings
    assert settings == {"seed": 42, "region.clip": 0.2, "region.target_kl": 0.01}
    agent.write_text("a: !!python/object/apply:os.abort []\n")
    assert read_log(tmp_path / "console.log").settings == {}


ROWS = [
    ("{'loss': 0.0, 'grad_norm': 1.2, 'learning_rate': 1e-06, 'kl': nan, 'epoch': 0.1}", "trl"),
    ("step:59 - actor/kl_loss:0.012 - actor/pg_clipfrac:0.002", "verl"),
    ("|    ep_rew_mean     | 22.3     |", "sb3"),
    ("   Learning iteration 8391/10000\n      Mean value_function loss: inf", "rsl_rl"),
    ('{"step": 3, "data": {"actor/ppo_kl": 0.1}}', "verl"),
]


@pytest.mark.parametrize(("text", "framework"), ROWS)
def test_a_single_row_is_enough(tmp_path: Path, text: str, framework: str):
    path = tmp_path / "pasted.txt"
    path.write_text(text)
    log = read_log(path)
    assert (log.framework, log.rows) == (framework, 1)
    assert len(log.points) + len(log.nans) >= 1


def test_rows_among_other_lines_are_found(tmp_path: Path):
    noise = "".join(f"INFO worker {i}: {{'not': 'numbers'}} | a | b\n" for i in range(200))
    path = tmp_path / "train.log"
    path.write_text(noise + (SAMPLES / "verl_console.txt").read_text() + noise)
    assert read_log(path).points["train/entropy"].step.tolist() == [1, 2, 3, 4]


def test_names_that_a_table_cut_or_lost_their_section_are_completed():
    lines = ["| train/ | |", "|    policy_gradient_l... | -0.1 |", "| ep_len_mean | 9 |"]
    (row,) = read_table(lines)
    assert row.values == {"train/policy_gradient_loss": -0.1, "train/ep_len_mean": 9.0}
    (row,) = read_table(["| ep_len_mean | 9 |"])
    assert row.values == {"rollout/ep_len_mean": 9.0}


def test_a_table_ends_where_a_name_comes_again():
    rows = list(read_table(["| time/ | |", "| fps | 1 |", "| fps | 2 |", "----", "| fps | 3 |"]))
    assert [list(row.values.values()) for row in rows] == [[1.0], [2.0], [3.0]]


def test_a_block_that_was_cut_before_its_total_has_the_one_that_would_follow():
    text = "\n".join(
        f" Learning iteration {i}/9 \n  Mean reward: {i}.5\n  Total timesteps: {100 * i + 100}"
        for i in range(3)
    )
    rows = list(read_blocks([*text.split("\n"), " Learning iteration 3/9", "  Mean reward: 3.5"]))
    assert [row.step for row in rows] == [100, 200, 300, 400]


def test_numbers_in_dictionaries_are_read_and_nothing_is_run():
    line = (
        "1 {'a': np.float64(0.5), 'b': '2/40', 'c': [1, {'d': 2}], 'e': \"x', 'f': 9\", 'g': -inf}"
    )
    (row,) = read_dicts([line])
    assert row.values == {"a": 0.5, "b": 2.0, "g": -math.inf}
    assert list(read_dicts(["{'a': __import__('os').abort()}", "{1: 2}", "{}"])) == []


def test_steps_of_verl_need_no_number_after_them():
    rows = list(read_steps(["step:3 - a/b:1e-3 - c:word - val-core/x:y/z:2.0 - ", "step: none"]))
    assert [(row.step, dict(row.values)) for row in rows] == [
        (3, {"a/b": 0.001, "val-core/x:y/z": 2})
    ]


def test_a_mapping_names_metrics_of_any_text(tmp_path: Path):
    path = tmp_path / "mine.log"
    path.write_text("{'frame': 10, 'score': 1.5}\n{'frame': 20, 'score': 2.5}\n")
    with pytest.raises(InputError, match="no metrics that Keel knows in it"):
        read_log(path)
    points = read_log(path, {"step": "frame", "rollout/return_mean": "score"}).points
    assert points["rollout/return_mean"].step.tolist() == [10, 20]
    with pytest.raises(InputError, match="Keel has no metric 'rollout/retrun'"):
        read_log(path, {"step": "frame", "rollout/retrun": "score"})


def test_layout_and_framework_can_be_forced(tmp_path: Path):
    path = tmp_path / "mixed.txt"
    path.write_text('{"step": 1, "loss": 2.0}\nstep:7 - actor/pg_loss:0.5 - actor/lr:1e-6\n')
    assert read_log(path, layout="jsonl", framework="trl").points["train/loss"].step.tolist() == [1]
    assert read_log(path, layout="steps").framework == "verl"
    with pytest.raises(InputError, match="as console tables"):
        read_log(path, layout="table")
    with pytest.raises(InputError, match="did you mean 'table'"):
        read_log(path, layout="tabel")
    with pytest.raises(InputError, match="did you mean 'openrlhf'"):
        read_log(path, framework="openrlfh")
    assert {"keel", "csv", "events", "trainer_state", "steps"} <= set(FORMATS)


def test_only_what_is_asked_for_is_kept_with_its_agents(tmp_path: Path):
    names = ["rollout/reward", "train/entropy"]
    log = read_log(SAMPLES / "trl_console.txt", names=names)
    assert sorted(log.points) == ["rollout/reward/exact", "train/entropy"]
    csv = read_log(SAMPLES / "sb3_progress.csv", names=["train/entropy"])
    assert list(csv.points) == ["train/entropy"]


@pytest.mark.parametrize(
    ("names", "framework"),
    [
        (["loss", "entropy", "reward"], "csv"),  # every script has these
        (["loss", "grad_norm", "learning_rate", "epoch"], "trl"),
        (["train/policy_loss", "train/actor_lr", "train/kl"], "openrlhf"),
        (["Loss/value_function", "Train/mean_reward"], "rsl_rl"),
        (["losses/clipfrac", "losses/entropy"], "cleanrl"),
        (["time/total_timesteps"], "sb3"),
        (["train/kl_exact", "train/alpha", "step"], "keel"),
        ([], "csv"),
    ],
)
def test_frameworks_are_recognized_by_names(names: list[str], framework: str):
    assert recognize(names) == framework


def test_names_of_nobody_are_taken_where_all_agree():
    assert keel_name("losses/entropy", "csv") == Canonical("train/entropy")
    assert keel_name("explained_variance", "csv") == Canonical("train/explained_variance")
    assert keel_name("kl", "csv") is None  # of the policy before, or of the reference?
    assert keel_name("train/value_loss", "csv") == Canonical("train/value_loss")


def test_the_number_of_names_is_bounded():
    names = Names("trl")
    found = [names.find(f"name_{i}") for i in range(5_000)]
    assert not any(found)
    assert len(names.unmatched) == 4_000
    assert names.find("x" * 1_000) is None


def test_a_folder_gives_the_fullest_log_of_every_run(tmp_path: Path):
    sb3 = tmp_path / "sb3" / "PPO_1"
    trl = tmp_path / "trl"
    for folder in (sb3, trl / "checkpoint-500", trl / "checkpoint-1000", tmp_path / "verl"):
        folder.mkdir(parents=True)
    (sb3 / "progress.csv").write_text((SAMPLES / "sb3_progress.csv").read_text())
    (sb3 / "0.monitor.csv").write_text((SAMPLES / "sb3.monitor.csv").read_text())
    for step in (500, 1000):
        state = trl / f"checkpoint-{step}" / "trainer_state.json"
        state.write_text((SAMPLES / "trainer_state.json").read_text())
    (tmp_path / "verl" / "train.log").write_text((SAMPLES / "verl_console.txt").read_text())
    (tmp_path / "verl" / "notes.txt").write_text("nothing to see: really\n")
    (tmp_path / "verl" / "loop").symlink_to(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in find_logs(tmp_path)] == [
        "sb3/PPO_1/progress.csv",
        "trl/checkpoint-1000/trainer_state.json",
        "verl/train.log",
    ]


def test_a_trainer_state_that_was_cut_off_counts_up_to_the_cut(tmp_path: Path):
    text = (SAMPLES / "trainer_state.json").read_text()
    path = tmp_path / "trainer_state.json"
    path.write_text(text[: len(text) // 2])
    steps = read_log(path).points["train/loss"].step.tolist()
    assert steps == list(range(1, len(steps) + 1))
    assert 1 < len(steps) < 6
    path.write_text(json.dumps({"log_history": []}))
    with pytest.raises(InputError, match="no metrics that Keel knows"):
        read_log(path)
