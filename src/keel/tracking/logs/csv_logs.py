"""CSV logs: `progress.csv` of SB3 and RLlib, SB3's `monitor.csv`, W&B's exports, any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keel.errors import InputError
from keel.tracking.csv_columns import Columns, read_columns
from keel.tracking.integrity import describe_lines
from keel.tracking.logs.log import TOO_MANY, Log, log_of_table
from keel.tracking.logs.names import GENERIC, STEPS, Names, is_registered, recognize, without_run
from keel.tracking.metrics import Canonical
from keel.tracking.reader import MetricsTable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

STEP = "step"
MONITOR = {"r": "rollout/return_mean", "l": "rollout/length_mean", "t": "time/seconds"}
"""Columns of SB3's `monitor.csv`: return, length and time of every episode."""
TITLE, MONITOR_TITLE = "CSV", "monitor.csv"


@dataclass(frozen=True)
class _Plan:
    """The columns of a CSV that are metrics."""

    framework: str
    step: str | None
    """the column that counts steps, or that holds lengths of episodes; None: rows are counted"""
    columns: dict[str, tuple[str, Canonical]]
    """by Keel's names: the column, and how to convert it"""
    unmatched: tuple[str, ...] = ()
    episodes: bool = False
    """whether a row is an episode, so that steps are the sum of lengths"""
    runs: int = 1
    """number of runs whose columns stand beside each other"""


def read_csv(
    path: Path,
    *,
    framework: str | None = None,
    mapping: Mapping[str, str] | None = None,
    wanted: frozenset[str] | None = None,
) -> Log:
    """Read a CSV; `damage` of what is returned says what had to be left out.

    Args:
        path: The file.
        framework: Whose it is; by default it is recognized by its columns.
        mapping: Columns for `step` and for Keel's names, in place of recognizing them.
        wanted: Keel's names to read, which saves memory; all by default.
    """
    plans: list[_Plan] = []

    def choose(header: list[str], comment: str) -> list[str]:
        plan = _plan(path, header, comment, framework, mapping or {}, wanted)
        plans.append(plan)
        chosen = [column for column, _ in plan.columns.values()]
        return [plan.step, *chosen] if plan.step is not None else chosen or header[:1]

    read = read_columns(path, choose)
    (plan,) = plans
    columns = {
        name: target.convert(read.values[column]) for name, (column, target) in plan.columns.items()
    }
    table = _table(plan, read, columns)
    title = MONITOR_TITLE if plan.episodes else path.name if path.suffix == ".csv" else TITLE
    labels = {name: without_run(column) for name, (column, _) in plan.columns.items()}
    return log_of_table(table, plan.framework, title, labels, plan.unmatched)


def _plan(
    path: Path,
    header: list[str],
    comment: str,
    framework: str | None,
    mapping: Mapping[str, str],
    wanted: frozenset[str] | None,
) -> _Plan:
    """Decide which columns are metrics, by a mapping or by their names."""
    if mapping:
        return _mapped(path, header, mapping, wanted)
    if comment and {"r", "l"} <= set(header):
        names = Names("sb3", {keel: column for column, keel in MONITOR.items()}, wanted)
        return _Plan("sb3", "l", names.best(header), episodes=True)
    plain = [without_run(name) for name in header]
    names = Names(framework or recognize(plain), wanted=wanted)
    step = next((header[plain.index(name)] for name in STEPS if name in plain), None)
    if not any(names.find(name) for name in plain):
        raise InputError(
            f"{path}: whose log is this? Its columns are {listed(header)}; say what they are: "
            "--map step=COLUMN rollout/return_mean=COLUMN"
        )
    runs = max((plain.count(name) for name in set(plain)), default=1)
    columns = {
        keel: (header[plain.index(name)], target)
        for keel, (name, target) in names.best(plain).items()
    }
    return _Plan(names.framework, step, columns, names.unmatched, runs=runs)


def check_mapping(mapping: Mapping[str, str], where: str) -> None:
    """Raise an `InputError` unless Keel has all metrics that a mapping names, and steps are there.

    Args:
        mapping: Names in the log, by Keel's names.
        where: The log, for the message.
    """
    for name, column in mapping.items():
        if name != STEP and not is_registered(name):
            raise InputError(f"--map {name}={column}: Keel has no metric {name!r}")
    if STEP not in mapping:
        raise InputError(f"--map: which column of {where} counts steps? --map step=COLUMN")


def _mapped(
    path: Path, header: list[str], mapping: Mapping[str, str], wanted: frozenset[str] | None
) -> _Plan:
    for name, column in mapping.items():
        if column not in header:
            raise InputError(
                f"--map {name}={column}: {path} has no such column, only {listed(header)}"
            )
    check_mapping(mapping, str(path))
    columns = {
        name: (column, Canonical(name))
        for name, column in mapping.items()
        if name != STEP and (wanted is None or name in wanted)
    }
    return _Plan(GENERIC, mapping[STEP], columns)


def _table(plan: _Plan, read: Columns, columns: dict[str, NDArray[np.float64]]) -> MetricsTable:
    """Sort by step; rows without a step that can be counted are dropped and noted as damage."""
    import numpy as np

    rows = np.arange(1.0, len(read.lines) + 1.0)
    steps = rows if plan.step is None else read.values[plan.step]
    good = np.isfinite(steps) & (steps >= 0.0) & (steps < float(TOO_MANY))
    problem = "without a length of its episode" if plan.episodes else "without a step below 2^63"
    damage = [*read.damage, *describe_lines(read.lines[~good].tolist(), problem)]
    if plan.step is None:
        damage.append("the log has no steps: its rows are counted")
    if plan.runs > 1:
        damage.append(f"it holds the columns of {plan.runs} runs: the first of them is read")
    if not good.all():
        steps = steps[good]
        columns = {name: values[good] for name, values in columns.items()}
    if plan.episodes:
        steps = np.cumsum(steps)
    if (steps[1:] < steps[:-1]).any():
        order = np.argsort(steps, kind="stable")
        steps = steps[order]
        columns = {name: values[order] for name, values in columns.items()}
    dropped = int((~good).sum())
    return MetricsTable(steps.astype(np.int64), columns, ignored=dropped, damage=tuple(damage))


def listed(names: list[str]) -> str:
    """Return some names for a message, and how many more there are."""
    suffix = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(name[:100] for name in names[:12]) + suffix
