"""One look for all pictures; no global matplotlib state is touched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from keel.errors import InputError
from keel.explain.explanation import Explanation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#1f2933"
BLUE = "#1f6feb"
ORANGE = "#e8590c"
GREEN = "#2b8a3e"
GREY = "#868e96"
PALE = "#e9ecef"
FORMATS = (".png", ".svg", ".pdf")


def check_picture_path(path: Path) -> None:
    """Raise, before anything is computed, unless a picture can be written to `path`."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"--plot: {path.name!r} must end in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise InputError(f"--plot: the folder {str(path.parent)!r} does not exist")


def save_picture(explanation: Explanation, path: Path) -> None:
    """Draw the explanation's picture into `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_picture_path(path)
    figure = Figure(figsize=(9.0, 4.2), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    explanation.draw(figure)
    figure.suptitle(explanation.title, fontsize=13, color=INK, fontweight="bold")
    figure.savefig(path)


def tidy(axes: Axes, title: str, x: str, y: str) -> Axes:
    """Name the axes, and take away what carries no information."""
    axes.set_title(title, fontsize=10.5, color=INK)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)
    return axes
