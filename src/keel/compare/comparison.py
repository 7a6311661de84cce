"""Comparison of groups of runs: what each earned and cost, and a verdict for every pair."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.compare.align import (
    EVALUATION,
    RETURN,
    Values,
    choose_metric,
    describe_metrics,
    final_score,
    finite_values,
    grid_to,
    horizon,
    on_grid,
)
from keel.compare.intervals import improvement_interval, score_interval
from keel.compare.sources import Run, differences
from keel.compare.stability import Stability, stability_of
from keel.compare.verdict import (
    FEWEST,
    TRIMMED_FROM,
    Criteria,
    Effect,
    Problems,
    Verdict,
    correct,
    decide,
    difference,
    effect_of,
)
from keel.errors import InputError, check_choice
from keel.functional import Interval, interquartile_mean


@dataclass(frozen=True)
class Group:
    """Runs that belong together."""

    name: str
    runs: Sequence[Run] = field(repr=False)
    scores: dict[str, Tensor]
    """`[runs]` by task"""
    curves: dict[str, Values] = field(repr=False)
    """`[runs, grid]` by task"""
    iqm: Interval
    """Interquartile mean of the scores, their mean below five runs; with several tasks, the mean
    over tasks of score / |baseline|."""
    auc: dict[str, float]
    """mean of the curve up to the horizon, by task: its interquartile mean over runs"""
    reached: dict[str, tuple[int, float]]
    """runs that reached the threshold, and the median of their steps, by task"""
    seconds_per_step: float
    stability: Stability


@dataclass(frozen=True)
class Pair:
    """A variant against the baseline."""

    baseline: str
    variant: str
    verdict: Verdict
    effect: Effect
    difference: Interval
    """in the units of the metric; of one task"""
    better: Interval
    """probability of improvement"""
    changes: dict[str, tuple[str, str]]
    """Fields of the configuration that differ, with both values."""


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison."""

    metric: str
    curve_metric: str
    tasks: tuple[str, ...]
    horizon: dict[str, int]
    thresholds: dict[str, float]
    groups: tuple[Group, ...]
    pairs: tuple[Pair, ...]
    criteria: Criteria
    notes: tuple[str, ...]
    """Remarks for the reader: runs cut short, estimates in place of exact values."""

    def __str__(self) -> str:
        """Return tables, verdicts and notes as plain text."""
        from keel.compare.tables import text

        return text(self)


def compare(
    runs: Sequence[Run],
    *,
    baseline: str | None = None,
    metric: str | None = None,
    steps: int | None = None,
    tail: float = 0.1,
    threshold: float | None = None,
    criteria: Criteria | None = None,
) -> Comparison:
    """Compare every group of runs with a baseline.

    Args:
        runs: as `load_runs` returns them.
        baseline: name of a group; by default the first.
        metric: what scores are computed from; by default evaluations where all runs have them,
            else the return in training.
        steps: compare up to this step; by default to the last step that all runs have reached.
        tail: share of a run, at its end, that its score is averaged over.
        threshold: return whose first reaching is timed; by default 90 % of the baseline's way.
        criteria: when a variant is rolled back.
    """
    if not 0.0 < tail <= 1.0:
        raise InputError(f"tail: expected a share of the run, above 0 and up to 1, got {tail}")
    names = list(dict.fromkeys(run.group for run in runs))
    first = names[0] if baseline is None else check_choice("baseline", baseline, names)
    names.sort(key=lambda name: name != first)
    tasks = _tasks(runs, names)
    runs = [run for run in runs if run.task in tasks]
    metric = metric or choose_metric(runs, tail)
    curve = RETURN if metric == EVALUATION and _all_have(runs, RETURN) else metric
    ends = {t: horizon([r for r in runs if r.task == t], metric, steps) for t in tasks}
    limits = criteria or Criteria()

    scores: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    curves: dict[str, dict[str, Values]] = {name: {} for name in names}
    for name, t in itertools.product(names, tasks):
        own = [run for run in runs if (run.group, run.task) == (name, t)]
        scores[name][t] = torch.tensor(
            [final_score(run, metric, ends[t], tail) for run in own], dtype=torch.float64
        )
        curves[name][t] = np.stack([on_grid(run, curve, grid_to(ends[t])) for run in own])
    levels = {t: _threshold(curves[first][t], threshold) for t in tasks}
    groups = tuple(
        _group(name, runs, scores, curves[name], first, ends, levels, limits) for name in names
    )
    pairs = _pairs(groups[0], groups[1:], limits)
    notes = (
        *describe_metrics(runs, metric, curve, tail),
        *_notes(runs, groups, ends),
        *_correction(pairs, limits),
        *(f"{run.path}: {sentence}" for run in runs for sentence in run.table.damage),
    )
    return Comparison(metric, curve, tasks, ends, levels, groups, pairs, limits, notes)


