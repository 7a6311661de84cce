"""The runs of a folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from keel.runs import lock
from keel.runs.directory import read_record
from keel.runs.errors import RunError
from keel.runs.reader import last_values


@dataclass(frozen=True)
class RunInfo:
    """One line of `keel runs list`."""

    path: Path
    name: str
    seed: int
    tag: str | None
    status: str
    """running, finished, stopped, failed, crashed, or unreadable"""
    created: str
    step: int | None
    """of the last metrics; None before the first"""
    return_mean: float
    """the last known; NaN before the first episode ended"""


def list_runs(root: Path | str) -> list[RunInfo]:
    """All runs below `root/NAME/seed-*`, oldest first; a damaged one is listed as unreadable."""
    found = [run_info(path) for path in sorted(Path(root).glob("*/seed-*")) if path.is_dir()]
    return sorted(found, key=lambda run: run.created)


def run_info(path: Path) -> RunInfo:
    """What can be said about a run without opening it."""
    try:
        record = read_record(path)
        name, seed, tag = str(record["name"]), int(record["seed"]), record.get("tag")
        created, status = str(record.get("created", "")), _status(path, str(record["status"]))
    except (RunError, KeyError, TypeError, ValueError):
        name, seed, tag, created, status = path.parent.name, -1, None, "", "unreadable"
    try:
        step, (value,) = last_values(path, "rollout/return_mean")
    except (RunError, OSError):
        step, value = None, math.nan
    return RunInfo(path, name, seed, tag, status, created, step, value)


def _status(path: Path, recorded: str) -> str:
    """A run that says it is running must be held by a process that lives."""
    if recorded != "running":
        return recorded
    holder = lock.holder_of(path)
    return "running" if holder is not None and lock.is_alive(holder) else "crashed"
