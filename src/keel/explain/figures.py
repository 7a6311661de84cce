"""Pictures of explanations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.errors import InputError
from keel.explain.explanation import Explanation
from keel.look import INK, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


def check_picture_path(path: Path) -> None:
    """Raise, before anything is computed, unless a picture can be written to `path`."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"--plot: {path.name!r} must end in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise InputError(f"--plot: the folder {str(path.parent)!r} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"--plot: no permission to write into {str(path.parent)!r}")


def save_picture(explanation: Explanation, path: Path) -> None:
    """Draw the explanation's picture into `path`."""
    check_picture_path(path)
    figure = new_figure(9.0, 4.2)
    explanation.draw(figure)
    _take_names_literally(figure)
    figure.suptitle(explanation.title, fontsize=13, color=INK, fontweight="bold")
    figure.savefig(path)


def legend_below(figure: Figure, *panels: Axes) -> None:
    """Draw one legend for several panels, below them, with each label once."""
    entries: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    style: dict[str, Any] = {"frameon": False, "fontsize": 9, "ncols": 4}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", **style)


def _take_names_literally(figure: Figure) -> None:
    """Let no dollar sign in a name begin a formula; powers of ten on an axis remain formulas."""
    from matplotlib.ticker import FixedFormatter, FuncFormatter

    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    texts = [text for legend in legends for text in legend.get_texts()]
    for axes in figure.axes:
        texts += axes.texts
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_formatter(), FixedFormatter | FuncFormatter):
                texts += axis.get_ticklabels()
    for text in texts:
        text.set_parse_math(False)