def _tasks(runs: Sequence[Run], names: Sequence[str]) -> tuple[str, ...]:
    """Return the environments that every group has."""
    tasks_by_group = {name: {run.task for run in runs if run.group == name} for name in names}
    common = set.intersection(*tasks_by_group.values())
    if not common:
        parts = (f"{name}: {', '.join(sorted(x))}" for name, x in tasks_by_group.items())
        listed = "; ".join(parts)
        raise InputError(f"the groups have no environment in common ({listed})")
    return tuple(task for task in dict.fromkeys(run.task for run in runs) if task in common)


def _all_have(runs: Sequence[Run], metric: str) -> bool:
    return all(finite_values(run, metric)[1].size for run in runs)


def _group(
    name: str,
    runs: Sequence[Run],
    scores: dict[str, dict[str, Tensor]],
    curves: dict[str, Values],
    baseline: str,
    ends: dict[str, int],
    levels: dict[str, float],
    limits: Criteria,
) -> Group:
    group_runs = [run for run in runs if run.group == name]
    per_step = [x for run in group_runs if math.isfinite(x := _seconds_per_step(run))]
    return Group(
        name=name,
        runs=group_runs,
        scores=scores[name],
        curves=curves,
        iqm=_iqm(scores[name], scores[baseline], limits.confidence),
        auc={t: _middle(_over_time(curve)) for t, curve in curves.items()},
        reached={t: _reached(curve, grid_to(ends[t]), levels[t]) for t, curve in curves.items()},
        seconds_per_step=statistics.median(per_step) if per_step else math.nan,
        stability=stability_of(group_runs),
    )


def _iqm(scores: dict[str, Tensor], baseline: dict[str, Tensor], confidence: float) -> Interval:
    """Return the score of a group; with several tasks, in units of the baseline's."""
    if len(scores) == 1:
        return score_interval(list(scores.values()), confidence)
    sizes = {t: float(score_interval([x]).estimate.abs()) or 1.0 for t, x in baseline.items()}
    return score_interval([x / sizes[t] for t, x in scores.items()], confidence)


def _pairs(baseline: Group, variants: Sequence[Group], limits: Criteria) -> tuple[Pair, ...]:
    """Judge every variant, corrected for how many there are."""
    tasks = list(baseline.scores)
    old = [baseline.scores[t] for t in tasks]
    scores = [[variant.scores[t] for t in tasks] for variant in variants]
    effects = correct([effect_of(old, new, limits.confidence) for new in scores])
    return tuple(
        Pair(
            baseline=baseline.name,
            variant=variant.name,
            verdict=decide(effect, _problems(baseline), _problems(variant), limits),
            effect=effect,
            difference=difference(old, new, limits.confidence),
            better=improvement_interval(old, new, limits.confidence),
            changes=differences(baseline.runs, variant.runs),
        )
        for variant, new, effect in zip(variants, scores, effects, strict=True)
    )


def _correction(pairs: Sequence[Pair], limits: Criteria) -> list[str]:
    """Describe the correction for several variants."""
    tested = [pair for pair in pairs if pair.effect.seeds >= FEWEST]
    if len(tested) < 2:
        return []
    return [
        f"{len(tested)} variants against one baseline: verdicts follow p-values after Holm's "
        f"correction, which err in at most {1.0 - limits.confidence:.0%} of such comparisons, all "
        "variants taken together; intervals are those of each pair alone"
    ]


def _problems(group: Group) -> Problems:
    return Problems(group.stability.non_finite, group.seconds_per_step)


def _threshold(curves: Values, threshold: float | None) -> float:
    """Return the threshold, by default 90 % of the way from the baseline's start to its end."""
    if threshold is not None:
        return threshold
    start = _middle(np.array([curve[np.isfinite(curve)][0] for curve in curves]))
    end = _middle(curves[:, -1])
    return start + 0.9 * (end - start)


def _reached(curves: Values, grid: Values, level: float) -> tuple[int, float]:
    above = curves >= level
    reached = above.any(axis=1)
    steps = grid[above.argmax(axis=1)][reached]
    return int(reached.sum()), float(np.median(steps)) if reached.any() else math.nan


