"""Pictures of a run, from its metrics: what it learned, and how it kept to its trust region."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.errors import KeelError
from keel.look import BLUE, GREY, INK, ORANGE, new_figure
from keel.tracking.drawing import (
    axes_for,
    column,
    describe_range,
    draw_bound,
    finish,
    last,
    line,
    scale_kl,
    verdicts,
    write_png,
)
from keel.tracking.plot_demos import COEF, draw_cloning
from keel.tracking.plot_line_search import SUCCESS, draw_line_search, draw_searches
from keel.tracking.reader import MetricsTable, read_metrics
from keel.tracking.record import read_config

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Values = NDArray[np.float64]


def draw_run(path: Path) -> list[Path]:
    """Draw the pictures of a run into its folder, and return their paths.

    These are `learning.png` and `trust-region.png`, `line-search.png` for TRPO, and
    `demonstrations.png` for a run with demonstrations.
    """
    table = read_metrics(path)
    title = _title(path)
    figures = {
        path / "learning.png": _draw_learning(table, title),
        path / "trust-region.png": _draw_trust_region(table, title),
    }
    if SUCCESS in table.columns:
        figures[path / "line-search.png"] = draw_line_search(table, title)
    if COEF in table.columns:
        figures[path / "demonstrations.png"] = draw_cloning(table, title)
    for file, figure in figures.items():
        write_png(figure, file)
    return list(figures)


def _draw_learning(table: MetricsTable, title: str) -> Figure:
    import numpy as np

    figure = new_figure(9.0, 4.6)
    axes = axes_for(figure, figure.add_subplot(), "return per episode")
    steps = table.step.astype(float)
    mean, std = column(table, "rollout/return_mean"), column(table, "rollout/return_std")
    axes.fill_between(steps, mean - std, mean + std, color=BLUE, alpha=0.14, linewidth=0)
    line(axes, steps, mean, color=BLUE, linewidth=1.8, label="training, last 100 episodes ± std")
    score, spread = column(table, "eval/return_mean"), column(table, "eval/return_std")
    evaluated = np.isfinite(score)
    summary = ["no episode ended"]
    if np.isfinite(mean).any():
        summary = [f"training return {last(mean):,.1f} at the end"]
    if evaluated.any():
        axes.errorbar(
            steps[evaluated],
            score[evaluated],
            np.nan_to_num(spread[evaluated], posinf=0.0),
            fmt="o",
            color=ORANGE,
            markersize=6,
            markeredgecolor="white",
            elinewidth=1.2,
            capsize=3,
            zorder=4,
            label="evaluation ± std",
        )
        summary += [f"evaluation {last(score):,.1f}", f"best {score[evaluated].max():,.1f}"]
    return finish(figure, axes, f"Learning: {title}", " · ".join(summary))


def _draw_trust_region(table: MetricsTable, title: str) -> Figure:
    import numpy as np

    figure = new_figure(9.0, 5.6)
    upper, lower = figure.subplots(2, sharex=True, gridspec_kw={"height_ratios": (3.2, 1.0)})
    axes = axes_for(figure, upper, "KL(old‖new) of an update, nats", x="")
    steps = table.step.astype(float)
    kl, requested = column(table, "train/kl_exact"), column(table, "train/kl_requested")
    bound, estimate = column(table, "train/max_kl"), column(table, "train/approx_kl")
    walked_back, rejected = verdicts(table)
    kl = np.where(rejected, np.nan, kl)  # nothing was kept: that is not a KL of 0
    if SUCCESS in table.columns:  # a line search moves nothing until it accepts
        requested = np.where(rejected, column(table, "train/kl_tried"), requested)
    top = scale_kl(axes, np.append(kl, requested[walked_back | rejected]), bound)
    draw_bound(axes, steps, bound, linewidth=1.6, label="bound (max_kl)")
    line(axes, steps, np.where(rejected, np.nan, estimate), color=GREY, linewidth=1.0,
          linestyle=(0, (4, 2)), label="k3 estimate")  # fmt: skip
    line(axes, steps, kl, color=BLUE, linewidth=1.8, label="exact KL, kept")
    drawn_kl = np.minimum(np.where(np.isnan(requested), bound, requested), top)
    axes.vlines(
        steps[walked_back],
        kl[walked_back],
        drawn_kl[walked_back],
        color=ORANGE,
        linewidth=0.8,
        alpha=0.6,
    )
    mark: dict[str, Any] = {"color": ORANGE, "linestyle": "none", "clip_on": False, "zorder": 5}
    if walked_back.any():
        axes.plot(steps[walked_back], drawn_kl[walked_back], marker="o", markersize=5,
                  markerfacecolor="white", label="requested, walked back", **mark)  # fmt: skip
    if rejected.any():
        axes.plot(steps[rejected], drawn_kl[rejected], marker="X", markersize=8,
                  markeredgecolor="white", label="requested, rejected", **mark)  # fmt: skip
    if SUCCESS in table.columns:
        draw_searches(axes_for(figure, lower, "line search"), table)
    else:
        _draw_clipping(axes_for(figure, lower, "clip fraction"), steps, table)
    summary = "no update yet"
    if len(table):
        largest = f"{np.nanmax(kl):.3g}" if np.isfinite(kl).any() else "–"
        summary = (
            f"largest exact KL {largest} nats{describe_range(bound)} · updates: {len(table)}, "
            f"walked back: {walked_back.sum()}, rejected: {rejected.sum()}"
        )
    return finish(figure, axes, f"Trust region: {title}", summary)


def _draw_clipping(axes: Axes, steps: Values, table: MetricsTable) -> None:
    import numpy as np
    from matplotlib.ticker import PercentFormatter

    clipped = column(table, "train/clip_fraction")
    axes.fill_between(steps, 0.0, clipped, color=INK, alpha=0.12, linewidth=0)
    line(axes, steps, clipped, color=INK, linewidth=1.1)
    largest = float(np.nanmax(clipped)) if np.isfinite(clipped).any() else 0.0
    axes.set_ylim(0.0, min(1.0, max(0.3, 1.15 * largest)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _title(path: Path) -> str:
    """Return environment, name and seed, as far as they are known."""
    folder = path.resolve()
    try:
        env = str(read_config(path).get("env", "")).rpartition(":")[2] + ", "
    except KeelError:
        env = ""
    return f"{env}{folder.parent.name}/{folder.name}"
