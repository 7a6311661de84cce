"""The log of a run as rules read it: series under Keel's names, and the settings that are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keel.doctor.series import Series
from keel.tracking.reader import MetricsTable


@dataclass(frozen=True)
class RunLog:
    """One run of any framework."""

    framework: str
    """`keel`, `sb3`, `cleanrl`, `trl`, `verl`, `openrlhf`, `rllib`, `rsl_rl`, `swift`, `csv`"""
    layout: str
    """what was read, for people: "progress.csv", "console table" """
    rows: int
    series: Mapping[str, Series] = field(repr=False)
    """by Keel's names; those of one agent end with its name"""
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """by Keel's dotted names (`region.learning_rate`), as far as they are known"""
    unmatched: tuple[str, ...] = ()
    """names in the log that Keel has no metric for"""
    notes: tuple[str, ...] = ()
    """what had to be left out while reading"""
    path: Path | None = None
    nans: Mapping[str, NDArray[np.int64]] = field(default_factory=dict, repr=False)
    """steps at which the log says NaN, where it can be told from saying nothing, by Keel's names"""

    def get(self, name: str) -> Series | None:
        """Return a series; None where the log has no value of the metric."""
        return self.series.get(name)

    def __getitem__(self, name: str) -> Series:
        return self.series[name]

    def __contains__(self, name: str) -> bool:
        return name in self.series

    def agents(self, name: str) -> dict[str, Series]:
        """Return the series of each agent of a metric, by agent; empty with one agent."""
        prefix = f"{name}/"
        return {
            key.removeprefix(prefix): series
            for key, series in self.series.items()
            if key.startswith(prefix)
        }

    def setting(self, name: str, default: float | None = None) -> float | None:
        """Return a setting that is a number, or `default` where it is not known."""
        value = self.settings.get(name, default)
        return float(value) if isinstance(value, int | float) else default

    @property
    def is_language(self) -> bool:
        """Whether the run trains a language model."""
        if self.framework in ("trl", "verl", "openrlhf", "swift"):
            return True
        return self.settings.get("env") == "language"

    @property
    def last_step(self) -> int:
        """The last step of any series; 0 where there is none."""
        return max((int(series.step[-1]) for series in self.series.values()), default=0)


def from_table(
    table: MetricsTable,
    framework: str,
    layout: str,
    *,
    labels: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    unmatched: tuple[str, ...] = (),
    path: Path | None = None,
) -> RunLog:
    """Return the log of a table of metrics.

    Args:
        table: Metrics under Keel's names; values that are missing are NaN.
        framework: Who wrote it.
        layout: What was read.
        labels: Names in the log, by Keel's names, where they differ.
        settings: Settings that are known, by Keel's dotted names.
        unmatched: Names in the log that Keel has no metric for.
        path: Where it stands.
    """
    labels = labels or {}
    series = {}
    for name, column in table.columns.items():
        known = ~np.isnan(column)
        if known.any():
            label = labels.get(name, name)
            series[name] = Series(name, label, table.step[known], column[known])
    return RunLog(
        framework=framework,
        layout=layout,
        rows=len(table),
        series=series,
        settings=settings or {},
        unmatched=unmatched,
        notes=table.damage,
        path=path,
    )
