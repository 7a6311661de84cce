"""Running moments, fit and sample-size measures, and the statistics of comparing runs.

States go in and come out; nothing is kept. Scores of several runs are `[runs, tasks]`, as in
Agarwal et al. 2021 (arXiv 2108.13264, "rliable"), whose definitions these follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from keel.errors import InputError, ShapeError, expect_rank, expect_same


class Moments(NamedTuple):
    """Weight, mean and sum of squared deviations, in float64: `[]`, `[*shape]`, `[*shape]`."""

    weight: Tensor
    mean: Tensor
    deviations: Tensor

    @property
    def variance(self) -> Tensor:
        """Population variance; 1 before the first sample, so that dividing is harmless."""
        return torch.where(self.weight > 0, self.deviations / self.weight.clamp(min=1e-300), 1.0)


class Interval(NamedTuple):
    """A point estimate with the ends of its confidence interval."""

    estimate: Tensor
    low: Tensor
    high: Tensor


def empty_moments(shape: tuple[int, ...] = (), device: torch.device | None = None) -> Moments:
    """Return the moments of no sample: the state before the first batch.

    Args:
        shape: shape of one row.
        device: where the state lives; the CPU by default.
    """
    zeros = torch.zeros(shape, dtype=torch.float64, device=device)
    return Moments(torch.zeros((), dtype=torch.float64, device=device), zeros, zeros.clone())


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Merge the moments of two samples (Chan, Golub and LeVeque 1979).

    Args:
        a: moments of rows `[*shape]`.
        b: moments of other rows of that shape.
    """
    weight = a.weight + b.weight
    share = b.weight / weight.clamp(min=1e-300)
    gap = b.mean - a.mean
    return Moments(
        weight=weight,
        mean=a.mean + gap * share,
        deviations=a.deviations + b.deviations + gap * gap * a.weight * share,
    )


def update_moments(state: Moments, batch: Tensor, weight: Tensor | None = None) -> Moments:
    """Absorb a batch into the moments.

    Args:
        state: moments of rows `[*shape]`.
        batch: `[*lead, *shape]`.
        weight: `[*lead]`, 0 for rows that do not count; None for 1.
    """
    features = tuple(state.mean.shape)
    lead = tuple(batch.shape[: batch.ndim - len(features)])
    if tuple(batch.shape[len(lead) :]) != features or len(lead) + len(features) != batch.ndim:
        raise ShapeError(
            f"batch: expected [*lead, *{list(features)}] (the shape of the moments), "
            f"got {list(batch.shape)}"
        )
    rows = batch.reshape(-1, *features).to(torch.float64)
    if weight is None:
        amount = rows.new_ones(rows.shape[0])
    else:
        expect_same("the leading axes of batch", lead, weight=weight)
        amount = weight.reshape(-1).to(torch.float64)
    column = amount.reshape(-1, *[1] * len(features))
    rows = torch.where(column > 0, rows, 0.0)
    total = amount.sum()
    mean = (rows * column).sum(0) / total.clamp(min=1e-300)
    deviations = ((rows - mean) ** 2 * column).sum(0)
    return merge_moments(state, Moments(total, mean, deviations))


