"""What `resume` meets: no checkpoint yet, nothing left to do, metrics that are damaged."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import keel
from keel.cli import main
from keel.config import Config, Network, Region, from_dict
from keel.tracking import MetricsWriter, RunWarning, read_config
from keel.tracking.directory import read_record
from keel.training.checkpoint import CheckpointError, load, save
from keel.training.runner import Progress, ResumeWarning, resume, start

CONFIG = from_dict(
    {"evaluation": {"episodes": 1}, "checkpoints": {"every": 64}},
    Config(
        total_steps=256,
        rollout_steps=16,
        network=Network(hidden=(8,)),
        region=Region(minibatch=64, epochs=1),
        compile="off",
    ),
)


LANGUAGE = (
    *("language", "--task", "lookup", "--task-options", "letters=1,facts=4", "--threads", "1"),
    *("--total-steps", "16", "--sample.prompts", "2", "--sample.group", "4", "--region.minibatch"),
    *("8", "--region.epochs", "1", "--evaluation.prompts", "4", "--model.hidden", "16"),
    *("--model.layers", "1", "--model.heads", "2", "--warmup.examples", "8", "--warmup.epochs"),
    *("2", "--checkpoints.every", "16", "--no-preflight"),
)


def finish(run: Iterator[Progress]) -> Progress:
    *_, last = run
    return last


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finish(start(CONFIG, tmp_path_factory.mktemp("runs"), "cart")).path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A finished run of one seed, `tmp_path/cart/seed-0`."""
    shutil.copytree(trained.parent, tmp_path / "cart")
    return tmp_path / "cart" / "seed-0"


def forget_checkpoints(run: Path) -> None:
    """As a run that was killed before its first one."""
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()


def test_a_run_without_a_checkpoint_starts_anew_and_equals_one_that_was_never_stopped(run: Path):
    expected = load(run).weights
    metrics = (run / "metrics.jsonl").read_bytes()
    forget_checkpoints(run)
    with pytest.warns(ResumeWarning, match=r"no checkpoint yet.*metrics-1\.jsonl"):
        last = finish(resume(run))
    assert last.path == run
    assert last.steps == 256
    weights = load(run).weights
    assert all(weights[name].equal(expected[name]) for name in expected)
    assert (run / "metrics-1.jsonl").read_bytes() == metrics  # what there was is not deleted
    assert len((run / "metrics.jsonl").read_text().splitlines()) == len(metrics.splitlines())


