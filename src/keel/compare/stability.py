"""Stability of runs: variance of losses, non-finite numbers, roll-backs, and the worst KL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keel.compare.align import finite_values
from keel.compare.sources import Run

LOSSES = ("train/loss", "train/policy_loss")
COUNTS = ("error/non_finite_ratio_count", "train/non_finite_gradients")


@dataclass(frozen=True)
class Stability:
    """Means over the runs of a group, but the worst of the KL; NaN where nothing was logged."""

    loss_variance: float
    non_finite: float
    """quarantined ratios, skipped gradients, and losses that were no number"""
    rollbacks: float
    worst_kl: float
    worst_share: float
    """Largest KL as a share of the bound in force."""
    kl_is_exact: bool


def stability_of(runs: Sequence[Run]) -> Stability:
    """Summarize the stability of all runs of a group."""
    worst, share = zip(*(_worst(run) for run in runs), strict=True)
    return Stability(
        loss_variance=_mean([_variance(run) for run in runs]),
        non_finite=_mean([_non_finite(run) for run in runs]),
        rollbacks=_mean([_last(run, "train/rollbacks") for run in runs]),
        worst_kl=_largest(worst),
        worst_share=_largest(share),
        kl_is_exact=all("train/kl_exact" in run.table.columns for run in runs),
    )


def _variance(run: Run) -> float:
    for name in LOSSES:
        _, values = finite_values(run, name)
        if values.size:
            return float(values.var())
    return math.nan


def _non_finite(run: Run) -> float:
    count = sum(float(np.nansum(run.table[name])) for name in COUNTS if name in run.table.columns)
    if run.source != "keel":  # elsewhere a missing value is one that was not logged, no more
        return count
    losses = run.table.columns.get("train/loss")
    return count + (0.0 if losses is None else float((~np.isfinite(losses)).sum()))


def _worst(run: Run) -> tuple[float, float]:
    kl = run.table.columns.get("train/kl_exact", run.table.columns.get("train/approx_kl"))
    if kl is None or not np.isfinite(kl).any():
        return math.nan, math.nan
    largest = float(np.nanmax(kl))
    bound = run.table.columns.get("train/max_kl")
    if bound is None:
        return largest, math.nan
    both = ~np.isnan(kl) & (bound > 0.0)
    return largest, float((kl[both] / bound[both]).max()) if both.any() else math.nan


def _last(run: Run, name: str) -> float:
    _, values = finite_values(run, name)
    return float(values[-1]) if values.size else math.nan


def _mean(values: Sequence[float]) -> float:
    finite = [x for x in values if math.isfinite(x)]
    return sum(finite) / len(finite) if finite else math.nan


def _largest(values: Sequence[float]) -> float:
    return max((x for x in values if math.isfinite(x)), default=math.nan)
