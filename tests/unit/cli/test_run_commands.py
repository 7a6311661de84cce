"""`keel evaluate`, `keel export` and `keel runs`, as a user meets them."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from keel import cli
from keel.config import Config, Network, Region
from keel.training.runner import start


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("evaluate", "export", "runs"):
        monkeypatch.setitem(cli.COMMANDS, name, cli.COMMANDS.get(name, ""))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Config(
        total_steps=2048,
        rollout_steps=64,
        network=Network(hidden=(16,)),
        region=Region(minibatch=128),
        tag="small",
        compile="off",
    )
    (*_, last) = start(config, tmp_path_factory.mktemp("runs"), "cart")
    return last.path


def answer(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    status = cli.main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_evaluate(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = answer(capsys, "evaluate", run.parent, "--episodes", 12, "--json")
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert result["checkpoint"] == 2048
    assert result["deterministic"] is True
    assert len(result["returns"]) == result["episodes"] == 12
    assert result["return_mean"] == pytest.approx(sum(result["returns"]) / 12)
    assert result["lengths"] == result["returns"]  # CartPole gives 1 a step
    _, out, _ = answer(capsys, "evaluate", run, "--episodes", 12)
    assert f"return  {result['return_mean']:,.2f} ± {result['return_std']:,.2f}" in out
    assert "checkpoint of step 2,048: 12 episodes, deterministic, seed 0" in out


def test_evaluate_stochastic_differs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = answer(capsys, "evaluate", run, "--episodes", 12, "--json")
    _, sampled, _ = answer(capsys, "evaluate", run, "--episodes", 12, "--json", "--stochastic")
    assert json.loads(sampled)["deterministic"] is False
    assert json.loads(sampled)["returns"] != json.loads(out)["returns"]


def test_export(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cart.onnx"
    status, out, err = answer(capsys, "export", run, "--onnx", file, "--checkpoint", "last")
    assert (status, err) == (0, "")
    assert "obs → action, logits" in out
    assert "largest difference from torch" in out
    assert file.stat().st_size > 1000


def test_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run.parent.parent
    (root / "broken" / "seed-0").mkdir(parents=True, exist_ok=True)
    status, out, _ = answer(capsys, "runs", "--runs", root, "--json")
    assert status == 0
    broken, listed = json.loads(out)
    assert (broken["status"], broken["seed"], broken["env"]) == ("unreadable", None, None)
    shown = {key: listed[key] for key in ("name", "env", "seed", "tag", "steps", "status")}
    assert shown == {
        "name": "cart", "env": "CartPole-v1", "seed": 0, "tag": "small", "steps": 2048,
        "status": "finished",
    }  # fmt: skip
    _, out, _ = answer(capsys, "runs", "list", "--runs", root)
    row = next(line for line in out.splitlines() if line.startswith("cart"))
    assert row.split() == [
        "cart", "CartPole-v1", "0", "small", "2,048", f"{listed['return_mean']:,.1f}", "finished",
    ]  # fmt: skip


def test_runs_of_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "runs", "--runs", tmp_path, "--json") == (0, "[]\n", "")
    assert "no runs in" in answer(capsys, "runs", "--runs", tmp_path)[1]
    assert answer(capsys, "runs", "--help")[1].startswith("usage: keel runs [list]")


def test_runs_export(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cart.csv"
    status, out, _ = answer(capsys, "runs", "export", run.parent, "--csv", file, "--json")
    assert status == 0
    with file.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert json.loads(out)["rows"] == len(rows) == 4
    assert json.loads(out)["columns"] == len(rows[0])
    assert [int(row["step"]) for row in rows] == [512, 1024, 1536, 2048]
    assert all(0.0 <= float(row["train/kl_exact"]) <= 0.05 for row in rows)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("evaluate", "nowhere"), "nowhere: no such run; `keel runs` lists"),
        (("evaluate", "RUN", "--episodes", "0"), "episodes: expected at least 1, got 0"),
        (("evaluate", "RUN", "--seed", "-1"), "seed: expected 0 or more"),
        (("evaluate", "RUN", "--checkpoint", "bets"), "expected best, last or a step, got 'bets'"),
        (("evaluate", "RUN", "--checkpoint", "3"), "no checkpoint of step 3; there are: 2048"),
        (("evaluate", "RUN", "--stochastic", "--deterministic"), "goes without --stochastic"),
        (("evaluate", "RUN", "--video", "x.png"), "--video: 'x.png' must end in .gif or .mp4"),
        (("export", "RUN", "--onnx", "nowhere/x.onnx"), "the folder 'nowhere' does not exist"),
        (("runs", "lits"), "'lits' is not one of list, export; did you mean 'list'?"),
        (("runs", "--runs", "nowhere"), "there is no folder 'nowhere'"),
        (("runs", "export", "nowhere", "--csv", "x.csv"), "nowhere: no such run"),
        (("runs", "export", "RUN", "--csv", "nowhere/x.csv"), "nowhere/x.csv: cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    args: tuple[str, ...], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = answer(capsys, *(run if arg == "RUN" else arg for arg in args))
    assert status == 2
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


def test_a_video_that_cannot_be_written_is_told_before_anything_is_played(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    monkeypatch.setattr("keel.training.policy.open_policy", lambda *_, **__: pytest.fail("opened"))
    status, out, err = answer(capsys, "evaluate", run, "--video", "x.mp4")
    assert (status, out) == (2, "")
    assert 'pip install "keel-rl[video]"' in err
    assert err.count("\n") == 1