def explained_variance(prediction: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute 1 − Var(target − prediction) / Var(target): 1 is perfect, 0 as good as a constant.

    NaN where the target does not vary: nothing is there to explain.

    Args:
        prediction: `[*lead]`.
        target: `[*lead]`.
        weight: `[*lead]`, 0 for rows that do not count; None for 1.
    """
    expect_same("target", tuple(target.shape), prediction=prediction, weight=weight)
    residual = update_moments(empty_moments(device=target.device), target - prediction, weight)
    total = update_moments(empty_moments(device=target.device), target, weight)
    share = residual.deviations / total.deviations
    # The mean of equal numbers may be off by a rounding error, which is no variation.
    varies = total.variance.sqrt() > 1e-12 * total.mean.abs()
    return torch.where(varies, 1.0 - share, torch.nan)


def interquartile_mean(scores: Tensor) -> Tensor:
    """Average the middle half of all scores: a quarter, rounded down, is cut off each end.

    More robust than the mean, more efficient than the median (Agarwal et al. 2021, §4.3).

    Args:
        scores: of any shape.
    """
    ordered = scores.reshape(-1).sort().values
    cut = ordered.shape[0] // 4
    return ordered[cut : ordered.shape[0] - cut].mean()


def probability_of_improvement(x: Tensor, y: Tensor) -> Tensor:
    """Estimate P(X > Y) + ½ P(X = Y), averaged over tasks.

    Args:
        x: `[runs, tasks]`.
        y: `[other runs, tasks]`.
    """
    _check_scores("x", x)
    _check_scores("y", y)
    if x.shape[1] != y.shape[1]:
        raise ShapeError(f"y: expected {x.shape[1]} tasks (those of x), got {list(y.shape)}")
    wins = (x[:, None] > y[None]).to(torch.float64)
    ties = (x[:, None] == y[None]).to(torch.float64)
    return (wins + 0.5 * ties).mean()


def performance_profile(scores: Tensor, thresholds: Tensor) -> Tensor:
    """Return the share of runs above each threshold, averaged over tasks: `[thresholds]`.

    Args:
        scores: `[runs, tasks]`.
        thresholds: `[thresholds]`.
    """
    _check_scores("scores", scores)
    return (scores[..., None] > thresholds).to(torch.float64).mean((0, 1))


def stratified_bootstrap(
    statistic: Callable[..., Tensor],
    *scores: Tensor,
    generator: torch.Generator,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> Interval:
    """Bootstrap a percentile interval, resampling the runs of every task on their own.

    All resamples go through `statistic` at once (`torch.vmap`), so it has to be made of torch's
    operations.

    Args:
        statistic: maps `*scores` to a number.
        scores: `[runs, tasks]` each, resampled independently of the others.
        generator: source of the resampling.
        confidence: share of such intervals that hold the true value.
        resamples: number of resamples.
    """
    for index, table in enumerate(scores):
        _check_scores(f"scores[{index}]", table)
    drawn = [_resample(table, resamples, generator) for table in scores]
    draws = torch.vmap(statistic)(*drawn)
    tail = (1.0 - confidence) / 2.0
    levels = torch.tensor([tail, 1.0 - tail], dtype=draws.dtype, device=draws.device)
    low, high = torch.quantile(draws, levels, dim=0)
    return Interval(statistic(*scores), low, high)


def _resample(scores: Tensor, resamples: int, generator: torch.Generator) -> Tensor:
    """`[resamples, runs, tasks]`, every task's runs drawn with replacement."""
    shape = (resamples, *scores.shape)
    runs = torch.randint(scores.shape[0], shape, generator=generator, device=generator.device)
    return scores.expand(shape).gather(1, runs.to(scores.device))


def _check_scores(name: str, scores: Tensor) -> None:
    expect_rank(name, scores, 2, "[runs, tasks]")
    if scores.ndim != 2 or 0 in scores.shape:
        raise ShapeError(f"{name}: expected [runs, tasks], got {list(scores.shape)}")


class TrimmedMean(NamedTuple):
    """A mean after trimming, its squared standard error, and their degrees of freedom."""

    mean: Tensor
    error: Tensor
    freedom: int


def trimmed_mean(x: Tensor, trim: float = 0.25) -> TrimmedMean:
    """Average `x` without the lowest and the highest share `trim`, with the error of that mean.

    The error is that of Tukey and McLaughlin (1963), from the winsorised variance; `trim` = 0 gives
    the mean and s²/n, ¼ the interquartile mean. NaN where too few numbers remain.

    Args:
        x: `[n]`.
        trim: share that is cut off each end.
    """
    expect_rank("x", x, 1, "[n]")
    ordered = x.to(torch.float64).reshape(-1).sort().values
    count = ordered.shape[0]
    cut = int(trim * count)
    inner = ordered[cut : count - cut]
    size = inner.shape[0]
    if size < 2:
        return TrimmedMean(inner.mean(), ordered.new_tensor(torch.nan), size - 1)
    winsorized = ordered.clamp(inner[0], inner[-1])
    error = (count - 1) * winsorized.var() / (size * (size - 1))
    return TrimmedMean(inner.mean(), error, size - 1)


def t_interval(*parts: tuple[float, TrimmedMean], confidence: float = 0.95) -> Interval:
    """Compute Student's interval of Σ c·mean; of two means with c = ±1 it is Welch's and Yuen's.

    Degrees of freedom after Welch and Satterthwaite (1946); Yuen (1974) for trimmed means. It holds
    what it promises at three runs already, where a bootstrap has nothing to resample.

    Args:
        parts: pairs (c, mean).
        confidence: share of such intervals that hold the true value.
    """
    from scipy.special import stdtrit  # a seventh of the time that scipy.stats takes to import

    estimate, variance, freedom = _combine(parts)
    if not torch.isfinite(variance):
        return Interval(estimate, estimate - torch.inf, estimate + torch.inf)
    reach = float(stdtrit(freedom, 0.5 + confidence / 2.0)) * variance.sqrt()
    return Interval(estimate, estimate - reach, estimate + reach)


def t_test(*parts: tuple[float, TrimmedMean]) -> float:
    """Return the two-sided p-value of Σ c·mean = 0, by the same t as `t_interval`.

    It is at most 1 − c exactly where the interval of confidence c excludes 0. Without any spread it
    is 0, or 1 for a sum of exactly 0; where nothing is known about the spread, 1.

    Args:
        parts: pairs (c, mean).
    """
    from scipy.special import stdtr

    estimate, variance, freedom = _combine(parts)
    if not torch.isfinite(variance) or float(estimate) == 0.0:
        return 1.0
    if float(variance) == 0.0:
        return 0.0
    return 2.0 * float(stdtr(freedom, -float(estimate.abs() / variance.sqrt())))


def _combine(parts: tuple[tuple[float, TrimmedMean], ...]) -> tuple[Tensor, Tensor, float]:
    """Σ c·mean, its squared error, and the degrees of freedom after Welch and Satterthwaite."""
    estimate = torch.stack([c * part.mean for c, part in parts]).sum()
    terms = [c * c * part.error for c, part in parts]
    variance = torch.stack(terms).sum()
    if not torch.isfinite(variance) or float(variance) == 0.0:
        return estimate, variance, 1.0
    shares = [
        (term / variance) ** 2 / part.freedom for term, (_, part) in zip(terms, parts, strict=True)
    ]
    return estimate, variance, 1.0 / float(torch.stack(shares).sum())


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number (Holm 1979), in the order given.

    The i-th smallest of m is multiplied by m − i + 1, and none is below a smaller one's. Rejecting
    those up to α then errs about any true hypothesis with probability α at most.

    Args:
        p_values: one for each hypothesis.

    Examples:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def wilson_interval(successes: float, trials: float, confidence: float = 0.95) -> Interval:
    """Compute the interval of a proportion (Wilson 1927), which stays inside of [0, 1].

    Args:
        successes: How many of the trials succeeded.
        trials: How many there were, independent of each other.
        confidence: Share of such intervals that hold the true proportion.
    """
    from scipy.special import ndtri

    if not 0.0 <= successes <= trials or trials <= 0.0:
        raise InputError(
            f"successes: expected 0 to {trials:g}, of trials above 0, got {successes:g}"
        )
    z = float(ndtri(0.5 + confidence / 2.0))
    rate, shrink = successes / trials, 1.0 + z * z / trials
    center = (rate + z * z / (2.0 * trials)) / shrink
    reach = z / shrink * math.sqrt(rate * (1.0 - rate) / trials + z * z / (4.0 * trials**2))
    ends = (max(0.0, center - reach), min(1.0, center + reach))
    return Interval(*(torch.tensor(x, dtype=torch.float64) for x in (rate, *ends)))
