"""What several rules ask of a log: its KL, a share of updates, numbers as text, who reads what."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from keel.doctor.rule import RULES, SETTING
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, align, trend

KLS = ("train/kl_requested", "train/kl_exact", "train/approx_kl")
"""KL of an update, the best measurement first: of the whole step, before any walk-back."""
KL = "|".join(KLS)
OUTCOMES = (
    "returns-flat",
    "returns-collapsed",
    "entropy-collapsed",
    "entropy-stuck",
    "action-share-high",
    "explained-variance-negative",
    "explained-variance-zero",
    "critic-too-slow",
    "critic-too-fast",
    "value-loss-exploded",
    "entropy-grows",
    "entropy-leaps",
    "entropy-oscillates",
    "entropy-below-floor",
    "action-std-exploded",
    "action-std-vanished",
    "actions-unused",
    "below-baseline",
)
"""Rules whose findings follow from updates that go wrong."""
MASS = 1e-4
"""Rounding that a mean of float32 may add to a share or a KL."""


def update_kl(log: RunLog) -> Series:
    """Return the KL of the updates; one of `KLS` must be there."""
    return next(log[name] for name in KLS if name in log)


def present(log: RunLog, names: Iterable[str]) -> list[Series]:
    """Return the series of those metrics that the log has."""
    return [log[name] for name in names if name in log]


def where(series: Series, mask: NDArray[np.bool_]) -> Series:
    """Return the values of a series for which the condition `[n]` holds."""
    return Series(series.name, series.label, series.step[mask], series.values[mask])


def without_walk_backs(log: RunLog, series: Series) -> Series:
    """Return the values of updates that were kept whole, as far as the log says."""
    if (alpha := log.get("train/alpha")) is None:
        return series
    return where(series, ~np.isin(series.step, alpha.step[alpha.values < 1.0]))


def paired(log: RunLog, first: str, second: str) -> tuple[Series, Series]:
    """Return two metrics at the steps that they share, of finite values."""
    a, b = align(log[first], log[second])
    known = np.isfinite(a.values) & np.isfinite(b.values)
    return where(a, known), where(b, known)


def share_of(mask: NDArray[np.bool_]) -> float:
    """Return the share of the values for which a condition holds; 0 without values."""
    return float(mask.mean()) if len(mask) else 0.0


def onset_of(series: Series, mask: NDArray[np.bool_]) -> int:
    """Return the first step at which a condition holds; it must hold somewhere."""
    return int(series.step[np.flatnonzero(mask)[0]])


def percent(share: float) -> str:
    """Return a share as text: "31 %"."""
    return f"{100.0 * share:.3g} %"


def improves(returns: Series) -> bool:
    """Return whether a return rises by more than a fifth, surely."""
    found = trend(returns)
    return found.p < 0.01 and found.change > 0.2 * abs(returns.start())


def actions_of(log: RunLog) -> float:
    """Return the number of discrete actions, from settings or from log K; 0 where not known."""
    known = log.setting("facts.actions")
    if known is not None:
        return known
    largest = log.get("train/entropy_max")
    if largest is None or "train/action_std" in log or not 0.0 < largest.last < 20.0:
        return 0.0
    count = math.exp(largest.last)
    return float(round(count)) if abs(count - round(count)) < 1e-3 * count else 0.0


def spacing(series: Series) -> float:
    """Return the median number of steps between two values; NaN with fewer than two."""
    return float(np.median(np.diff(series.step))) if len(series) > 1 else float("nan")


def readers_of(log: RunLog, *metrics: str) -> tuple[str, ...]:
    """Return the rules that conclude from these metrics in this log.

    Of `a|b` a rule reads the first that the log has.

    Args:
        log: The log.
        metrics: Names of metrics that cannot be believed.
    """
    found = []
    for entry in RULES.values():
        for need in entry.needs:
            read = next((name for name in need.split("|") if name in log), None)
            if read in metrics and not need.startswith(SETTING):
                found.append(entry.id)
                break
    return tuple(found)
