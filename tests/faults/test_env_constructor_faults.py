"""Environments whose constructor or module fails: one line that names the environment and why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from keel.cli import main
from keel.config import Backend
from keel.envs import make_envs
from keel.envs.faults import EnvError, EnvRaisedError
from keel.errors import KeelError

HERE = str(Path(__file__).parent)
BROKEN = "env_constructors:KeelBroken-v0"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


@pytest.mark.parametrize("backend", ["auto", "sync"])
def test_an_error_in_the_constructor_is_one_line(backend: Backend) -> None:
    with pytest.raises(EnvError) as caught:
        make_envs(BROKEN, 1, backend=backend, seed=0)
    assert str(caught.value).startswith(f"{BROKEN}: cannot be made: RuntimeError: no display (")
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("env", ["CartPole-v1", "serving", "land"])
@pytest.mark.filterwarnings("ignore:.*its vector entry point failed")
def test_an_option_that_the_constructor_does_not_take_is_one_line(env: str) -> None:
    with pytest.raises(KeelError, match="nope") as caught:
        make_envs(env, 1, backend="auto", seed=0, env_kwargs={"nope": 1})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["raise RuntimeError('half\\nbuilt')", "def ("])
def test_a_module_that_is_broken_is_one_line(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("broken_module", None)
    with pytest.raises(EnvError, match="broken_module:X-v0: cannot import 'broken_module': "):
        make_envs("broken_module:X-v0", 1, seed=0)


@pytest.mark.parametrize("text", [False, True], ids=["the second fails", "no layout"])
@pytest.mark.parametrize(
    ("env", "backend"),
    [("KeelBusyPort-v0", "sync"), ("KeelBusyPort-v0", "async"), ("several_agents", "auto")],
)
def test_environments_that_were_made_before_an_error_are_closed(
    env: str, backend: Backend, text: bool, tmp_path: Path
) -> None:
    """A simulator that they have started would be left behind."""
    name, place = f"env_constructors:{env}", tmp_path / "port"
    options: dict[str, Any] = {"place": str(place), "text": text}
    num = 1 if text else 2
    with pytest.raises(EnvError, match="Text" if text else "FileExistsError"):
        make_envs(name, num, backend=backend, seed=0, threads=1, env_kwargs=options)
    assert not place.exists()


@pytest.mark.parametrize("env", ["..:X-v0", "a..b:make", "", ":", "ALE/", "-v0", "a b", "\x00"])
def test_a_strange_name_is_refused(env: str) -> None:
    with pytest.raises(EnvError):
        make_envs(env, 1, seed=0)


def test_train_ends_with_one_line_and_creates_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    assert main(["train", BROKEN, "--runs", str(runs), "--envs.options", "error=key"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "cannot be made: KeyError" in captured.err
    assert "starting" not in captured.out
    assert not runs.exists()


def test_a_fault_with_a_traceback_is_brief_on_the_command_line() -> None:
    error = EnvRaisedError("raised", 3, 7, 11, "Traceback:\n  File x\nValueError: off the map")
    assert error.brief == "environment 3 raised (seed 7, step 11): ValueError: off the map"
    assert "File x" in str(error)
