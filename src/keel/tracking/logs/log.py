"""A log in Keel's names: the known values of each metric with their steps, made of rows."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
EVALUATION, STEPS = "eval/", "time/steps"
LEAST_ROWS = 5


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
    nans: Mapping[str, NDArray[np.int64]] = field(default_factory=dict, repr=False)
    """steps at which the log says NaN, by Keel's names"""

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
    nans: dict[str, NDArray[np.int64]]
    rows: int
    damage: list[str]


@dataclass
class _Column:
    label: str
    rank: int
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    nans: array[int] = field(default_factory=lambda: array("q"))

    def add(self, step: int, value: float) -> None:
        if value != value:
            self.nans.append(step)
        else:
            self.steps.append(step)
            self.values.append(value)


def collect(rows: Iterable[Row], names: Names) -> Collected:
    """Collect rows into arrays: sixteen bytes a value, whatever the text around them.

    A row without a step has the number of the row, one that is only an evaluation that of the row
    before. Rows at one step are one; of several values of a metric the last counts.

    Args:
        rows: In the names of the log.
        names: Which of them Keel knows, and how.
    """
    columns: dict[str, _Column] = {}
    counted: array[int] = array("q")
    count = uncounted = stepless = step = 0
    before = -1
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
        count += step != before
        if not is_evaluation:
            counted.append(step)
        before = step
        for name, value, target in known:
            if names.is_wanted(target.name):
                _add(columns, names, step, name, value, target)
    if _is_back(counted) and STEPS not in columns and names.is_wanted(STEPS):
        column = columns[STEPS] = _Column(STEPS, 0, array("q", range(len(counted))))
        column.values.extend(map(float, counted))
    return Collected(
        {name: _points(column) for name, column in columns.items()},
        {name: column.label for name, column in columns.items()},
        {name: _steps(column.nans) for name, column in columns.items() if column.nans},
        count,
        list(_sentences(uncounted, stepless)),
    )


def _is_back(steps: Sequence[int]) -> bool:
    """Return whether steps begin anew: two runs in one log, and no row that came late."""
    highest = 0
    for row, step in enumerate(steps):
        begins = 2 * step < highest and LEAST_ROWS <= row <= len(steps) - LEAST_ROWS
        if begins and max(steps[row : row + LEAST_ROWS]) < highest:
            return True
        highest = max(highest, step)
    return False


def _add(
    columns: dict[str, _Column], names: Names, step: int, name: str, value: float, target: Canonical
) -> None:
    """Add a value to its column; of two names of one metric the better one counts."""
    column = columns.get(target.name)
    if column is None:
        column = columns[target.name] = _Column(name, names.rank(name, target))
    if column.label != name:
        rank = names.rank(name, target)
        if rank < column.rank:
            column.label, column.rank = name, rank
        elif column.steps and column.steps[-1] == step:
            return
    column.add(step, target.convert(value))


def _steps(steps: array[int]) -> NDArray[np.int64]:
    import numpy as np

    return np.unique(np.frombuffer(steps, dtype=np.int64))


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
