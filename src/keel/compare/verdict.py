"""Verdict on a variant: keep, slightly worse, roll back, or not distinguishable.

The criteria are fixed before the comparison, and every doubt is a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from keel.functional import Interval, TrimmedMean, holm, t_interval, t_test, trimmed_mean

Decision = Literal["keep", "slightly worse", "roll back", "not distinguishable"]
TRIMMED_FROM = 5
"""Runs from which the interquartile means are compared; below, plain means: nothing can be cut."""
FEWEST = 3
"""Runs of each side below which scores decide nothing."""
NORMAL, POWER = 1.96, 0.8416
"""Standard errors that exclude 0 at 95 %, and beyond those, to do so in 80 % of repetitions."""
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Criteria:
    """Reasons to roll back: a drop of more than 10 %, new numeric problems, 2× slower."""

    drop: float = 0.10
    slowdown: float = 2.0
    confidence: float = 0.95


@dataclass(frozen=True)
class Effect:
    """Change of a variant, relative to the baseline's size (`difference`), averaged over tasks."""

    estimate: float
    low: float
    high: float
    seeds: int
    """runs of a side, the smaller number"""
    seeds_needed: int | None
    """runs of each side that would find an effect of this size; None above `MOST_SEEDS`"""
    p: float = math.nan
    """two-sided, of no change"""
    p_holm: float = math.nan
    """after Holm's correction for `variants`"""
    variants: int = 1
    """Number of variants that were tested against the same baseline."""


@dataclass(frozen=True)
class Problems:
    """Problems beside the scores that can send a variant back."""

    non_finite: float = 0.0
    """per run"""
    seconds_per_step: float = math.nan


@dataclass(frozen=True)
class Verdict:
    """The decision, and the reasons for it, the first of which decided."""

    decision: Decision
    reasons: tuple[str, ...]


def effect_of(
    baseline: Sequence[Tensor], variant: Sequence[Tensor], confidence: float = 0.95
) -> Effect:
    """Return the relative change of a variant: the mean over tasks of its change / |baseline|.

    A baseline of exactly 0 has no size: there the variant's own counts, and the change is ±100 %.

    Args:
        baseline: scores `[runs]` for every task.
        variant: scores in the same order.
        confidence: share of such intervals that hold the true value.
    """
    seeds = min(len(x) for x in (*baseline, *variant))
    parts = _parts(baseline, variant, relative=True)
    interval, p = t_interval(*parts, confidence=confidence), t_test(*parts)
    estimate, low, high = (float(x) for x in interval)
    return Effect(estimate, low, high, seeds, _seeds_needed(estimate, high - estimate, seeds), p, p)


def correct(effects: Sequence[Effect]) -> list[Effect]:
    """Correct the effects of several variants for their number (Holm 1979).

    Those of too few runs, which are never judged by their scores, do not count among them. The
    seeds that are needed grow with the number: as many as the smallest p-value would need.
    """
    tested = [i for i, effect in enumerate(effects) if effect.seeds >= FEWEST]
    adjusted = holm([effects[i].p for i in tested])
    corrected = list(effects)
    for i, p in zip(tested, adjusted, strict=True):
        old = effects[i]
        seeds_needed = _seeds_needed(old.estimate, old.high - old.estimate, old.seeds, len(tested))
        corrected[i] = replace(old, p_holm=p, variants=len(tested), seeds_needed=seeds_needed)
    return corrected


def difference(
    baseline: Sequence[Tensor], variant: Sequence[Tensor], confidence: float = 0.95
) -> Interval:
    """Return the mean over tasks of variant − baseline, in units of the score.

    Args:
        baseline: Scores `[runs]` of each task.
        variant: Scores `[runs]` of each task, in the same order.
        confidence: Coverage of the interval.
    """
    return t_interval(*_parts(baseline, variant, relative=False), confidence=confidence)


def _parts(
    baseline: Sequence[Tensor], variant: Sequence[Tensor], *, relative: bool
) -> list[tuple[float, TrimmedMean]]:
    """Return the weighted means whose sum is the difference."""
    trim = 0.25 if min(len(x) for x in (*baseline, *variant)) >= TRIMMED_FROM else 0.0
    parts = []
    for old, new in zip(baseline, variant, strict=True):
        before, after = trimmed_mean(old, trim), trimmed_mean(new, trim)
        size = float(before.mean.abs() or after.mean.abs()) if relative else 1.0
        share = 1.0 / (len(baseline) * (size or 1.0))
        parts += [(share, after), (-share, before)]
    return parts


