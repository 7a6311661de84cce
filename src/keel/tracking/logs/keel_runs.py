"""Runs of Keel as logs: metrics, settings, and facts about the environment that its files tell."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from keel.errors import KeelError
from keel.tracking.directory import METRICS
from keel.tracking.files import read_regular
from keel.tracking.health import FINITE
from keel.tracking.logs.log import Log, log_of_table
from keel.tracking.old_names import has_old_names
from keel.tracking.reader import read_metrics
from keel.tracking.record import read_config
from keel.tracking.resume import flat

ACTIONS = "facts.actions"
CONTINUOUS = {"Box": 0}
"""Discrete actions of other spaces."""
_FIRST_LINE = 1 << 20


def is_run(path: Path) -> bool:
    """Return whether this is the folder of a run of Keel."""
    return (path / METRICS).is_file()


def read_run(path: Path, wanted: Collection[str] | None = None) -> Log:
    """Read a run of Keel.

    Args:
        path: Its folder, or its metrics.
        wanted: Metrics to read, with those of their agents, which is faster; all by default.
    """
    file = path / METRICS if path.is_dir() else path
    import numpy as np

    table = read_metrics(path, None if wanted is None else _with_agents(file, wanted))
    log = log_of_table(table, "keel", METRICS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = _settings(file.parent)
    notes = tuple(str(warning.message) for warning in caught)
    nans = {
        name: table.step[np.isnan(column)]
        for name, column in table.columns.items()
        if name in FINITE and np.isnan(column).any()
    }
    return replace(log, settings=settings, damage=log.damage + notes, nans=nans)


def _with_agents(file: Path, wanted: Collection[str]) -> list[str]:
    """Return metrics and those of each agent, as the first line of the file names them."""
    names = list(dict.fromkeys(wanted))
    try:
        with file.open("rb") as lines:
            first = lines.readline(_FIRST_LINE)
        record = json.loads(first)
    except (OSError, ValueError, RecursionError):
        return names
    if not isinstance(record, dict) or has_old_names(first):
        return names
    return [*names, *(name for name in record if name.rpartition("/")[0] in set(names))]


def _settings(run: Path) -> dict[str, Any]:
    """Return the settings of a run by dotted names, and what its files tell of its environment."""
    try:
        settings = dict(flat(read_config(run)))
    except KeelError:
        return {}
    actions = _actions(run)
    return settings if actions is None else settings | {ACTIONS: actions}


def _actions(run: Path) -> int | None:
    """Return the number of discrete actions, 0 where they are continuous; None where unknown."""
    try:
        newest = json.loads(read_regular(run / "checkpoints" / "last.json"))["checkpoint"]
        folder = run / "checkpoints" / Path(str(newest)).name
        action = json.loads(read_regular(folder / "state.json"))["interface"]["action"]
        return int(action["n"]) if action["kind"] == "Discrete" else CONTINUOUS.get(action["kind"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
