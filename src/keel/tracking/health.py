"""Breaches of healthy ranges: what to watch in a run, while it goes on and at its end.

One value proves nothing, because rollouts are noisy: a breach is what lies outside of its range in
3 of the last 5 iterations. Errors, losses that are not finite and a KL far over its bound are told
at once, and stay in the summary. NaN says that there is nothing to judge, as in `warn/*` while
there is nothing to warn of.

Examples:
    >>> quiet, loud = {"train/clip_fraction": 0.2}, {"train/clip_fraction": 0.61}
    >>> print(*find_breaches(enumerate([quiet, loud, loud, loud])))
    train/clip_fraction 0.61 above 0.3 since step 1 (rule of thumb)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from keel.tracking.catalogue.metric import Metric
from keel.tracking.metrics import REGISTRY

WINDOW, ENOUGH = 5, 3
"""A range is breached where so many values of the last `WINDOW` lie outside."""
LEAST = 10
"""Values that a mean is taken of at least."""
LASTING = 0.25
"""Share of the iterations from which on the summary names a breach that is over."""
FINITE = ("train/loss", "train/policy_loss", "train/value_loss", "train/kl_exact", "train/entropy")
"""Metrics that are numbers in every update."""
AT_ONCE = ("train/non_finite_gradients", "warn/ratio_all_nonfinite")
"""Metrics that are told at the first value outside, as all of `error/`."""
FAR = 10.0
"""A KL of so many times its bound ruins a policy in one update, and is quiet afterwards."""


@dataclass(frozen=True)
class Breach:
    """A metric outside of its healthy range."""

    metric: str
    value: float
    """the newest one outside; a mean where the registry says so; may be NaN or infinite"""
    low: float | None
    high: float | None
    since: int
    """step of the first value outside"""
    until: int | None
    """step of the last value outside, of a breach that is over"""
    outside: int
    """values outside among the newest `window`"""
    window: int
    mean_over: int
    """number of updates that `value` is the mean of; 0 if it is that of one update"""
    note: str
    """Source of the range, and its meaning."""

    @property
    def source(self) -> str:
        """Origin of the range, in a word or two."""
        return self.note.partition(":")[0]

    def __str__(self) -> str:
        """Return one line for a display."""
        mean = f" (mean of {self.mean_over})" if self.mean_over else ""
        period = f"since step {self.since:,}"
        if self.until is not None:
            period = f"from step {self.since:,} to {self.until:,}"
            if self.until == self.since:
                period = f"at step {self.since:,}"
        source = f" ({self.source})" if self.source else ""
        return f"{self.metric} {self._outcome(mean)} {period}{source}"

    def _outcome(self, mean: str) -> str:
        if not math.isfinite(self.value):
            return "was not finite" if self.until is not None else "is not finite"
        if self.high is not None and self.value > self.high:
            return f"{self.value:.3g}{mean} above {self.high:.3g}"
        return f"{self.value:.3g}{mean} below {self.low:.3g}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, which knows no NaN: what is not finite is None."""
        return {
            "metric": self.metric,
            "value": self.value if math.isfinite(self.value) else None,
            "healthy": [self.low, self.high],
            "since": self.since,
            "until": self.until,
            "outside": self.outside,
            "window": self.window,
            "note": self.note,
        }


