"""Curves of demonstrations in a run: how hard they pulled, and whether the reward agreed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keel.look import BLUE, GREEN, INK, ORANGE, new_figure
from keel.tracking.drawing import axes_for, column, finish, last, line
from keel.tracking.metrics import DOMINATES
from keel.tracking.plot_line_search import draw_return, rolling
from keel.tracking.reader import MetricsTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COEF, PULL, COSINE = "train/bc_coef", "train/bc_gradient_ratio", "train/bc_cosine"
LEAST, MOST = 1e-3, 1e3
"""Ends of the logarithmic axis, where the data do not ask for less."""


def draw_cloning(table: MetricsTable, title: str) -> Figure:
    """Draw the return, the pull of demonstrations with their coefficient, agreement and loss."""
    figure = new_figure(9.0, 8.6)
    panels = figure.subplots(4, sharex=True, gridspec_kw={"height_ratios": (3, 2.6, 2, 1.6)})
    returns, pull, cosine, loss = panels
    steps = table.step.astype(float)
    draw_return(axes_for(figure, returns, "return", x=""), steps, table)
    _draw_pull(axes_for(figure, pull, "pull", x=""), table)
    _draw_cosine(axes_for(figure, cosine, "agreement", x=""), table)
    bottom = axes_for(figure, loss, "−log π shown")
    line(bottom, steps, column(table, "train/bc_loss"), color=INK, linewidth=1.4)
    dominated = int((column(table, PULL) > DOMINATES).sum())
    summary = (
        f"coefficient {column(table, COEF)[0]:.3g} in the first update, "
        f"{last(column(table, COEF)):.3g} in the last · "
        f"they ruled (pull above {DOMINATES:g}) in {dominated} of {len(table)} updates"
    )
    return finish(figure, returns, f"Demonstrations: {title}", summary)


def _draw_pull(axes: Axes, table: MetricsTable) -> None:
    import numpy as np

    steps = table.step.astype(float)
    pull, coef = column(table, PULL), column(table, COEF)
    axes.axhspan(DOMINATES, 1e9, color=ORANGE, alpha=0.08, linewidth=0)
    axes.axhline(1.0, color=GREEN, linewidth=1.0, linestyle=(0, (4, 3)))
    line(axes, steps, pull, color=BLUE, linewidth=1.1, label="‖coef · ∇ cloning‖ / ‖∇ surrogate‖")
    line(axes, steps, coef, color=INK, linewidth=1.1, label="coefficient")
    axes.set_yscale("log")
    positive = np.concatenate([pull, coef])
    positive = positive[np.isfinite(positive) & (positive > 0.0)]
    if positive.size:
        low, high = float(positive.min()) / 1.5, max(12.0, float(positive.max()) * 4.0)
        axes.set_ylim(max(low, LEAST), min(high, MOST))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(loc="upper right", frameon=False, fontsize=8, ncols=2, labelcolor=INK)


def _draw_cosine(axes: Axes, table: MetricsTable) -> None:
    steps, cosine = table.step.astype(float), column(table, COSINE)
    axes.axhspan(-1.0, 0.0, color=ORANGE, alpha=0.06, linewidth=0)
    axes.plot(steps, cosine, ".", color=BLUE, markersize=2.5, alpha=0.5, label="cosine")
    line(axes, steps, rolling(cosine), color=INK, linewidth=1.4, label="over 20 updates")
    axes.set_ylim(-1.05, 1.35)
    axes.legend(loc="upper right", frameon=False, fontsize=8, ncols=2, labelcolor=INK)
