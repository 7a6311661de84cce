"""What the page of a case compares: metrics of both runs, before and after."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from keel.cases.case import Shown
from keel.doctor.series import Series
from keel.tracking.reader import read_metrics


@dataclass(frozen=True)
class Compared:
    """One metric before and after."""

    shown: Shown
    before: Series
    after: Series

    @property
    def values(self) -> tuple[float, float]:
        """Both values, over what the metric is compared; NaN where nothing was logged."""
        before, after = (self._value(series) for series in (self.before, self.after))
        return before, after

    def _value(self, series: Series) -> float:
        if not len(series):
            return math.nan
        return series.end() if self.shown.over == "end" else float(series.values.mean())

    @property
    def improved(self) -> bool:
        """Whether the cured run is on the better side."""
        before, after = self.values
        return after < before if self.shown.better == "lower" else after > before

    @property
    def texts(self) -> tuple[str, str]:
        """Both values as text."""
        before, after = (written(value, self.shown.form) for value in self.values)
        return before, after


def written(value: float, form: str) -> str:
    """Return a value as text.

    Args:
        value: May be infinite, or NaN where nothing was logged.
        form: Format of a finite one.

    Examples:
        >>> written(0.5, ".0%"), written(float("inf"), ".3g"), written(float("nan"), ".3g")
        ('50%', '∞', 'not logged')
    """
    if math.isnan(value):
        return "not logged"
    return format(value, form) if math.isfinite(value) else "∞" if value > 0 else "−∞"


def compare(shown: tuple[Shown, ...], before: Path, after: Path) -> list[Compared]:
    """Return metrics of two runs side by side.

    Args:
        shown: Which.
        before: Folder of the sick run.
        after: Folder of the cured run.
    """
    names = [one.metric for one in shown]
    left, right = read_series(before, names), read_series(after, names)
    return [Compared(one, left[one.metric], right[one.metric]) for one in shown]


def read_series(run: Path, names: list[str]) -> dict[str, Series]:
    """Return metrics of a run by name; an empty series where it has none.

    Args:
        run: Its folder.
        names: Of the metrics.
    """
    table = read_metrics(run, names)
    found = {}
    for name in names:
        column = table.columns.get(name, np.full(len(table), np.nan))
        known = ~np.isnan(column)
        found[name] = Series(name, name, table.step[known], column[known])
    return found
