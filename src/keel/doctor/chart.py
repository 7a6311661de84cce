"""Evidence as a small SVG chart: the series, its threshold, and the step since when it broke it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from keel.doctor.finding import Evidence
from keel.doctor.series import Series
from keel.templates import Markup, Templates, join

if TYPE_CHECKING:
    from numpy.typing import NDArray

HTML = Templates(__package__, "chart.html")
WIDTH, HEIGHT = 640, 190
LEFT, RIGHT, TOP, BOTTOM = 84, 14, 16, 28
"""Margins, in the units of the drawing."""
POINTS = 300
"""Points of a line at most; a longer series is drawn by the extremes of its blocks."""
FAR = 20.0
"""The axis is logarithmic where largest value, median and threshold are farther apart."""


@dataclass(frozen=True)
class _Axis:
    """A linear or logarithmic axis from values to the drawing."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self._of(self.low), self._of(self.high)
        share = (self._of(value) - low) / (high - low) if high > low else 0.5
        return self.start + min(max(share, -0.05), 1.05) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return the ends and the middle."""
        if self.logarithmic:
            return [self.low, math.sqrt(self.low * self.high), self.high]
        return [self.low, (self.low + self.high) / 2, self.high]

    def _of(self, value: float) -> float:
        return math.log(max(value, self.low)) if self.logarithmic else value


def chart(evidence: Evidence, series: Series | None) -> Markup:
    """Return the chart of evidence as SVG; nothing where there are fewer than two values.

    Args:
        evidence: What is marked: threshold and onset.
        series: The metric it is about.
    """
    if series is None or len(series) < 2 or len(series.finite) < 2:
        return Markup()
    step, values = _thinned(series)
    x = _Axis(float(step[0]), float(step[-1]), LEFT, WIDTH - RIGHT)
    y = _value_axis(values[np.isfinite(values)], evidence.threshold)
    return HTML.fill(
        "chart",
        width=WIDTH,
        height=HEIGHT,
        title=f"{evidence.label}: {evidence.text}",
        grid=join(_grid(y)),
        steps=join(_steps(x)),
        onset=_onset(evidence, x),
        threshold=_threshold(evidence, y),
        line=_line(step, values, x, y),
        faults=join(
            HTML.fill("fault", x=_number(x(float(at))), y=TOP)
            for at in step[~np.isfinite(values)][:POINTS]
        ),
    )


def compare_chart(title: str, before: Series, after: Series) -> Markup:
    """Return one metric of two runs as SVG; nothing where one has fewer than two values.

    Args:
        title: What is shown, for readers that do not see it.
        before: The metric in the run that came first.
        after: The same in the other one.
    """
    pair = (before, after)
    if any(len(series.finite) < 2 for series in pair):
        return Markup()
    lines = [_thinned(series) for series in pair]
    x = _Axis(
        min(float(step[0]) for step, _ in lines),
        max(float(step[-1]) for step, _ in lines),
        LEFT,
        WIDTH - RIGHT,
    )
    y = _value_axis(np.concatenate([series.finite for series in pair]), None)
    return HTML.fill(
        "chart",
        width=WIDTH,
        height=HEIGHT,
        title=title,
        grid=join(_grid(y)),
        steps=join(_steps(x)),
        onset=Markup(),
        threshold=Markup(),
        line=join(
            HTML.fill("group", kind=kind, line=_line(*points, x, y))
            for kind, points in zip(("before", "after"), lines, strict=True)
        ),
        faults=Markup(),
    )


def _value_axis(values: NDArray[np.float64], threshold: float | None) -> _Axis:
    shown = values.tolist()
    if threshold is not None and math.isfinite(threshold):
        shown.append(threshold)
    low, high = min(shown), max(shown)
    marks = [float(np.median(values)), high, *shown[len(values) :]]
    logarithmic = low > 0.0 and max(marks) / min(marks) > FAR
    if not logarithmic:
        margin = 0.05 * (high - low) or 0.5 * abs(high) or 0.5
        low, high = (low if low == 0.0 else low - margin), high + margin
    return _Axis(low, high, HEIGHT - BOTTOM, TOP, logarithmic)


def _thinned(series: Series) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return a series of at most `POINTS` points; the lowest and highest of each block stay."""
    n = len(series)
    if n <= POINTS:
        return series.step, series.values
    chosen: set[int] = {0, n - 1}
    for block in np.array_split(np.arange(n), POINTS // 2):
        values = series.values[block]
        known = np.isfinite(values)
        chosen |= {int(block[np.flatnonzero(~known)[0]])} if not known.all() else set()
        if known.any():
            inner = block[known]
            chosen |= {int(inner[series.values[inner].argmin()])}
            chosen |= {int(inner[series.values[inner].argmax()])}
    indices = np.array(sorted(chosen))
    return series.step[indices], series.values[indices]


def _line(step: NDArray[np.int64], values: NDArray[np.float64], x: _Axis, y: _Axis) -> Markup:
    """Return the path of a series, with gaps where it is not finite."""
    parts, pen = [], "M"
    for at, value in zip(step.tolist(), values.tolist(), strict=True):
        if not math.isfinite(value):
            pen = "M"
            continue
        parts.append(f"{pen}{_number(x(at))} {_number(y(value))}")
        pen = "L"
    return HTML.fill("line", path=" ".join(parts))


def _grid(y: _Axis) -> list[Markup]:
    return [
        HTML.fill(
            "grid", left=LEFT, right=WIDTH - RIGHT, y=_number(y(tick)), label=_short(tick),
            text=LEFT - 8,
        )
        for tick in y.ticks()
    ]  # fmt: skip


def _steps(x: _Axis) -> list[Markup]:
    ends = ((x.low, "start", LEFT), (x.high, "end", WIDTH - RIGHT))
    return [
        HTML.fill("step", x=at, y=HEIGHT - 8, anchor=anchor, label=f"step {int(step):,}")
        for step, anchor, at in ends
    ]


def _onset(evidence: Evidence, x: _Axis) -> Markup:
    if evidence.onset is None or not x.low <= evidence.onset <= x.high:
        return Markup()
    at = x(float(evidence.onset))
    return HTML.fill(
        "onset",
        x=_number(at),
        top=TOP,
        height=HEIGHT - BOTTOM - TOP,
        width=_number(WIDTH - RIGHT - at),
    )


def _threshold(evidence: Evidence, y: _Axis) -> Markup:
    value = evidence.threshold
    if value is None or not math.isfinite(value):
        return Markup()
    at = y(value)
    return HTML.fill(
        "threshold",
        left=LEFT,
        right=WIDTH - RIGHT,
        y=_number(at),
        text=_number(at - 5 if at > TOP + 16 else at + 13),
        label=f"threshold {value:.4g}",
    )


def _number(value: float) -> str:
    return f"{value:.1f}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 and abs(value) < 1e6 else f"{value:.3g}"