def test_the_command_starts_such_a_run_anew(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("keel.tracking.plots.draw_run", lambda _: [])
    forget_checkpoints(run)
    assert main(["resume", str(run.parent), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["steps"] == 256


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on tokens, with a warm-up and its control."""
    root = tmp_path_factory.mktemp("runs")
    assert main(["train", *LANGUAGE, "--runs", str(root), "--name", "words", "--quiet"]) == 0
    return root / "words" / "seed-0"


@pytest.mark.parametrize("killed", ["in the warm-up", "after the first update"])
def test_a_run_on_tokens_without_a_checkpoint_starts_anew(
    killed: str, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    expected = load(words).tensors["opt_state/params"]
    run = shutil.copytree(words, tmp_path / "seed-0")
    forget_checkpoints(run)
    for left in ("language.json", "tokens.html"):
        (run / left).unlink()
    metrics = (run / "metrics.jsonl").read_bytes()
    if killed == "in the warm-up":
        (run / "metrics.jsonl").unlink()
    else:
        (run / "metrics.jsonl").write_bytes(metrics.splitlines(keepends=True)[0])
    with pytest.warns(ResumeWarning, match="has no checkpoint yet and starts anew"):
        assert main(["resume", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 16
    assert load(run).tensors["opt_state/params"].equal(expected)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == len(metrics.splitlines())
    assert (run / "metrics-1.jsonl").exists() == (killed != "in the warm-up")
    assert (run / "language.json").is_file()
    assert read_record(run)["status"] == "finished"


def test_the_directory_of_a_run_on_tokens_is_enough(words: Path, tmp_path: Path):
    """Killed between making the directory and the first word of the warm-up."""
    run = tmp_path / "seed-0"
    run.mkdir()
    for name in ("config.yaml", "environment.json", "run.json"):
        shutil.copy(words / name, run)
    with pytest.warns(ResumeWarning, match="starts anew"):
        assert main(["resume", str(run), "--quiet"]) == 0
    expected = load(words).tensors["opt_state/params"]
    assert load(run).tensors["opt_state/params"].equal(expected)


def test_a_full_disk_claims_no_previous_checkpoint_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"10 are free; there is no checkpoint yet$"):
        save(tmp_path, 1, {}, {}, {})
    monkeypatch.undo()
    save(tmp_path, 1, {}, {}, {})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"the previous checkpoint, of step 1, is intact$"):
        save(tmp_path, 2, {}, {}, {})


@pytest.mark.parametrize("flags", [[], ["--json"], ["--total-steps", "100"]])
def test_a_finished_run_says_so(run: Path, flags: list[str], capsys: pytest.CaptureFixture[str]):
    """Named by the folder above its only seed."""
    before = (run / "run.json").read_bytes()
    assert main(["resume", str(run.parent), *flags]) == 0
    out = capsys.readouterr().out
    if "--json" in flags:
        assert json.loads(out)["finished"] is True
        assert json.loads(out)["steps"] == 256
    else:
        assert "finished already at 256 steps; a larger total_steps" in out
    assert (run / "run.json").read_bytes() == before


def test_python_takes_a_string_and_says_the_same(run: Path):
    with pytest.warns(ResumeWarning, match="finished already at 256 steps"):
        assert keel.resume(str(run.parent)).path == run


def test_several_seeds_are_listed(run: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(run, run.with_name("seed-1"))
    assert main(["resume", str(run.parent)]) == 2
    error = capsys.readouterr().err
    assert "has several seeds; choose one" in error
    assert "seed-1" in error


def test_steps_below_one_are_refused(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["resume", str(run), "--total-steps", "0"]) == 2
    assert "--total-steps: expected 1 or more" in capsys.readouterr().err


def damage(run: Path) -> int:
    """Two lines among the good ones become rubbish, and half a line stands at the end."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = [lines[0], b"rubbish\n", b'{"step":12,"a"\n', *lines[1:], b'{"step":9']
    path.write_bytes(b"".join(damaged))
    return len(damaged)


def test_resume_says_which_metrics_it_dropped(run: Path):
    last = damage(run)
    longer = from_dict({"total_steps": 384}, from_dict(read_config(run)))
    message = f"3 lines without a record of metrics were dropped .lines 2, 3 and {last}."
    with pytest.warns(RunWarning, match=message):
        finish(resume(run, longer))
    steps = [json.loads(x)["step"] for x in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))
    assert steps[-1] == 384


def test_resume_says_that_metrics_are_missing(run: Path):
    path = run / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:1]))
    longer = from_dict({"total_steps": 384}, from_dict(read_config(run)))
    with pytest.warns(ResumeWarning, match="has no metrics from step 128 to 256"):
        finish(resume(run, longer))


def test_sound_metrics_are_no_reason_for_a_warning(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
            writer.write(1, {"a": 1.0})
            writer.write(2, {"a": 2.0})
            assert writer.truncate_after(1) == 1


def test_a_csv_export_says_which_lines_it_lacks(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    last = damage(run)
    sentence = f"3 lines without a record of metrics were dropped (lines 2, 3 and {last})"
    words = ["runs", "export", str(run), "--csv", str(tmp_path / "out.csv")]
    assert main(words) == 0
    assert sentence in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["damage"] == [sentence]


def test_a_comparison_says_which_lines_it_lacks(run: Path, capsys: pytest.CaptureFixture[str]):
    damage(run)
    assert main(["compare", str(run), "--json"]) == 0
    (note,) = [x for x in json.loads(capsys.readouterr().out)["notes"] if "dropped" in x]
    assert note.startswith(f"{run}: 3 lines without a record")


def test_half_characters_in_metrics_can_be_exported(run: Path, tmp_path: Path):
    """JSON may hold a lone surrogate, UTF-8 may not."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step":999,"train/reason":"\\ud800","\\ud801":1.0}\n')
    assert main(["runs", "export", str(run), "--csv", str(tmp_path / "out.csv"), "--json"]) == 0
    assert "999" in (tmp_path / "out.csv").read_text()
