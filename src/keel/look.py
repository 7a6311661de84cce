"""Common style of all pictures; no global matplotlib state is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2933"
BLUE = "#1f6feb"
ORANGE = "#e8590c"
GREEN = "#2b8a3e"
GREY = "#868e96"
PALE = "#e9ecef"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure in inches, ready for `savefig`; matplotlib is imported only here."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes, title: str, x: str, y: str) -> Axes:
    """Name the axes, and remove what carries no information."""
    axes.set_title(title, fontsize=10.5, color=INK)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)
    return axes
