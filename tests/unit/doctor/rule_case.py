"""A log that makes a rule speak, its healthy neighbor, and what is said, for tables of cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from logs import make_log

from keel.doctor.run_log import RunLog

Columns = Mapping[str, Sequence[float] | float]


@dataclass(frozen=True)
class Case:
    """One rule in one log."""

    rule: str
    columns: Columns
    """metrics of the log in which it speaks"""
    neighbor: Columns
    """what is otherwise in a healthy log"""
    value: float
    """of its first evidence"""
    threshold: float | None
    says: tuple[str, ...]
    """parts of the cause"""
    level: str = "sick"
    framework: str = "keel"
    settings: Mapping[str, Any] = field(default_factory=dict)
    healthy_settings: Mapping[str, Any] = field(default_factory=dict)
    healthy_framework: str = ""
    rows: int = 20

    def log(self) -> RunLog:
        """Return the log in which the rule speaks."""
        return make_log(self.columns, self.rows, self.framework, self.settings)

    def healthy(self) -> RunLog:
        """Return the neighbor in which it does not."""
        return make_log(
            {**self.columns, **self.neighbor},
            self.rows,
            self.healthy_framework or self.framework,
            {**self.settings, **self.healthy_settings},
        )


def ramp(first: float, last: float, rows: int = 20) -> list[float]:
    """Return values from the first to the last at equal distances."""
    return [first + (last - first) * i / (rows - 1) for i in range(rows)]


def alternating(first: float, second: float, rows: int = 20) -> list[float]:
    """Return two values in turn."""
    return [second if i % 2 else first for i in range(rows)]


def changed(before: float, after: float, at: int = 10, rows: int = 20) -> list[float]:
    """Return one value up to row `at`, and another from there on."""
    return [before] * at + [after] * (rows - at)
