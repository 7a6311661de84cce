"""Files of a run that were edited or damaged after Keel wrote them: told, never used silently."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import keel
from keel.cli import main
from keel.tracking import (
    MetricsWriter,
    RunDirectory,
    RunError,
    RunWarning,
    read_config,
    read_metrics,
)
from keel.tracking.directory import read_record
from keel.tracking.integrity import add_checksum, fits_checksum
from keel.tracking.record import read_choices, warn_if_changed
from keel.training.checkpoint import CheckpointError, CheckpointWarning, load, mark_best, save

CONFIG = {"env": "CartPole-v1", "seed": 0, "region": {"max_kl": 0.02}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was made and closed, with nothing trained."""
    with RunDirectory.create(tmp_path, "demo", config=CONFIG, choices={"backend": "sync"}) as made:
        return made.path


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_an_untouched_run_is_read_without_a_word(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_config(run, strict=True) == CONFIG
        assert read_record(run)["status"] == "finished"
        assert read_choices(run) == {"backend": "sync"}


def test_one_changed_digit_of_the_config_is_told(run):
    edit(run / "config.yaml", "0.02", "0.03")
    with pytest.warns(RunWarning, match=r"config\.yaml: not as Keel wrote it"):
        assert read_config(run)["region"] == {"max_kl": 0.03}
    with pytest.raises(RunError, match="put it back, or start a new run"):
        read_config(run, strict=True)


def drop_checksum(path: Path) -> None:
    record = json.loads(path.read_text())
    del record["checksum"]
    path.write_text(json.dumps(record))


def test_a_damaged_seal_counts_as_damage_and_a_missing_one_as_an_older_keel(run):
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("lines above", "lines abovf"))
    with pytest.warns(RunWarning, match="not as Keel wrote it"):
        read_config(run)
    (run / "config.yaml").write_text(text[: text.index("# sha256")])
    drop_checksum(run / "run.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_config(run, strict=True) == CONFIG


@pytest.mark.parametrize("lines", [1, 2, 4])
def test_a_config_that_was_cut_before_its_seal_is_told(run, lines):
    """What is left is YAML all the same, and defaults would take the place of what is gone."""
    path = run / "config.yaml"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    with pytest.warns(RunWarning, match=r"config\.yaml: not as Keel wrote it"):
        read_config(run)
    with pytest.raises(RunError, match="put it back, or start a new run"):
        read_config(run, strict=True)


@pytest.mark.parametrize("config", [None, CONFIG])
def test_a_run_of_an_older_keel_is_sealed_when_it_goes_on(run, config):
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text[: text.index("# sha256")])
    drop_checksum(run / "run.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with RunDirectory.resume(run, config=config):
                assert read_config(run, strict=True) == CONFIG
    assert (run / "config.yaml").read_text() == text


def test_a_file_of_settings_that_a_run_wrote_and_somebody_changed_is_told(run, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_changed(run / "config.yaml")
        (tmp_path / "own.yaml").write_text("env: CartPole-v1\n")
        warn_if_changed(tmp_path / "own.yaml")
    edit(run / "config.yaml", "0.02", "0.03")
    with pytest.warns(RunWarning, match="not as Keel wrote it: edited or damaged; used as it is"):
        warn_if_changed(run / "config.yaml")


def test_training_with_such_a_file_says_so(run, tmp_path):
    edit(run / "config.yaml", "0.02", "0.03")
    argv = ["train", "--config", str(run / "config.yaml"), "--runs", str(tmp_path), "--quiet"]
    argv += ["--total-steps", "64", "--rollout-steps", "32", "--evaluation.episodes", "1"]
    with pytest.warns(RunWarning, match="not as Keel wrote it"):
        assert main(argv) == 0
    with pytest.warns(RunWarning, match="not as Keel wrote it"):
        keel.iterate(config=run / "config.yaml", runs=tmp_path / "runs", total_steps=64).close()


def test_a_resumed_run_has_a_config_that_fits_its_seal(run):
    with RunDirectory.resume(run, config=CONFIG | {"tag": "b"}, may_change=("tag",)):
        pass
    assert read_config(run, strict=True)["tag"] == "b"


def test_an_edited_record_is_told(run):
    edit(run / "run.json", '"seed": 0', '"seed": 1')
    with pytest.warns(RunWarning, match=r"run\.json: not as Keel wrote it"):
        assert read_record(run)["seed"] == 1


@pytest.mark.parametrize("damage", ["edited", "truncated", "missing"])
def test_choices_that_are_lost_are_told(run, damage):
    path = run / "environment.json"
    if damage == "edited":
        edit(path, '"sync"', '"async"')
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        path.unlink()
    with pytest.warns(RunWarning, match="chosen anew"):
        assert read_choices(run) == {}


@pytest.mark.parametrize("pointer", ["best", "last"])
def test_a_pointer_that_names_another_checkpoint_is_not_followed(tmp_path, pointer):
    for step in (1, 2):
        save(tmp_path, step, {}, {}, {"step": step})
    mark_best(tmp_path, 2, 1.0)
    path = tmp_path / "checkpoints" / f"{pointer}.json"
    record = json.loads(path.read_text()) | {"step": 1, "checkpoint": "00000001"}
    path.write_text(json.dumps(record))
    with pytest.warns(CheckpointWarning, match=rf"{pointer}\.json: edited or damaged"):
        assert steps_loaded(tmp_path, pointer) == {"best": None, "last": 2}[pointer]


def steps_loaded(run: Path, pointer: str) -> int | None:
    """Return the step that is loaded, or None where loading is refused."""
    try:
        return load(run, "best" if pointer == "best" else None).step
    except CheckpointError:
        return None


def test_one_changed_digit_of_a_metric_is_told_and_the_line_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"train/kl_exact": step / 100})
    edit(path, "0.02", "0.03")
    for table in (read_metrics(path), read_metrics(path, ["train/kl_exact"])):
        assert table.step.tolist() == [1, 3]
        assert (table.ignored, "line 2" in " ".join(table.damage)) == (1, True)


def test_a_line_that_lost_its_checksum_is_told_and_a_file_without_any_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in (1, 2):
            writer.write(step, {"train/loss": 1.0})
    lines = path.read_text().splitlines()
    bare = [json.dumps({k: v for k, v in json.loads(x).items() if k != "crc"}) for x in lines]
    path.write_text(f"{lines[0]}\n{bare[1]}\n")
    assert read_metrics(path).step.tolist() == [1]
    path.write_text("\n".join(bare) + "\n")
    assert (read_metrics(path).step.tolist(), read_metrics(path).ignored) == ([1, 2], 0)
    path.write_text(lines[0].replace('"crc"', '"crb"') + f"\n{lines[1]}\n")
    assert (read_metrics(path).step.tolist(), read_metrics(path).ignored) == ([2], 1)


def test_lines_of_an_older_keel_are_read_before_those_of_this_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"train/loss":1.0}\n')
    with MetricsWriter(path) as writer:
        writer.write(2, {"train/loss": 0.5})
    assert read_metrics(path)["train/loss"].tolist() == [1.0, 0.5]


@given(st.dictionaries(st.text(min_size=1, max_size=5), st.floats(allow_nan=False), max_size=3))
def test_every_line_fits_its_checksum_until_a_byte_changes(metrics):
    line = json.dumps(metrics | {"step": 1}).encode()
    sealed = add_checksum(line)
    assert fits_checksum(sealed)
    assert json.loads(sealed).keys() == {*metrics, "step", "crc"}
    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 1
        assert not fits_checksum(bytes(changed))
