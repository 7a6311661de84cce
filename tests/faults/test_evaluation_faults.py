"""A run that is killed or stopped within an evaluation loses nothing, and makes up for the rest."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.cli import main
from keel.config import Config, from_dict
from keel.envs import EnvError
from keel.tracking.reader import read_metrics
from keel.training import evaluation, policy
from keel.training.checkpoint import load
from keel.training.evaluation import EvaluationWarning
from keel.training.runner import resume, start


def small(**more: Any) -> Config:
    base = {
        "total_steps": 256,
        "rollout_steps": 16,
        "compile": "off",
        "envs": {"num": 4},
        "region": {"minibatch": 32, "epochs": 1},
        "network": {"hidden": [8]},
        "evaluation": {"episodes": 2},
    }
    return from_dict(more, from_dict(base))


def lines(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run, but for how long things took."""
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "crc"))}
        for line in (path / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The last iteration of a run without interruption."""
    *_, last = start(small(), tmp_path_factory.mktemp("whole"), "run")
    return last


def disturb(monkeypatch: pytest.MonkeyPatch, fault: Callable[[], None]) -> None:
    """Let `fault` happen when an evaluation begins, before it goes on as ever."""
    evaluate = evaluation.evaluate

    def disturbed(*args: Any, **more: Any) -> Any:
        fault()
        return evaluate(*args, **more)

    monkeypatch.setattr(evaluation, "evaluate", disturbed)


def assert_completed(path: Path, whole: Any) -> None:
    """A resumed run ends with the bits and the metrics of one that was never interrupted."""
    (last,) = resume(path)
    assert last.done
    assert last.metrics["eval/return_mean"] == whole.metrics["eval/return_mean"]
    pairs = zip(last.iteration.state.opt_state, whole.iteration.state.opt_state, strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)
    assert lines(path) == lines(whole.path)
    assert json.loads((path / "run.json").read_text())["status"] == "finished"
    best = json.loads((path / "checkpoints" / "best.json").read_text())
    assert best == json.loads((whole.path / "checkpoints" / "best.json").read_text())


def test_kill_9_in_the_last_evaluation_loses_nothing(
    tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = os.fork()
    if child == 0:
        disturb(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
        for _ in start(small(), tmp_path, "run"):
            pass
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    path = tmp_path / "run" / "seed-0"
    assert load(path).step == 256
    rows = lines(path)
    assert [row["step"] for row in rows] == [64, 128, 192, 256]
    assert "eval/return_mean" not in rows[-1]
    assert_completed(path, whole)


def test_a_signal_in_the_last_evaluation_is_heeded_and_resuming_makes_it_up(
    tmp_path: Path,
    whole: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text((whole.path / "config.yaml").read_text())
    path = tmp_path / "run" / "seed-0"
    with monkeypatch.context() as patched:
        disturb(patched, lambda: signal.raise_signal(signal.SIGTERM))
        words = ["train", "CartPole-v1", "--config", str(file), "--runs", str(tmp_path)]
        assert main([*words, "--name", "run"]) == 143
    out, err = capsys.readouterr()
    assert "256/256  evaluating …" in out
    assert err.endswith(f"stopped at 256 of 256 steps; go on with: keel resume {path}\n")
    assert json.loads((path / "run.json").read_text())["status"] == "stopped"
    assert load(path).step == 256
    assert_completed(path, whole)


def test_an_environment_that_fails_in_an_evaluation_costs_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two checkpoints as well: what was learned is saved before the error is told."""

    def fail() -> None:
        raise EnvError("broken")

    disturb(monkeypatch, fail)
    with pytest.raises(EnvError, match="broken"):
        for _ in start(small(evaluation={"every": 128}), tmp_path, "run"):
            pass
    path = tmp_path / "run" / "seed-0"
    assert load(path).step == read_metrics(path).step[-1] == 128
    assert json.loads((path / "run.json").read_text())["status"] == "failed"


def test_a_run_that_was_evaluated_is_not_evaluated_again(
    whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never() -> None:
        raise AssertionError("evaluated twice")

    before = (whole.path / "metrics.jsonl").read_bytes()
    disturb(monkeypatch, never)
    assert list(resume(whole.path)) == []
    assert (whole.path / "metrics.jsonl").read_bytes() == before


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_keel_evaluate(
    number: signal.Signals,
    whole: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    evaluate = policy.evaluate

    def signalled(*args: Any, **more: Any) -> Any:
        signal.raise_signal(number)
        return evaluate(*args, **more)

    monkeypatch.setattr(policy, "evaluate", signalled)
    assert main(["evaluate", str(whole.path)]) == 128 + number
    assert capsys.readouterr().err == "keel: the evaluation was stopped; nothing was kept\n"


def test_keel_evaluate_cuts_episodes_that_do_not_end(
    whole: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", str(whole.path), "--episodes", "3", "--max-episode-steps", "5"]
    with pytest.warns(EvaluationWarning, match="3 of 3 episodes did not end within 5 steps"):
        assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["episodes_cut"], result["lengths"]) == (3.0, [5, 5, 5])
