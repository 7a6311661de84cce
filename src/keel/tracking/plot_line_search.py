"""Curves of TRPO's line search; a rejected step is a mark, never a KL of 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keel.look import BLUE, GREEN, INK, ORANGE, new_figure
from keel.tracking.drawing import (
    axes_for,
    column,
    describe_range,
    draw_bound,
    finish,
    last,
    line,
    verdicts,
)
from keel.tracking.reader import MetricsTable

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

SUCCESS, ENTROPY = "train/line_search_success", "train/entropy"
MEMORY = 20
"""Updates over which success and step fraction are averaged."""


def draw_line_search(table: MetricsTable, title: str) -> Figure:
    """Draw the return, the KL under its adaptive bound, LS_OK and StepFrac, and the entropy."""
    figure = new_figure(9.0, 10.4)
    panels = figure.subplots(5, sharex=True, gridspec_kw={"height_ratios": (3, 3, 2, 1.6, 1.6)})
    returns, kl, searches, entropy, weight = panels
    steps = table.step.astype(float)
    draw_return(axes_for(figure, returns, "return", x=""), steps, table)
    _draw_kl(axes_for(figure, kl, "KL(old‖new)", x=""), steps, table)
    draw_searches(axes_for(figure, searches, "line search", x=""), table)
    _draw_weight(axes_for(figure, entropy, "entropy", x=""), steps, column(table, ENTROPY))
    _draw_weight(axes_for(figure, weight, "coefficient"), steps, column(table, f"{ENTROPY}_coef"))
    rejected = verdicts(table)[1]
    share = 1.0 - rejected.mean() if len(table) else float("nan")
    summary = (
        f"{len(table)} updates, {rejected.sum()} rejected (LS_OK {share:.1%})"
        f"{describe_range(column(table, 'train/max_kl'))} · "
        f"damping {last(column(table, 'train/damping')):.3g} at the end"
    )
    return finish(figure, returns, f"Line search: {title}", summary)


def draw_searches(axes: Axes, table: MetricsTable) -> None:
    """Draw the success rate of the search and the step fraction, over the last updates."""
    steps = table.step.astype(float)
    success, fraction = column(table, SUCCESS), column(table, "train/step_fraction")
    axes.axhspan(0.0, 0.3, color=ORANGE, alpha=0.08, linewidth=0)
    line(axes, steps, rolling(success), color=GREEN, linewidth=1.6, label="LS_OK")
    line(axes, steps, rolling(fraction), color=INK, linewidth=1.1, label="StepFrac")
    failed = success == 0.0
    if failed.any():
        axes.plot(steps[failed], 0.0 * steps[failed], "X", color=ORANGE, markersize=6,
                  markeredgecolor="white", clip_on=False, label="rejected")  # fmt: skip
    axes.set_ylim(-0.03, 1.06)
    axes.legend(loc="lower left", frameon=False, fontsize=8, ncols=3, labelcolor=INK)


def draw_return(axes: Axes, steps: Values, table: MetricsTable) -> None:
    """Draw the return of training and of evaluations."""
    import numpy as np

    mean, score = column(table, "rollout/return_mean"), column(table, "eval/return_mean")
    line(axes, steps, mean, color=BLUE, linewidth=1.8, label="training, last 100 episodes")
    finite = np.isfinite(score)
    if finite.any():
        axes.plot(steps[finite], score[finite], "o", color=ORANGE, markersize=6,
                  markeredgecolor="white", label="evaluation")  # fmt: skip


def _draw_kl(axes: Axes, steps: Values, table: MetricsTable) -> None:
    import numpy as np

    bound, kl = column(table, "train/max_kl"), column(table, "train/kl_step")
    rejected = verdicts(table)[1]
    if np.isfinite(bound).any():
        draw_bound(axes, steps, bound, linewidth=1.4, label="max_kl")
        axes.set_ylim(0.0, 1.15 * float(np.nanmax(bound)))
    line(axes, steps, kl, color=BLUE, linewidth=1.0, label="exact KL of accepted steps")
    if rejected.any():
        axes.plot(steps[rejected], bound[rejected], "X", color=ORANGE, markersize=7,
                  markeredgecolor="white", clip_on=False, label="rejected")  # fmt: skip
    axes.legend(loc="lower left", frameon=False, fontsize=8, ncols=3, labelcolor=INK)


def _draw_weight(axes: Axes, steps: Values, values: Values) -> None:
    import numpy as np

    line(axes, steps, values, color=INK, linewidth=1.4)
    largest = float(np.nanmax(values)) if np.isfinite(values).any() else 1.0
    axes.set_ylim(0.0, 1.15 * largest or 1.0)


def rolling(values: Values) -> Values:
    """Return the mean of the finite ones among the last `MEMORY` values, at every position."""
    import numpy as np

    if not values.size:
        return values
    finite = np.isfinite(values)
    sums = np.cumsum(np.append(0.0, np.where(finite, values, 0.0)))
    counts = np.cumsum(np.append(0, finite))
    start = np.maximum(np.arange(1, values.size + 1) - MEMORY, 0)
    with np.errstate(invalid="ignore"):
        return np.asarray((sums[1:] - sums[start]) / (counts[1:] - counts[start]))
