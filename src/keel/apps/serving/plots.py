"""Plots of simulation results: the load of every replica, and latencies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from keel.apps.serving import fields as f
from keel.apps.serving.results import end_time, latencies
from keel.apps.serving.simulation import SimulationResult
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, new_figure, tidy
from keel.tracking.drawing import write_png

COLORS = (BLUE, ORANGE, GREEN, INK, GREY)
STYLES = ("-", "--", ":")


def write_timeline(result: SimulationResult, path: Path) -> None:
    """Plot the waiting and running requests of every replica over time.

    Args:
        result: The simulation.
        path: PNG file.
    """
    requests, count = result.requests, result.replicas.ints.shape[1]
    figure = new_figure(9.6, 1.3 + 1.15 * count)
    panels = np.atleast_1d(np.asarray(figure.subplots(count, 1, sharex=True, sharey=True)))
    moments = np.linspace(requests.times[f.Q_ARRIVAL][0], end_time(result), 600)
    for r, axes in enumerate(panels):
        own = requests.ints[f.Q_REPLICA] == r
        came, begun, gone = (
            np.sort(x[own & ~np.isnan(x)])
            for x in requests.times[[f.Q_ARRIVAL, f.Q_STARTED, f.Q_FINISHED]]
        )
        here, in_work, left = (np.searchsorted(x, moments, "right") for x in (came, begun, gone))
        running = np.maximum(in_work - left, 0)
        label = "seconds" if r == count - 1 else ""
        tidy(axes, "", label, f"replica {r}")
        axes.fill_between(moments, running, color=BLUE, alpha=0.75, lw=0, label="running")
        axes.fill_between(
            moments, running, np.maximum(here - left, running), color=ORANGE, alpha=0.85, lw=0,
            label="waiting",
        )  # fmt: skip
    panels[0].set_title(f"Requests at every replica: {result.router}", fontsize=10.5, color=INK)
    panels[0].legend(fontsize=8, frameon=False, ncols=2, loc="upper right")
    write_png(figure, path)


def write_latencies(results: Sequence[SimulationResult], path: Path) -> None:
    """Plot the distributions of the times to the first token and to the end.

    Args:
        results: Simulations, one for each router.
        path: PNG file.
    """
    figure = new_figure(9.6, 3.8)
    panels = figure.subplots(1, 2)
    for axes, which, title in zip(
        panels, (0, 2), ("time to the first token", "time to the end"), strict=True
    ):
        tidy(axes, title, "seconds", "share of requests")
        for k, result in enumerate(results):
            served = result.requests.ints[f.Q_LOST] == 0
            values = np.sort(latencies(result)[which][served])
            share = np.arange(1, len(values) + 1) / len(result.requests.ints[f.Q_LOST])
            color, style = COLORS[k % 5], STYLES[k // 5 % 3]
            axes.plot(values, share, lw=1.4, color=color, ls=style, label=result.router)
        axes.set_xscale("log")
        axes.set_ylim(0.0, 1.01)
    panels[1].legend(fontsize=8, frameon=False)
    write_png(figure, path)
