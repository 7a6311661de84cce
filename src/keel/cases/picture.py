"""A case as one picture: finding and fix above, metrics of both runs below."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from keel.cases.figures import Compared, compare
from keel.look import BLUE, GREY, INK, ORANGE, new_figure
from keel.printing import printable
from keel.tracking.drawing import axes_for, line, write_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from keel.cases.running import Outcome
    from keel.doctor.finding import Evidence

WIDTH, PANEL, LINE = 8.0, 1.75, 0.2
"""Inches: of the picture, of a panel's height, of a line of text."""
CHARACTERS = 106
FAR = 50.0
"""The axis is logarithmic where the largest value is so many times the smallest."""


def draw(outcome: Outcome, path: Path) -> None:
    """Write the picture of a case.

    Args:
        outcome: What it came to.
        path: The PNG.
    """
    rows = compare(outcome.case.shown, outcome.sick.path, outcome.cured.path)
    paragraphs = [(label, _wrapped(text)) for label, text in story(outcome)]
    lines = sum(len(text) + 1.4 for _, text in paragraphs)
    head = LINE * (lines + 1.6)
    figure = new_figure(WIDTH, head + PANEL * len(rows) + 0.4)
    top, *panels = figure.subplots(
        1 + len(rows), height_ratios=[head, *(PANEL for _ in rows)], squeeze=False
    )[:, 0]
    _write_story(top, outcome.case.title, paragraphs, head)
    marked = {item.metric: item for item in outcome.finding.evidence}
    for axes, row in zip(panels, rows, strict=True):
        _draw_row(figure, axes, row, marked.get(row.shown.metric))
    for axes in panels:
        axes.set_xlim(left=0.0)
    for axes in panels[:-1]:
        axes.set_xlabel("")
    panels[0].legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=9
    )
    write_png(figure, path)


def story(outcome: Outcome) -> list[tuple[str, str]]:
    """Return the case in four sentences: what was believed, found, changed, and came of it.

    Args:
        outcome: What it came to.
    """
    changed = "; ".join(f"{one.setting} → {one.value}" for one in outcome.patches)
    mended = "the bug is fixed in the code" if _is_bug(outcome) else "the reward is mended by hand"
    parts = [mended if outcome.case.repair else "", changed]
    rules = ", ".join(visit.finding.rule for visit in outcome.rounds)
    return [
        ("What the author believed", outcome.case.belief),
        (
            f"What the log says ({rules})",
            "; then: ".join(visit.finding.cause for visit in outcome.rounds),
        ),
        ("What was changed", "; ".join(part for part in parts if part)),
        ("What it was", outcome.case.lesson),
    ]


def _is_bug(outcome: Outcome) -> bool:
    return all(name.startswith("faults.") for name in outcome.case.repair)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(printable(text), CHARACTERS) or [""]


def _write_story(
    axes: Axes, title: str, paragraphs: list[tuple[str, list[str]]], height: float
) -> None:
    axes.set_axis_off()
    axes.set_ylim(height, 0.0)
    axes.set_xlim(0.0, 1.0)
    style: dict[str, Any] = {"va": "top", "ha": "left", "color": INK, "parse_math": False}
    axes.text(0.0, 0.0, f"{title[0].upper()}{title[1:]}", fontsize=14, fontweight="bold", **style)
    y = 1.7 * LINE
    for label, lines in paragraphs:
        axes.text(0.0, y, label, fontsize=9.5, fontweight="bold", **style)
        axes.text(0.0, y + LINE, "\n".join(lines), fontsize=9.5, linespacing=1.25, **style)
        y += LINE * (len(lines) + 1.4)


def _draw_row(figure: Figure, axes: Axes, row: Compared, mark: Evidence | None) -> None:
    """Draw a metric of both runs, and the threshold that the finding says was broken."""
    axes_for(figure, axes, "", x="agent steps")
    before, after = row.texts
    axes.set_title(f"{row.shown.label}: {before} → {after}", loc="left", fontsize=10, color=INK)
    for series, color, label in ((row.before, ORANGE, "sick"), (row.after, BLUE, "cured")):
        if len(series):
            steps = series.step.astype(np.float64)
            line(axes, steps, series.values, color=color, linewidth=1.6, label=label)
    values = np.concatenate([row.before.finite, row.after.finite])
    if len(values) and values.min() > 0.0 and values.max() > FAR * values.min():
        axes.set_yscale("log")
    if mark is not None and mark.threshold is not None and math.isfinite(mark.threshold):
        axes.axhline(mark.threshold, color=GREY, linewidth=0.9, linestyle=(0, (4, 2)))
