"""The logs at a path, of any framework, as rules read them."""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from keel.doctor.known_envs import with_facts
from keel.doctor.rule import RULES, SETTING
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series
from keel.errors import InputError, KeelError, RunWarning
from keel.tracking.health import FINITE
from keel.tracking.logs import Log, find_logs, read_log

STDIN = "-"
RETURN, HELD_OUT = "eval/return_mean", "eval/reward_heldout"


def needed_names() -> list[str]:
    """Return the metrics that rules read: the only ones that have to be read for a diagnosis."""
    from keel.doctor.rules import OPTIONAL  # also fills the registry

    needs = (need for rule in RULES.values() for entry in rule.needs for need in entry.split("|"))
    metrics = (need for need in needs if not need.startswith(SETTING))
    return list(dict.fromkeys([*metrics, *OPTIONAL, *FINITE]))


def read_logs(
    path: Path | str,
    *,
    layout: str | None = None,
    framework: str | None = None,
    mapping: Mapping[str, str] | None = None,
    names: Collection[str] | None = None,
) -> list[RunLog]:
    """Read all logs at or below a path.

    Args:
        path: A file; a folder, below which every log is found; or `-` for standard input.
        layout: How the log is laid out, one of `keel.tracking.logs.FORMATS`; recognized by default.
        framework: Who wrote it, one of `keel.tracking.logs.FRAMEWORKS`; recognized by default.
        mapping: Names in the log for `step` and for Keel's names, in place of recognizing them.
        names: Metrics to read, with those of their agents, which saves time; all by default.

    Returns:
        A log a run, in the order of their paths. What cannot be read among several is a warning;
        an `InputError` or a `RunError` where nothing can.
    """
    if str(path) == STDIN:
        with _standard_input() as file:
            log = _read(file, layout, framework, mapping, names, shown=STDIN)
        return [replace(log, path=None)]
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such run or file")
    files = list(find_logs(path))
    if not files:
        raise InputError(f"{path}: no log here that Keel knows how to read")
    logs, errors = [], []
    for file in files:
        try:
            logs.append(_read(file, layout, framework, mapping, names))
        except KeelError as error:
            errors.append(error)
    if not logs:
        raise errors[0]
    for problem in errors:
        warnings.warn(problem.brief, RunWarning, stacklevel=2)
    return logs


@contextmanager
def _standard_input() -> Iterator[Path]:
    """Keep standard input in a file, so that a large one is not held in memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.txt"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield path


def _read(
    file: Path,
    layout: str | None,
    framework: str | None,
    mapping: Mapping[str, str] | None,
    names: Collection[str] | None,
    shown: str = "",
) -> RunLog:
    wanted = None if names is None else {*names, *([RETURN] if HELD_OUT in names else [])}
    try:
        log = read_log(file, mapping, wanted, layout=layout, framework=framework)
    except KeelError as error:
        if not shown:
            raise
        raise type(error)(str(error).replace(str(file), shown)) from error
    return as_run_log(log, file)


def as_run_log(log: Log, path: Path | None = None) -> RunLog:
    """Return a log as rules read it.

    What TRL and ms-swift call the reward of an evaluation is that of held-out prompts.

    Args:
        log: In Keel's names.
        path: Where it stands.
    """
    series = {
        name: Series(name, log.labels.get(name, name), points.step, points.values)
        for name, points in log.points.items()
        if len(points.step)
    }
    found = RunLog(
        log.framework,
        log.layout,
        log.rows,
        series,
        with_facts(log.settings, log.framework),
        log.unmatched,
        log.damage,
        path,
        log.nans,
    )
    if found.is_language and RETURN in series:
        rewards = series[RETURN]
        series.setdefault(HELD_OUT, replace(rewards, name=HELD_OUT))
    return found
