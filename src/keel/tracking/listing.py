"""The runs of a folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from keel.errors import KeelError, RunError
from keel.tracking.directory import METRICS, missing_lines, read_record
from keel.tracking.files import is_held
from keel.tracking.integrity import describe_missing
from keel.tracking.reader import last_values
from keel.tracking.record import RECORD


@dataclass(frozen=True)
class RunInfo:
    """A line of `keel runs list`."""

    path: Path
    name: str
    seed: int
    tag: str | None
    status: str
    """running, finished, stopped, failed, crashed, or unreadable"""
    created: str
    step: int | None
    """Step of the last metrics; None before the first."""
    return_mean: float
    """the last known; NaN before the first episode ended"""
    problem: str = ""
    """why the run, or a part of it, cannot be read"""


def list_runs(root: Path | str) -> list[RunInfo]:
    """List all runs below `root/NAME/seed-*`, oldest first.

    Args:
        root: folder of all runs; a damaged run is listed as unreadable.
    """
    root = Path(root)
    if not root.exists():
        return []
    try:
        next(root.iterdir(), None)  # globbing passes over folders that cannot be read
        folders = [path for path in sorted(root.glob("*/seed-*")) if path.is_dir()]
    except OSError as error:
        raise RunError(f"{root}: cannot be read: {error.strerror or error}") from error
    return sorted((run_info(path) for path in folders), key=lambda run: run.created)


def run_info(path: Path) -> RunInfo:
    """Describe a run without opening it; whatever is wrong with it is no error.

    Args:
        path: the folder of the run.
    """
    problems = []
    name, seed, created, status = path.parent.name, -1, "", "unreadable"
    tag: str | None = None
    try:
        record = read_record(path)
        tag = None if record.get("tag") is None else str(record["tag"])
        created = str(record.get("created", ""))
        name, seed = str(record["name"]), int(record["seed"])
        status = _status(path, str(record["status"]))
    except Exception as error:  # one strange run must not hide all others
        problems.append(_describe(error, RECORD))
    step: int | None = None
    value = math.nan
    try:
        if (path / METRICS).exists():
            step, (value,), damaged = last_values(path, "rollout/return_mean")
            if damaged and status != "running":  # one that runs is just writing its last line
                lines = "1 damaged line" if damaged == 1 else f"{damaged:,} damaged lines"
                problems.append(f"{METRICS}: {lines} near its end")
            if missing := missing_lines(path):
                problems.append(f"{METRICS}: {describe_missing(missing)}")
        elif status == "finished":
            problems.append(f"{METRICS}: no such file")
    except Exception as error:
        problems.append(_describe(error, METRICS))
    return RunInfo(path, name, seed, tag, status, created, step, value, "; ".join(problems))


def _describe(error: Exception, file: str) -> str:
    """Name what is wrong with a file of a run."""
    if isinstance(error, KeelError):
        return str(error)
    if isinstance(error, KeyError):
        return f"{file}: has no {error.args[0]}"
    return f"{file}: {type(error).__name__}: {error}"


def _status(path: Path, recorded: str) -> str:
    """Return the recorded status; a running one whose process is dead has crashed."""
    if recorded != "running":
        return recorded
    return "running" if is_held(path) else "crashed"
