"""One run of every kind that version 0.1 made: evaluated, resumed, exported and compared for ever.

`runs-0.1` was made by commit dbabe13 with the settings of `iterations.py`, two iterations each,
Breakout's network smaller and serving by the preset router-rebalanced: otherwise the state of its
caches has 34 MB. The returns below are those that this commit evaluates.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from keel.cli import main
from keel.tracking import read_metrics

HERE = Path(__file__).parent
RETURNS = {
    "cartpole": [10.0, 8.0],
    "halfcheetah": [0.45637302708236915, -0.9934313636725939],
    "gru": [10.0, 8.0],
    "trpo": [0.20692747114988086, -1.5061570438914715],
    "land": [12.608934439326138, 12.084741339716809],
    "happo": [-100.05143443281345, -143.10779335160788],
    "demos": [-115.0, -115.0],
    "quantile": [9.0, 10.0],
    "serving": [131.8538476038929, 123.91556448734387],
}
"""Of two deterministic episodes with seed 0."""
STEPS = {"breakout": 64, "land": 240, "serving": 64, "lookup-grpo": 32, "addition-ppo": 32}
"""At which a run ends, where that is not 256."""
KINDS = (*RETURNS, "breakout", "lookup-grpo", "addition-ppo")
TOKENS = ("lookup-grpo", "addition-ppo")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Copy all runs; Breakout's evaluations are cut, and demonstrations are those of the copy."""
    copy = tmp_path / "runs"
    shutil.copytree(HERE / "runs-0.1", copy)
    changes = {
        "demos": ("demos-car", str(copy / "demos-car")),
        "breakout": ("evaluation:\n", "evaluation:\n  max_episode_steps: 64\n"),
    }
    for kind, change in changes.items():
        config = copy / kind / "seed-0" / "config.yaml"
        config.write_text(config.read_text().replace(*change))
    return copy


@pytest.mark.parametrize("kind", RETURNS)
def test_a_run_earns_what_it_earned_then(
    kind: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(runs / kind), "--episodes", "2", "--checkpoint", "last", "--json"]
    assert main(["evaluate", *words]) == 0
    returns = json.loads(capsys.readouterr().out)["returns"]
    assert returns == pytest.approx(RETURNS[kind], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("kind", TOKENS)
def test_a_language_model_is_evaluated(
    kind: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(runs / kind), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["checkpoint"] == STEPS[kind]
    assert answer["success"] == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::keel.training.runner.ResumeWarning")
@pytest.mark.filterwarnings("ignore::keel.training.evaluation.EvaluationWarning")
def test_a_run_goes_on(kind: str, runs: Path) -> None:
    before = STEPS.get(kind, 256)
    after = before * 3 // 2
    words = [str(runs / kind), "--total-steps", str(after), "--quiet"]
    assert main(["resume", *words]) == 0
    metrics = read_metrics(runs / kind / "seed-0")
    assert metrics.step[-1] == after
    assert math.isfinite(metrics["train/loss"][-1])
    assert 0.0 <= metrics["train/kl_exact"][-1] <= 0.05
    assert (runs / kind / "seed-0" / "checkpoints" / f"{after:08d}").is_dir()


@pytest.mark.parametrize("kind", ["cartpole", "halfcheetah", "trpo", "breakout"])
def test_a_policy_is_exported(kind: str, runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    file = tmp_path / "policy.onnx"
    assert main(["export", str(runs / kind), "--onnx", str(file)]) == 0
    assert file.stat().st_size > 0


def test_runs_are_compared(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs / "cartpole"), str(runs / "quantile"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {"cartpole", "quantile"} <= set(json.dumps(answer).replace('"', " ").split())


def test_runs_are_listed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list", "--runs", str(runs), "--json"]) == 0
    names = capsys.readouterr().out
    assert all(kind in names for kind in KINDS)
