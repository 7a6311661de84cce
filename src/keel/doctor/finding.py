"""Findings: what a rule says, with its evidence, other causes and the fix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from keel.doctor.series import Series

Level = Literal["sick", "watch", "usual"]
"""`usual`: looks odd, is reported as a bug elsewhere, and is healthy."""
LEVELS: tuple[Level, ...] = ("sick", "watch", "usual")


@dataclass(frozen=True)
class Evidence:
    """One measured value beside the threshold that it broke."""

    metric: str
    """Keel's name"""
    label: str
    """the name in the log"""
    text: str
    """a sentence with the arithmetic: 0.31 nats in 9 of the last 10 updates, the bound is 0.05"""
    value: float
    threshold: float | None = None
    threshold_source: str = ""
    """where the threshold comes from"""
    onset: int | None = None
    """step since when"""


@dataclass(frozen=True)
class Suspect:
    """Another cause, and a test that tells it from the first one."""

    cause: str
    test: str
    """a command, or a change of one line, and what it shows"""


@dataclass(frozen=True)
class Change:
    """A setting to change: to a value, or by a factor where its value is not known."""

    setting: str
    """Keel's dotted name"""
    to: Any = None
    times: float | None = None


@dataclass(frozen=True)
class Fix:
    """What to do."""

    text: str
    """one sentence, for what no setting cures, too"""
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Finding:
    """What a rule found; `examine` fills in the fields of the rule."""

    cause: str
    """one sentence that names the cause"""
    level: Level
    evidence: tuple[Evidence, ...]
    fix: Fix
    others: tuple[Suspect, ...] = ()
    """other causes, likeliest first"""
    confidence: float = 0.8
    """how sure it is that this is the cause, 0 to 1"""
    rule: str = ""
    family: str = ""
    source: str = ""
    """where the rule comes from"""
    suppresses: tuple[str, ...] = field(default=(), repr=False)
    """rules whose findings are consequences of this one"""

    @property
    def onset(self) -> int | None:
        """The earliest step of its evidence."""
        return min((e.onset for e in self.evidence if e.onset is not None), default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, which knows no NaN: what is not finite is None."""
        data: dict[str, Any] = plain(asdict(self))
        return data | {"onset": self.onset}


def evidence(
    series: Series,
    text: str,
    value: float | None = None,
    *,
    threshold: float | None = None,
    source: str = "",
    onset: int | None = None,
) -> Evidence:
    """Return evidence from a series.

    Args:
        series: The metric.
        text: A sentence with the arithmetic.
        value: The value that counts, by default the newest.
        threshold: What it broke.
        source: Where the threshold comes from.
        onset: Step since when.
    """
    value = series.last if value is None else value
    return Evidence(series.name, series.label, text, value, threshold, source, onset)


def plain(data: Any) -> Any:
    """Return data with None in place of numbers that are not finite."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    return data