def _seconds_per_step(run: Run) -> float:
    seconds = run.table.columns.get("time/seconds")
    if seconds is not None and np.isfinite(seconds).any() and run.table.step[-1] > 0:
        return float(np.nanmax(seconds)) / float(run.table.step[-1])
    rate = run.table.columns.get("time/steps_per_second")
    if rate is not None and np.isfinite(rate).any():
        return 1.0 / float(np.nanmean(rate))
    return math.nan


def _over_time(curves: Values) -> Values:
    """Return the mean of every curve where it is known; NaN for one that never is.

    Args:
        curves: A row for every run, shape `(runs, points)`.
    """
    finite = ~np.isnan(curves)
    points = finite.sum(axis=1)
    means: Values = np.full(len(curves), np.nan)
    np.divide(np.where(finite, curves, 0.0).sum(axis=1), points, out=means, where=points > 0)
    return means


def _middle(values: Values) -> float:
    return float(interquartile_mean(torch.from_numpy(np.ascontiguousarray(values))))


def _notes(runs: Sequence[Run], groups: Sequence[Group], ends: dict[str, int]) -> list[str]:
    notes = []
    for task, end in ends.items():
        longest = max(int(run.table.step[-1]) for run in runs if run.task == task)
        if longest > 1.02 * end:
            prefix = f"{task}: " if len(ends) > 1 else ""
            notes.append(
                f"{prefix}compared up to step {end:,}, where the shortest run ends; "
                f"the longest has {longest:,}"
            )
    if not all(group.stability.kl_is_exact for group in groups):
        notes.append("some KLs are the estimates of foreign logs, not exact values")
    fewest_runs = min(len(x) for group in groups for x in group.scores.values())
    if fewest_runs < TRIMMED_FROM:
        notes.append(f"fewer than {TRIMMED_FROM} runs a side: means and Student's t decide")
    return notes


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain data, with null for what is not a number.

    Args:
        comparison: as `compare` returns it; a single pair stands at the top level, too.
    """
    pairs = [_pair_json(pair, comparison) for pair in comparison.pairs]
    return {
        **(pairs[0] if len(pairs) == 1 else {}),
        "metric": comparison.metric,
        "curve_metric": comparison.curve_metric,
        "tasks": list(comparison.tasks),
        "horizon": comparison.horizon,
        "thresholds": {t: _number(x) for t, x in comparison.thresholds.items()},
        "groups": {group.name: _group_json(group) for group in comparison.groups},
        "pairs": pairs,
        "notes": list(comparison.notes),
    }


def _pair_json(pair: Pair, comparison: Comparison) -> dict[str, Any]:
    by_name = {group.name: group for group in comparison.groups}
    return {
        "baseline": pair.baseline,
        "variant": pair.variant,
        "verdict": pair.verdict.decision,
        "reasons": list(pair.verdict.reasons),
        "iqm": {
            name: _number(float(by_name[name].iqm.estimate))
            for name in (pair.baseline, pair.variant)
        },
        "difference": _number(float(pair.difference.estimate)),
        "interval": _ends(pair.difference),
        "relative": _number(pair.effect.estimate),
        "relative_interval": [_number(pair.effect.low), _number(pair.effect.high)],
        "probability_of_improvement": _number(float(pair.better.estimate)),
        "probability_interval": _ends(pair.better),
        "p": _number(pair.effect.p),
        "p_holm": _number(pair.effect.p_holm),
        "variants_tested": pair.effect.variants,
        "seeds": pair.effect.seeds,
        "seeds_needed": pair.effect.seeds_needed,
        "changes": {name: list(values) for name, values in pair.changes.items()},
    }


def _group_json(group: Group) -> dict[str, Any]:
    return {
        "runs": [str(run.path) for run in group.runs],
        "scores": {t: [_number(float(x)) for x in scores] for t, scores in group.scores.items()},
        "iqm": _number(float(group.iqm.estimate)),
        "interval": _ends(group.iqm),
        "auc": {t: _number(x) for t, x in group.auc.items()},
        "reached": {t: {"runs": n, "steps": _number(x)} for t, (n, x) in group.reached.items()},
        "seconds_per_step": _number(group.seconds_per_step),
        "stability": {k: _number(v) for k, v in vars(group.stability).items()},
    }


def _ends(interval: Interval) -> list[float | None]:
    return [_number(float(interval.low)), _number(float(interval.high))]


def _number(x: float) -> float | None:
    return x if math.isfinite(x) else None