def _seeds_needed(estimate: float, reach: float, seeds: int, variants: int = 1) -> int | None:
    """Return the runs a side that would tell |estimate| from 0 in 80 % of repetitions."""
    from scipy.special import ndtri

    if seeds < 2 or estimate == 0.0 or not math.isfinite(reach):
        return None
    distance = float(ndtri(1.0 - 0.025 / variants)) + POWER if variants > 1 else NORMAL + POWER
    # `reach` is t × the error; with many runs t is 1.96, with few more, which errs to the safe side
    seeds_needed = math.ceil(seeds * (distance / NORMAL * reach / abs(estimate)) ** 2)
    return max(seeds_needed, FEWEST) if seeds_needed <= MOST_SEEDS else None


def decide(
    effect: Effect, baseline: Problems, variant: Problems, criteria: Criteria | None = None
) -> Verdict:
    """Decide on a variant; scores count only as far as their interval lets them.

    Args:
        effect: Difference of the scores.
        baseline: Numeric problems of the baseline.
        variant: Numeric problems of the variant.
        criteria: Limits; None: the default ones.
    """
    limits = criteria or Criteria()
    problems = list(_problems(baseline, variant, limits))
    score = _score(effect, limits)
    if problems:
        return Verdict("roll back", (*problems, score.reasons[0]))
    return score


def _problems(baseline: Problems, variant: Problems, limits: Criteria) -> Sequence[str]:
    reasons = []
    if variant.non_finite > 0 and baseline.non_finite == 0:
        reasons.append(
            f"new numeric problems: {variant.non_finite:g} non-finite values a run, none before"
        )
    slower = (
        variant.seconds_per_step / baseline.seconds_per_step if baseline.seconds_per_step else 0
    )
    if slower > limits.slowdown:
        reasons.append(f"{slower:.1f}× slower, more than {limits.slowdown:g}×")
    return reasons


def _score(effect: Effect, limits: Criteria) -> Verdict:
    size = percent(effect.estimate)
    span = f"{percent(effect.low)} to {percent(effect.high)}"
    if effect.seeds < FEWEST:
        runs = f"{effect.seeds} run{'s' * (effect.seeds != 1)} of a side"
        return Verdict("not distinguishable", (f"{runs} decide nothing: take at least {FEWEST}",))
    if not _is_certain(effect, limits):
        return Verdict("not distinguishable", _doubts(effect, size, span))
    if effect.variants > 1:
        span += f"; p = {effect.p_holm:.2g} after Holm's correction for {effect.variants} variants"
    if effect.estimate > 0.0:
        return Verdict("keep", (f"better by {size} ({span})",))
    if effect.estimate < -limits.drop:
        reason = f"worse by {size} ({span}), more than {percent(limits.drop)}"
        return Verdict("roll back", (reason,))
    reason = f"worse by {size} ({span}), less than the {percent(limits.drop)} that would count"
    return Verdict("slightly worse", (reason,))


def _is_certain(effect: Effect, limits: Criteria) -> bool:
    """Return whether a change is certain, by its interval or, of several, by Holm's p-value."""
    if effect.variants > 1:
        return effect.p_holm <= 1.0 - limits.confidence
    return effect.low > 0.0 or effect.high < 0.0


def _doubts(effect: Effect, size: str, span: str) -> tuple[str, str]:
    """Return why a change is not distinguishable from none, and what would tell."""
    reason = f"{size} ({span}) includes no change"
    if effect.low > 0.0 or effect.high < 0.0:
        reason = (
            f"{size} ({span}) would count alone (p = {effect.p:.2g}), but not as one of "
            f"{effect.variants} variants: p = {effect.p_holm:.2g} after Holm's correction"
        )
    if effect.seeds_needed is None:
        remedy = f"more than {MOST_SEEDS} runs each would be needed to tell {size} from nothing"
    else:
        remedy = (
            f"about {effect.seeds_needed} runs each would be needed to tell {size} from nothing"
        )
    return reason, remedy


def percent(share: float) -> str:
    """Format a share in per cent, as short as its size allows."""
    if not math.isfinite(share):
        return "∞" if share > 0 else "−∞"
    digits = 1 if abs(share) < 0.1 else 0
    return f"{100.0 * share:,.{digits}f} %".replace("-", "−")
