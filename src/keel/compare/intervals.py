"""Intervals of what a group earned, and of how often one run is better than another.

Student's t or score intervals throughout: a percentile bootstrap of three or five runs is too
narrow (`python -m benchmarks.verdicts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from keel.compare.verdict import TRIMMED_FROM
from keel.functional import Interval, probability_of_improvement, t_interval, trimmed_mean


def score_interval(scores: Sequence[Tensor], confidence: float = 0.95) -> Interval:
    """Return the mean over tasks of the interquartile mean, with its interval.

    Below `TRIMMED_FROM` runs nothing can be cut, and plain means stand in their place.

    Args:
        scores: A tensor `[runs]` for every task.
        confidence: Share of such intervals that hold the true value.
    """
    trim = 0.25 if min(map(len, scores)) >= TRIMMED_FROM else 0.0
    share = 1.0 / len(scores)
    return t_interval(*((share, trimmed_mean(x, trim)) for x in scores), confidence=confidence)


def improvement_interval(
    old: Sequence[Tensor], new: Sequence[Tensor], confidence: float = 0.95
) -> Interval:
    """Return P(new > old) averaged over tasks, with its interval.

    The interval of a task is Newcombe's (2006, method 5) with Student's t in place of the normal
    quantile: it has some width where all runs of one side are better. Those of several tasks are
    added in squares (Zou and Donner 2008).

    Args:
        old: Scores of the baseline, `[runs]` for every task.
        new: Scores of the variant, in the same order.
        confidence: Share of such intervals that hold the true value.
    """
    parts = [_of_task(x, y, confidence) for x, y in zip(old, new, strict=True)]
    estimate = sum(part[0] for part in parts) / len(parts)
    below = math.sqrt(sum((middle - low) ** 2 for middle, low, _ in parts)) / len(parts)
    above = math.sqrt(sum((high - middle) ** 2 for middle, _, high in parts)) / len(parts)
    ends = (estimate, estimate - below, estimate + above)
    return Interval(*(torch.tensor(x, dtype=torch.float64) for x in ends))


def _of_task(old: Tensor, new: Tensor, confidence: float) -> tuple[float, float, float]:
    """Return the estimate and both ends of one task, where (estimate − θ)² = t²·Var(θ)."""
    from scipy.special import stdtrit

    middle = float(probability_of_improvement(new[:, None], old[:, None]))
    freedom = len(old) + len(new) - 2
    if freedom == 0:
        return middle, 0.0, 1.0
    t = float(stdtrit(freedom, 0.5 + confidence / 2.0))
    half = 0.5 * (len(old) + len(new)) - 1.0

    def gap(theta: float) -> float:
        # Var(θ) of Hanley and McNeil (1982), with the mean of both numbers of runs
        pairs = 1.0 + half * ((1.0 - theta) / (2.0 - theta) + theta / (1.0 + theta))
        variance = theta * (1.0 - theta) * pairs / (len(old) * len(new))
        return (middle - theta) ** 2 - t * t * variance

    return middle, _root(gap, 0.0, middle), _root(gap, 1.0, middle)


def _root(gap: Callable[[float], float], end: float, middle: float) -> float:
    """Return where `gap` turns from positive (`end`) to negative (`middle`), by bisection."""
    outside, inside = end, middle
    for _ in range(50):
        between = 0.5 * (outside + inside)
        if gap(between) > 0.0:
            outside = between
        else:
            inside = between
    return inside
