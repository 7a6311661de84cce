"""A run on tokens in four panels: what is solved, what it cost in nats, and by which rules."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.apps.language.summary import SUMMARY
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, new_figure, tidy
from keel.tracking.drawing import column, line, write_png
from keel.tracking.reader import MetricsTable, read_metrics

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

PICTURE = "language.png"


def draw_language(path: Path, target: float | None = None) -> Path:
    """Draw the run in `path`; `target` is that of an adaptive controller."""
    table = read_metrics(path)
    place = path / SUMMARY
    summary: dict[str, Any] = json.loads(place.read_text()) if place.is_file() else {}
    figure = new_figure(10.0, 6.4)
    axes = figure.subplots(2, 2).ravel()
    _solved(axes[0], table, summary)
    _old(axes[1], table)
    _reference(axes[2], table, target)
    _texts(axes[3], table)
    write_png(figure, path / PICTURE)
    return path / PICTURE


def _solved(axes: Axes, table: MetricsTable, summary: dict[str, Any]) -> None:
    tidy(axes, "solved", "completions", "share")
    line(
        axes, _steps(table), column(table, "rollout/success"), color=BLUE, lw=1.2, label="training"
    )
    held_out = column(table, "eval/success")
    line(axes, _steps(table), held_out, color=INK, lw=1.6, label="held-out prompts")
    levels = {
        "warm-up": (summary.get("warm_up") or {}).get("judged_success"),
        "more imitation": (summary.get("control") or {}).get("success"),
    }
    for (name, level), color in zip(levels.items(), (GREY, ORANGE), strict=True):
        if level is not None:
            axes.axhline(level, ls="--", lw=1.2, color=color, label=name)
    axes.set_ylim(-0.02, 1.02)
    axes.legend(fontsize=8, frameon=False, loc="best")


def _old(axes: Axes, table: MetricsTable) -> None:
    tidy(axes, "exact KL(old‖new) of every update", "completions", "nats per token")
    line(axes, _steps(table), column(table, "train/kl_exact"), color=BLUE, lw=1.2, label="kept")
    bound = column(table, "train/max_kl")
    line(axes, _steps(table), bound, color=ORANGE, lw=1.2, ls="--", label="bound")
    axes.set_ylim(bottom=0.0)
    axes.legend(fontsize=8, frameon=False)


def _reference(axes: Axes, table: MetricsTable, target: float | None) -> None:
    if "kl/reference_token" not in table.columns:
        tidy(axes, "nats spent, all updates together", "completions", "nats per token")
        line(axes, _steps(table), column(table, "kl/spent_token"), color=BLUE, lw=1.2)
        return
    tidy(axes, "exact KL(policy‖reference)", "completions", "nats per token")
    line(axes, _steps(table), column(table, "kl/reference_token"), color=BLUE, lw=1.2, label="KL")
    if target is not None:
        axes.axhline(target, ls="--", lw=1.2, color=ORANGE, label="target")
    axes.set_ylim(bottom=0.0)
    beside = axes.twinx()
    line(beside, _steps(table), column(table, "train/kl_coef"), color=GREEN, lw=1.0, ls=":")
    beside.set_ylabel("β (dotted)", color=GREEN)
    if math.isfinite(float(column(table, "train/kl_coef").max())):
        beside.set_ylim(bottom=0.0)
    beside.spines[["top"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)


def _texts(axes: Axes, table: MetricsTable) -> None:
    tidy(axes, "completions", "completions", "tokens")
    lengths = column(table, "rollout/length_mean")
    line(axes, _steps(table), lengths, color=BLUE, lw=1.2, label="length")
    axes.set_ylim(bottom=0.0)
    beside = axes.twinx()
    line(beside, _steps(table), column(table, "train/entropy"), color=GREEN, lw=1.0, ls=":")
    beside.set_ylabel("entropy, nats (dotted)", color=GREEN)
    beside.set_ylim(bottom=0.0)
    beside.spines[["top"]].set_visible(False)


def _steps(table: MetricsTable) -> Values:
    return table.step.astype(float)
