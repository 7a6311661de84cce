"""A log in Keel's names: the known values of each metric with their steps, made of rows."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from keel.tracking.logs.names import Names
from keel.tracking.metrics import Canonical
from keel.tracking.reader import MetricsTable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOO_MANY = 2**63
"""Steps are 64-bit integers."""
EVALUATION = "eval/"


class Row(NamedTuple):
    """What a log says at one time, in the log's own names."""

    step: int | None
    """None where the log has none"""
    values: Mapping[str, float]


class Points(NamedTuple):
    """The known values of one metric."""

    step: NDArray[np.int64]
    """`[n]`, rising"""
    values: NDArray[np.float64]
    """`[n]`, never NaN"""


@dataclass(frozen=True)
class Log:
    """The log of one run."""

    framework: str
    layout: str
    """what was read, for people"""
    points: Mapping[str, Points] = field(repr=False)
    """by Keel's names"""
    rows: int
    labels: Mapping[str, str] = field(default_factory=dict, repr=False)
    """names in the log, by Keel's names"""
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """by Keel's dotted names"""
    unmatched: tuple[str, ...] = ()
    """names in the log that Keel has no metric for"""
    damage: tuple[str, ...] = ()
    """sentences about what was left out"""

    @property
    def table(self) -> MetricsTable:
        """All metrics at all steps."""
        return self.table_of(self.points)

    def table_of(self, names: Collection[str]) -> MetricsTable:
        """Return some metrics at all of their steps, NaN where there is no value.

        Args:
            names: By Keel; those that the log does not have are left out.
        """
        import numpy as np

        chosen = {name: points for name, points in self.points.items() if name in names}
        steps = [points.step for points in chosen.values()]
        union = np.unique(np.concatenate(steps)) if steps else np.array([], dtype=np.int64)
        columns = {}
        for name, points in chosen.items():
            columns[name] = np.full(len(union), np.nan)
            columns[name][np.searchsorted(union, points.step)] = points.values
        return MetricsTable(union, columns, damage=self.damage)


def log_of_table(
    table: MetricsTable,
    framework: str,
    layout: str,
    labels: Mapping[str, str] | None = None,
    unmatched: tuple[str, ...] = (),
) -> Log:
    """Return the log of a table under Keel's names.

    Args:
        table: Metrics; values that are missing are NaN.
        framework: Who wrote it.
        layout: What was read.
        labels: Names in the log, by Keel's names.
        unmatched: Names that Keel has no metric for.
    """
    import numpy as np

    points = {}
    for name, column in table.columns.items():
        known = ~np.isnan(column)
        if known.any():
            points[name] = Points(table.step[known], column[known])
    return Log(
        framework, layout, points, len(table), labels or {}, {}, unmatched, damage=table.damage
    )


class Collected(NamedTuple):
    """What was collected of some rows."""

    points: dict[str, Points]
    labels: dict[str, str]
    rows: int
    damage: list[str]


class _Column(NamedTuple):
    target: Canonical
    label: str
    steps: array[int]
    values: array[float]


def collect(rows: Iterable[Row], names: Names) -> Collected:
    """Collect rows into arrays: sixteen bytes a value, whatever the text around them.

    A row without a step has the number of the row, one that is only an evaluation that of the row
    before. Of several values of a metric at one step the last counts.

    Args:
        rows: In the names of the log.
        names: Which of them Keel knows, and how.
    """
    columns: dict[str, _Column] = {}
    count = uncounted = stepless = step = 0
    for row in rows:
        known = [(n, v, t) for n, v in row.values.items() if (t := names.find(n)) is not None]
        if not known:
            continue
        if row.step is not None and not 0 <= row.step < TOO_MANY:
            uncounted += 1
            continue
        is_evaluation = all(target.name.startswith(EVALUATION) for _, _, target in known)
        if row.step is not None:
            step = row.step
        elif not is_evaluation or not count:
            step += 1
            stepless += 1
        count += 1
        for name, value, target in known:
            if value != value or not names.is_wanted(target.name):
                continue
            column = columns.get(target.name)
            if column is None:
                column = columns[target.name] = _Column(target, name, array("q"), array("d"))
            if column.label == name or len(column.steps) == 0 or column.steps[-1] != step:
                column.steps.append(step)
                column.values.append(target.convert(value))
    return Collected(
        {name: _points(column) for name, column in columns.items()},
        {name: column.label for name, column in columns.items()},
        count,
        list(_sentences(uncounted, stepless)),
    )


def _sentences(uncounted: int, stepless: int) -> Iterator[str]:
    if uncounted:
        yield f"{uncounted:,} rows without a step below 2^63 were dropped"
    if stepless:
        yield "the log has no steps: its rows are counted"


def _points(column: _Column) -> Points:
    """Return a column sorted by step; the last of several values at one step counts."""
    import numpy as np

    step = np.frombuffer(column.steps, dtype=np.int64)
    values = np.frombuffer(column.values, dtype=np.float64)
    if (step[1:] <= step[:-1]).any():
        order = np.argsort(step, kind="stable")
        step, values = step[order], values[order]
        last = np.append(step[1:] != step[:-1], True)
        step, values = step[last], values[last]
    return Points(step, values)
