"""Curves of runs that logged at different steps, on one grid of steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from keel.compare.sources import Run
from keel.errors import InputError

Values = NDArray[np.float64]

POINTS = 200
"""Number of points of the grid."""
RETURN, EVALUATION = "rollout/return_mean", "eval/return_mean"


def horizon(runs: Sequence[Run], metric: str, max_steps: int | None = None) -> int:
    """Return the last step that all runs have reached: nothing beyond it can be compared.

    Args:
        runs: Runs to compare.
        metric: Name of the metric.
        max_steps: Upper limit.
    """
    ends = []
    for run in runs:
        steps, values = finite_values(run, metric)
        if not values.size:
            raise InputError(f"{run.path}: no value of {metric}; choose another --metric")
        ends.append(int(steps[-1]))
    end = min(ends)
    return end if max_steps is None else min(end, max_steps)


def grid_to(end: int) -> Values:
    """Return the steps at which curves are compared: the ends of equal parts, `[POINTS]`."""
    return np.linspace(0.0, float(end), POINTS + 1)[1:]


def on_grid(run: Run, metric: str, grid: Values) -> Values:
    """Return the mean of a metric in each part of a run, `[POINTS]`; empty parts keep the last.

    Means, not interpolation: CleanRL logs single episodes, whose noise a picked point would keep.

    Args:
        run: A run.
        metric: Name of the metric.
        grid: Ends of the parts, `[POINTS]`.
    """
    steps, values = finite_values(run, metric)
    inside = steps <= grid[-1]
    part = np.searchsorted(grid, steps[inside])
    total, count = np.zeros(len(grid)), np.zeros(len(grid))
    np.add.at(total, part, values[inside])
    np.add.at(count, part, 1.0)
    curve = np.divide(total, count, out=np.full(len(grid), np.nan), where=count > 0)
    last = np.maximum.accumulate(np.where(count > 0, np.arange(len(grid)), -1))
    return np.where(last >= 0, curve[np.maximum(last, 0)], np.nan)


def final_score(run: Run, metric: str, end: int, tail: float) -> float:
    """Return the mean of the metric over the last `tail` of the run, else its last value.

    Args:
        run: A run.
        metric: Name of the metric.
        end: Last step to count.
        tail: Share of the run that is averaged.
    """
    steps, values = finite_values(run, metric)
    before = steps <= end
    in_tail = before & (steps > (1.0 - tail) * end)
    return float(values[in_tail].mean()) if in_tail.any() else float(values[before][-1])


def finite_values(run: Run, metric: str) -> tuple[Values, Values]:
    """Return steps and values where the metric is a finite number, `[n]` each."""
    values = run.table.columns.get(metric)
    if values is None:
        return np.zeros(0), np.zeros(0)
    finite = np.isfinite(values)
    return run.table.step[finite].astype(np.float64), values[finite]


def choose_metric(runs: Sequence[Run], tail: float) -> str:
    """Return the metric of evaluations if every run has one near the common end, else returns."""
    return EVALUATION if all(have_evaluations(runs, tail)) else RETURN


def have_evaluations(runs: Sequence[Run], tail: float) -> list[bool]:
    """Return for every run whether it has an evaluation near the common end."""
    end = min(int(run.table.step[-1]) if len(run.table) else 0 for run in runs)

    def has_one(run: Run) -> bool:
        steps, _ = finite_values(run, EVALUATION)
        return bool(((steps > (1.0 - tail) * end) & (steps <= end)).any())

    return [has_one(run) for run in runs]


def describe_metrics(runs: Sequence[Run], metric: str, curve: str, tail: float) -> list[str]:
    """Say what every run is judged by, and warn where groups could be judged by different things.

    Args:
        runs: all runs of the comparison.
        metric: what scores are computed from.
        curve: what curves, areas and steps to a threshold are computed from.
        tail: share of the way that scores are averaged over.
    """
    kinds = {
        EVALUATION: f"evaluation returns ({EVALUATION})",
        RETURN: f"training returns, with exploration ({RETURN})",
    }
    all_runs = "the run" if len(runs) == 1 else f"all {len(runs)} runs"
    scores = f"scores of {all_runs} are {kinds.get(metric, metric)}"
    if curve != metric:
        scores += f"; curves, area and steps are {kinds.get(curve, curve)}"
    evaluated = have_evaluations(runs, tail)
    if metric != RETURN or all(evaluated) or not any(evaluated):
        return [scores]
    groups = [
        dict.fromkeys(run.group for run, flag in zip(runs, evaluated, strict=True) if flag is value)
        for value in (True, False)
    ]
    return [
        scores,
        f"warning: runs of {', '.join(groups[0])} end with evaluations, runs of "
        f"{', '.join(groups[1])} do not, so none is used; evaluate all at their end, or choose "
        f"with --metric",
    ]
