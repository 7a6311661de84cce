"""Comparison as a picture: learning curves, intervals, performance profiles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from keel.compare.align import grid_to
from keel.compare.comparison import Comparison, Group
from keel.compare.tables import number, signed
from keel.functional import performance_profile
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, new_figure, tidy
from keel.tracking.drawing import short, write_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

COLORS = (BLUE, ORANGE, GREEN, "#9c36b5", "#0b7285", "#a61e4d", "#5c940d", GREY)
VERDICTS = {
    "keep": GREEN,
    "slightly worse": ORANGE,
    "roll back": "#c92a2a",
    "not distinguishable": GREY,
}


def color_of(comparison: Comparison, group: Group) -> str:
    """Return the color of a group, by its position."""
    return COLORS[comparison.groups.index(group) % len(COLORS)]


def band(curves: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Return low, interquartile mean and high over runs `[runs, grid]`, each `[grid]`.

    The band is the range of the middle half of the runs (all of them where they are few): what runs
    did, and not how sure their mean is; that is what the intervals beside it show.
    """
    ordered = np.sort(curves, axis=0)
    cut = len(ordered) // 4
    middle_half = ordered[cut : len(ordered) - cut]
    return middle_half[0], middle_half.mean(axis=0), middle_half[-1]


def profile_levels(comparison: Comparison, task: str) -> torch.Tensor:
    """Return the thresholds of a performance profile, `[200]`: a little beyond all scores."""
    scores = torch.cat([group.scores[task] for group in comparison.groups])
    low, high = float(scores.min()), float(scores.max())
    margin = 0.05 * (high - low) or 1.0
    return torch.linspace(low - margin, high + margin, 200, dtype=torch.float64)


def draw(comparison: Comparison) -> Figure:
    """Draw a row for every task: its curves, its scores and its profile."""
    tasks = len(comparison.tasks)
    figure = new_figure(12.5, 3.6 * tasks + 0.9)
    axes = figure.subplots(tasks, 3, squeeze=False, width_ratios=(2.2, 1.3, 1.2))
    for row, task in zip(axes, comparison.tasks, strict=True):
        _curves(row[0], comparison, task)
        _scores(row[1], comparison, task)
        _profile(row[2], comparison, task)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper left", ncols=min(len(labels), 4), frameon=False,
        labelcolor=INK,
    )  # fmt: skip
    figure.suptitle(
        "   ".join(_verdict_lines(comparison)), fontsize=10.5, color=INK, x=0.99, ha="right"
    )
    return figure


def _verdict_lines(comparison: Comparison) -> list[str]:
    if len(comparison.pairs) > 2:
        return []
    return [
        f"{p.variant}: {p.verdict.decision} ({signed(p.effect.estimate)})" for p in comparison.pairs
    ]


def _curves(axes: Axes, comparison: Comparison, task: str) -> None:
    tidy(axes, task, "environment steps", comparison.curve_metric)
    grid = grid_to(comparison.horizon[task])
    for group in comparison.groups:
        color = color_of(comparison, group)
        low, middle, high = band(group.curves[task])
        axes.fill_between(grid, low, high, color=color, alpha=0.15, linewidth=0)
        axes.plot(grid, middle, color=color, linewidth=1.8, label=group.name)
    axes.axhline(comparison.thresholds[task], color=GREY, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_xlim(0.0, float(grid[-1]))
    axes.xaxis.set_major_formatter(lambda value, _: short(value))


def _scores(axes: Axes, comparison: Comparison, task: str) -> None:
    """Draw every run as a dot; where there is one task, the IQM with its interval as well."""
    tidy(axes, "final score, a dot a run", comparison.metric, "")
    for row, group in enumerate(reversed(comparison.groups)):
        color = color_of(comparison, group)
        values = group.scores[task].numpy()
        spread = np.linspace(-0.12, 0.12, len(values)) if len(values) > 1 else np.zeros(1)
        axes.plot(values, row + spread, "o", color=color, markersize=4, alpha=0.55)
        if len(comparison.tasks) == 1:
            ends = [float(x) for x in (group.iqm.low, group.iqm.high)]
            if all(np.isfinite(ends)):
                axes.plot(ends, [row, row], color=color, linewidth=5, alpha=0.35)
            axes.plot(float(group.iqm.estimate), row, "D", color=color, markersize=7,
                      markeredgecolor="white")  # fmt: skip
    axes.set_yticks(range(len(comparison.groups)), [g.name for g in reversed(comparison.groups)])
    axes.set_ylim(-0.6, len(comparison.groups) - 0.4)
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    axes.locator_params(axis="x", nbins=5)


def _profile(axes: Axes, comparison: Comparison, task: str) -> None:
    tidy(axes, "performance profile", "score τ", "share of runs above τ")
    levels = profile_levels(comparison, task)
    for group in comparison.groups:
        share = performance_profile(group.scores[task][:, None], levels)
        axes.step(levels.numpy(), share.numpy(), color=color_of(comparison, group), linewidth=1.6)
    axes.set_ylim(-0.02, 1.04)
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    axes.locator_params(axis="x", nbins=4)


def write_picture(comparison: Comparison, path: Path) -> None:
    """Draw a comparison into a PNG file."""
    write_png(draw(comparison), path)
