"""Logs at a path as rules read them: folders, standard input, settings, names, errors."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from keel.doctor.reading import needed_names, read_logs
from keel.errors import InputError, RunWarning
from keel.tracking.integrity import add_checksum

SAMPLES = Path(__file__).parents[2] / "data" / "logs"


def write_run(path: Path, rows: int = 4) -> Path:
    """Write a run of two agents, whose third loss is NaN."""
    path.mkdir(parents=True)
    with (path / "metrics.jsonl").open("wb") as file:
        for i in range(1, rows + 1):
            record = {"step": 10 * i, "train/kl_exact": 0.01 * i, "train/kl_exact/wolf": 0.02}
            record |= {"train/loss": None if i == 3 else 1.0, "train/entropy": 0.5}
            record |= {"flags": {"train/loss": "nan"}} if i == 3 else {}
            file.write(add_checksum(json.dumps(record, separators=(",", ":")).encode()) + b"\n")
    (path / "config.yaml").write_text("env: CartPole-v1\nregion:\n  max_kl: 0.02\n")
    return path


def test_a_run_of_keel_has_settings_and_agents(tmp_path: Path):
    write_run(tmp_path / "a" / "seed-0")
    (log,) = read_logs(tmp_path, names=["train/kl_exact"])
    assert (log.framework, log.layout, log.rows) == ("keel", "metrics.jsonl", 4)
    assert list(log.series) == ["train/kl_exact", "train/kl_exact/wolf"]
    assert log.setting("region.max_kl") == 0.02
    assert log.path == tmp_path / "a" / "seed-0"


def test_the_number_of_actions_comes_from_the_newest_checkpoint(tmp_path: Path):
    run = write_run(tmp_path / "seed-0")
    folder = run / "checkpoints" / "00000040"
    folder.mkdir(parents=True)
    (run / "checkpoints" / "last.json").write_text('{"checkpoint": "00000040"}')
    state = {"interface": {"action": {"kind": "Discrete", "n": 6}}}
    (folder / "state.json").write_text(json.dumps(state))
    assert read_logs(run)[0].setting("facts.actions") == 6
    (run / "checkpoints" / "last.json").write_text('{"checkpoint": "../../../etc"}')
    assert read_logs(run)[0].setting("facts.actions") is None


def test_a_loss_of_a_run_that_is_nan_is_told(tmp_path: Path):
    (log,) = read_logs(write_run(tmp_path / "seed-0"))
    assert {name: steps.tolist() for name, steps in log.nans.items()} == {"train/loss": [30]}
    assert log["train/loss"].step.tolist() == [10, 20, 40]


def test_standard_input_is_read_as_a_file_is(monkeypatch: pytest.MonkeyPatch):
    data = (SAMPLES / "sb3_console.txt").read_bytes()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    (log,) = read_logs("-")
    assert (log.framework, log.path) == ("sb3", None)
    assert log["train/approx_kl"].label == "train/approx_kl"
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"nothing\n")))
    with pytest.raises(InputError, match=r"^-: no metrics that Keel knows in it"):
        read_logs("-")


def test_rewards_of_an_evaluation_are_those_of_held_out_prompts():
    (log,) = read_logs(SAMPLES / "trainer_state.json", names=["eval/reward_heldout"])
    assert log.is_language
    assert log["eval/reward_heldout"].label == "eval_reward"
    assert log["eval/reward_heldout"].step.tolist() == [3, 6]


def test_what_cannot_be_read_among_others_is_a_warning(tmp_path: Path):
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "progress.csv").write_text((SAMPLES / "sb3_progress.csv").read_text())
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "progress.csv").write_text("frame,score\n1,2\n")
    with pytest.warns(RunWarning, match="whose log is this"):
        logs = read_logs(tmp_path)
    assert [log.path for log in logs] == [tmp_path / "good" / "progress.csv"]
    with pytest.raises(InputError, match="whose log is this"):
        read_logs(tmp_path / "bad")


def test_a_path_without_logs_is_an_error_of_one_line(tmp_path: Path):
    with pytest.raises(InputError, match="no log here"):
        read_logs(tmp_path)
    with pytest.raises(InputError, match="no such run or file"):
        read_logs(tmp_path / "nowhere")


def test_rules_name_the_metrics_that_have_to_be_read():
    names = needed_names()
    assert {"train/gate_log_ratio", "train/kl_exact", "rollout/reward"} <= set(names)
    assert not any("|" in name or name.startswith("setting:") for name in names)