class Health:
    """Judge the metrics of a run, iteration by iteration.

    Args:
        registry: metrics by name; those without a healthy range are judged only by `FINITE`.
    """

    def __init__(self, registry: Mapping[str, Metric] = REGISTRY) -> None:
        judged = (m for m in registry.values() if m.healthy is not None or m.name in FINITE)
        self._watched = [_Watched(entry) for entry in judged]
        self._iterations = 0

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of one iteration.

        Args:
            step: of the run.
            metrics: by their plain names; what is missing is not judged.
        """
        self._iterations += 1
        for watched in self._watched:
            value = metrics.get(watched.entry.name)
            if value is not None:
                watched.append(step, value, metrics)

    def breaches(self) -> list[Breach]:
        """Return what lies outside now, errors first."""
        return _sort_breaches(w for w in self._watched if w.is_breached)

    def summary(self) -> list[Breach]:
        """Return what lies outside now, every error, and what was outside for long."""
        long = max(1.0, LASTING * self._iterations)
        return _sort_breaches(
            w for w in self._watched if w.is_breached or w.is_severe or w.breached_updates >= long
        )


def find_breaches(
    records: Iterable[tuple[int, Mapping[str, float]]], registry: Mapping[str, Metric] = REGISTRY
) -> list[Breach]:
    """Return the summary of a whole run.

    Args:
        records: step and metrics of every iteration, in order.
        registry: metrics by name.
    """
    health = Health(registry)
    for step, metrics in records:
        health.update(step, metrics)
    return health.summary()


@dataclass
class _Watched:
    """A metric with its recent values and breaches."""

    entry: Metric
    breached_updates: int = 0
    """iterations in which the breach held"""
    is_breached: bool = False
    is_severe: bool = False
    """whether there was a value that is told at once"""
    _first: int = 0
    _since: int = 0
    _value: float = math.nan
    _severe_value: float = math.nan
    _last: int = 0
    _range: tuple[float | None, float | None] = (None, None)
    _newest: deque[tuple[int, bool, bool]] = field(init=False)
    """step, whether the value is outside, whether that is told at once"""
    _known: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        name = self.entry.name
        self._at_once = name.startswith("error/") or name in AT_ONCE
        self._newest = deque(maxlen=WINDOW)
        self._known = deque(maxlen=self.entry.mean_over or 1)

    def append(self, step: int, value: float, metrics: Mapping[str, float]) -> None:
        low, high = self.entry.range_in(metrics)
        if self.entry.mean_over:
            value = self._mean(value)
        outside = (low is not None and value < low) or (high is not None and value > high)
        is_severe = (outside and self._at_once) or self._is_ruinous(value, high)
        outside = outside or is_severe
        self._newest.append((step, outside, is_severe))
        if outside:
            self._value, self._last, self._range = value, step, (low, high)
        if is_severe:
            self.is_severe, self._severe_value = True, value
        if outside or self.is_breached:  # else nothing can change
            self._judge()

    def _is_ruinous(self, value: float, high: float | None) -> bool:
        if not math.isfinite(value):
            return self.entry.name in FINITE
        return bool(self.entry.at_most) and high is not None and value > FAR * high

    def _judge(self) -> None:
        steps = [step for step, outside, _ in self._newest if outside]
        is_severe = any(is_severe for *_, is_severe in self._newest)
        was_breached, self.is_breached = self.is_breached, is_severe or len(steps) >= ENOUGH
        if self.is_breached:
            self._since = self._since if was_breached else steps[0]
            self._first = self._first if self.breached_updates else self._since
            self.breached_updates += 1

    def _mean(self, value: float) -> float:
        """Return the mean of the last values; NaN, which is never outside, if there are few."""
        if not math.isnan(value):
            self._known.append(value)
        if len(self._known) < LEAST:
            return math.nan
        return math.fsum(self._known) / len(self._known)

    def breach(self) -> Breach:
        low, high = self._range
        return Breach(
            metric=self.entry.name,
            value=self._severe_value if self.is_severe and not self.is_breached else self._value,
            low=low,
            high=high,
            since=self._since if self.is_breached else self._first,
            until=None if self.is_breached else self._last,
            outside=sum(outside for _, outside, _ in self._newest),
            window=len(self._newest),
            mean_over=len(self._known) if self.entry.mean_over else 0,
            note=self.entry.healthy_note,
        )


def _sort_breaches(watched: Iterable[_Watched]) -> list[Breach]:
    ranked = sorted(watched, key=lambda w: (not w.is_severe, not w.is_breached))
    return [entry.breach() for entry in ranked]
