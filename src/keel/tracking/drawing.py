"""Drawing helpers for pictures of runs: axes, lines with honest gaps, and marks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.look import GREEN, INK, tidy
from keel.tracking.files import write_file
from keel.tracking.reader import MetricsTable

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

FAR, NEAR = 3.0, 0.12
"""A KL above `FAR` bounds makes the axis logarithmic above the bound, where the region would be a
hairline; when all stay below `NEAR` bounds, it is logarithmic below, where they would be."""


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, whole or not at all; its folder is made if necessary."""
    data = io.BytesIO()
    figure.savefig(data, format="png")
    write_file(path, data.getvalue())


def axes_for(figure: Figure, axes: Axes, y: str, x: str = "environment steps") -> Axes:
    """Prepare axes over environment steps."""
    tidy(axes, "", x, y)
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    return axes


def line(axes: Axes, x: Values, y: Values, **style: Any) -> None:
    """Draw a line with gaps where values are missing; a point without neighbours is a dot."""
    import numpy as np

    finite = np.isfinite(y)
    y = np.where(finite, y, np.nan)
    axes.plot(x, y, **style)
    padded = np.pad(finite, 1)
    isolated = finite & ~padded[:-2] & ~padded[2:]
    axes.plot(x[isolated], y[isolated], "o", color=style["color"], markersize=4.5)


def finish(figure: Figure, axes: Axes, title: str, summary: str) -> Figure:
    """Add the title, a summary in one line, and the legend, all above `axes`."""
    axes.set_xlim(left=0.0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.01, 1.0),
            ncols=5,
            frameon=False,
            fontsize=9,
            labelcolor=INK,
            columnspacing=1.4,
            handlelength=1.8,
        )
    axes.set_title(title, fontsize=13, color=INK, fontweight="bold", loc="left", pad=46)
    axes.annotate(
        summary, (0.0, 1.0), (0.0, 28.0), "axes fraction", "offset points", color=INK, fontsize=10
    )
    return figure


def column(table: MetricsTable, name: str) -> Values:
    """Return one metric `[n]`; NaN where it was not written."""
    import numpy as np

    return table.columns.get(name, np.full(len(table), np.nan))


def verdicts(table: MetricsTable) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which updates were walked back, and which rejected (without `kl_step`), `[n]`."""
    import numpy as np

    alpha = column(table, "train/alpha")
    missing = np.isnan(column(table, "train/kl_step")) & ~np.isnan(column(table, "train/kl_exact"))
    rejected = missing if "train/kl_step" in table.columns else alpha == 0.0
    return (alpha < 1.0) & ~rejected, rejected


def last(values: Values) -> float:
    """Return the last finite value; NaN if there is none."""
    import numpy as np

    finite = values[np.isfinite(values)]
    return float(finite[-1]) if finite.size else float("nan")


def from_zero(steps: Values, values: Values) -> tuple[Values, Values]:
    """Extend the first value back to step 0, so that a single update has a width."""
    import numpy as np

    finite = np.isfinite(values)
    return np.append(0.0, steps[finite]), np.append(values[finite][:1], values[finite])


def draw_bound(axes: Axes, steps: Values, bound: Values, **style: Any) -> None:
    """Draw the bound on the KL, with the region below it shaded; nothing if there is none."""
    import numpy as np

    if not np.isfinite(bound).any():
        return
    start, held = from_zero(steps, bound)
    axes.fill_between(start, 0.0, held, step="pre", color=GREEN, alpha=0.10, linewidth=0)
    axes.step(start, held, where="pre", color=GREEN, **style)


def short(steps: float) -> str:
    """Format a number of steps as 250 k, 1.5 M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(steps) >= size:
            return f"{steps / size:g} {unit}"
    return f"{steps:g}"


def scale_kl(axes: Axes, kl: Values, bound: Values) -> float:
    """Scale the KL axis by `FAR` and `NEAR`; return its upper end, where infinity is drawn."""
    import numpy as np

    limit = last(bound)
    positive = kl[np.isfinite(kl) & (kl > 0.0)]
    largest = float(positive.max()) if positive.size else 0.0
    top = 1.12 * np.nanmax([largest, *bound[np.isfinite(bound)]]) or 1.0
    if limit > 0.0 and 0.0 < largest < NEAR * limit:
        axes.set_yscale("log")
        low = max(float(np.quantile(positive, 0.1)), 1e-3 * limit)
        axes.set_ylim(10.0 ** np.floor(np.log10(low)), 1.8 * top)
    elif limit > 0.0 and largest > FAR * limit:
        decades = float(np.log10(largest / limit))
        axes.set_yscale("symlog", linthresh=limit, linscale=max(0.6, 0.8 * decades))
        top *= 1.3
        above = 10.0 ** np.arange(np.ceil(np.log10(1.5 * limit)), np.log10(top))
        axes.set_yticks([0.0, limit / 2, limit, *above])
        axes.set_yticks([], minor=True)
        axes.set_ylim(0.0, top)
    else:
        axes.set_ylim(0.0, top)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.6g}")
    return float(axes.get_ylim()[1])


def describe_range(bound: Values) -> str:
    """Describe the smallest and the largest bound in words."""
    bounds = sorted({float(x) for x in bound if x == x})
    return (
        f" (bound {' … '.join(f'{x:g}' for x in {bounds[0]: 0, bounds[-1]: 0})})" if bounds else ""
    )
