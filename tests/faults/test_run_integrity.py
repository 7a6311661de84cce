"""Files of a run that were edited or damaged after Keel wrote them: told, never used silently."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from keel.runs import RunDirectory, RunError, RunWarning, read_config
from keel.runs.directory import read_record
from keel.runs.environment import read_choices
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


def test_a_damaged_seal_counts_as_damage_and_a_missing_one_as_an_older_keel(run):
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("lines above", "lines abovf"))
    with pytest.warns(RunWarning, match="not as Keel wrote it"):
        read_config(run)
    (run / "config.yaml").write_text(text[: text.index("# sha256")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_config(run, strict=True) == CONFIG


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
