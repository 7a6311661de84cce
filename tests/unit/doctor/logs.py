"""Logs for tests of rules, from a few numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keel.doctor.finding import Finding
from keel.doctor.rule import RULES
from keel.doctor.run_log import RunLog, from_table
from keel.tracking.reader import MetricsTable

STEPS = 1024
"""Steps between two rows."""


def make_log(
    columns: Mapping[str, Sequence[float] | float],
    rows: int = 20,
    framework: str = "keel",
    settings: Mapping[str, Any] | None = None,
) -> RunLog:
    """Return a log; a number stands for a constant column.

    Args:
        columns: Values by Keel's names, NaN where the log has none.
        rows: Number of rows, where all columns are constants.
        framework: Who wrote it.
        settings: By Keel's dotted names.
    """
    lengths = {len(values) for values in columns.values() if not isinstance(values, int | float)}
    rows = lengths.pop() if lengths else rows
    assert not lengths, "columns of several lengths"
    table = MetricsTable(
        step=STEPS * np.arange(1, rows + 1, dtype=np.int64),
        columns={name: np.zeros(rows) + np.asarray(values) for name, values in columns.items()},
    )
    return from_table(table, framework, "test", settings=settings)


def findings_of(rule: str, log: RunLog) -> Finding | None:
    """Return what one rule says; it must be able to speak."""
    import keel.doctor.rules  # noqa: F401

    entry = RULES[rule]
    assert entry.missing(log) == [], f"{rule} cannot speak: {entry.missing(log)}"
    return entry.check(log)
