"""Small runs whose parts come from a module of the user's own, which tests write."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from keel import registry
from keel.cli import main
from keel.training.persist import Progress

TINY: dict[str, Any] = {
    "total_steps": 128,
    "rollout_steps": 16,
    "compile": "off",
    "threads": 1,
    "envs": {"num": 4, "backend": "sync"},
    "evaluation": {"episodes": 1},
}
FLAGS = (
    *("--total-steps", "128", "--rollout-steps", "16", "--envs.num", "4", "--threads", "1"),
    *("--region.minibatch", "32", "--evaluation.episodes", "1", "--envs.backend", "sync"),
    *("--quiet", "--name", "mine"),
)


def write_module(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, name: str = "own_parts"
) -> None:
    """Write a module into the working directory of a fresh user, who has imported none of it."""
    (folder / f"{name}.py").write_text(source)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KEEL_STATE_DIR", str(folder / "state"))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(registry, "_objects", {})
    monkeypatch.delitem(sys.modules, name, raising=False)


def forget(monkeypatch: pytest.MonkeyPatch, name: str = "own_parts") -> None:
    """Do as a new process would: nothing was passed, nothing is imported."""
    monkeypatch.setattr(registry, "_objects", {})
    monkeypatch.delitem(sys.modules, name, raising=False)


def imported(name: str = "own_parts") -> ModuleType:
    return __import__(name)


def train_by_command(*words: str) -> int:
    return main(["train", "CartPole-v1", *FLAGS, *words])


def finish(run: Iterator[Progress]) -> Progress:
    *_, last = run
    return last
