"""Two pictures of a run, from its metrics: what it learned, and how it kept to its trust region."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.errors import KeelError
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, new_figure, tidy
from keel.runs.directory import read_config
from keel.runs.errors import RunError
from keel.runs.files import replace_file
from keel.runs.reader import MetricsTable, read_metrics

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

FAR, NEAR = 3.0, 0.12
"""A KL above `FAR` bounds makes the axis logarithmic above the bound, where the region would be a
hairline; when all stay below `NEAR` bounds, it is logarithmic below, where they would be."""


def draw_run(path: Path) -> list[Path]:
    """Draw `learning.png` and `trust-region.png` into the folder of a run; returns their paths."""
    table = read_metrics(path)
    title = _title(path)
    drawn = {
        path / "learning.png": _draw_learning(table, title),
        path / "trust-region.png": _draw_trust_region(table, title),
    }
    for place, figure in drawn.items():
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
        try:
            replace_file(place, picture.getvalue())
        except OSError as error:
            raise RunError(f"{place}: cannot be written: {error.strerror}") from error
    return list(drawn)


def _draw_learning(table: MetricsTable, title: str) -> Figure:
    import numpy as np

    figure = new_figure(9.0, 4.6)
    axes = _axes(figure, figure.add_subplot(), "return per episode")
    steps = table.step.astype(float)
    mean, std = _column(table, "rollout/return_mean"), _column(table, "rollout/return_std")
    axes.fill_between(steps, mean - std, mean + std, color=BLUE, alpha=0.14, linewidth=0)
    _line(axes, steps, mean, color=BLUE, linewidth=1.8, label="training, last 100 episodes ± std")
    score, spread = _column(table, "eval/return_mean"), _column(table, "eval/return_std")
    known = np.isfinite(score)
    said = ["no episode ended"]
    if np.isfinite(mean).any():
        said = [f"training return {_last(mean):,.1f} at the end"]
    if known.any():
        axes.errorbar(
            steps[known],
            score[known],
            np.nan_to_num(spread[known], posinf=0.0),
            fmt="o",
            color=ORANGE,
            markersize=6,
            markeredgecolor="white",
            elinewidth=1.2,
            capsize=3,
            zorder=4,
            label="evaluation ± std",
        )
        said += [f"evaluation {_last(score):,.1f}", f"best {score[known].max():,.1f}"]
    return _finish(figure, axes, f"Learning: {title}", " · ".join(said))


def _draw_trust_region(table: MetricsTable, title: str) -> Figure:
    import numpy as np

    figure = new_figure(9.0, 5.6)
    upper, lower = figure.subplots(2, sharex=True, gridspec_kw={"height_ratios": (3.2, 1.0)})
    axes = _axes(figure, upper, "KL(old‖new) of an update, nats", x="")
    steps = table.step.astype(float)
    kept, requested = _column(table, "train/kl_exact"), _column(table, "train/kl_requested")
    bound, estimate = _column(table, "train/max_kl"), _column(table, "train/kl_approx")
    back, rejected = _verdicts(table)
    kept = np.where(rejected, np.nan, kept)  # nothing was kept: that is not a KL of 0
    top = _scale(axes, np.append(kept, requested[back | rejected]), bound)
    if np.isfinite(bound).any():
        start, held = _from_zero(steps, bound)
        axes.fill_between(start, 0.0, held, step="pre", color=GREEN, alpha=0.10, linewidth=0)
        axes.step(start, held, where="pre", color=GREEN, linewidth=1.6, label="bound (max_kl)")
    _line(axes, steps, np.where(rejected, np.nan, estimate), color=GREY, linewidth=1.0,
          linestyle=(0, (4, 2)), label="k3 estimate")  # fmt: skip
    _line(axes, steps, kept, color=BLUE, linewidth=1.8, label="exact KL, kept")
    asked = np.minimum(np.where(np.isnan(requested), bound, requested), top)
    axes.vlines(steps[back], kept[back], asked[back], color=ORANGE, linewidth=0.8, alpha=0.6)
    mark: dict[str, Any] = {"color": ORANGE, "linestyle": "none", "clip_on": False, "zorder": 5}
    if back.any():
        axes.plot(steps[back], asked[back], marker="o", markerfacecolor="white", markersize=5,
                  label="requested, walked back", **mark)  # fmt: skip
    if rejected.any():
        axes.plot(steps[rejected], asked[rejected], marker="X", markersize=8,
                  markeredgecolor="white", label="requested, rejected", **mark)  # fmt: skip
    _draw_clipping(_axes(figure, lower, "clip fraction"), steps, table)
    said = "no update yet"
    if len(table):
        largest = f"{np.nanmax(kept):.3g}" if np.isfinite(kept).any() else "–"
        said = (
            f"largest exact KL {largest} nats{_range(bound)} · updates: {len(table)}, "
            f"walked back: {back.sum()}, rejected: {rejected.sum()}"
        )
    return _finish(figure, axes, f"Trust region: {title}", said)


def _draw_clipping(axes: Axes, steps: Values, table: MetricsTable) -> None:
    import numpy as np
    from matplotlib.ticker import PercentFormatter

    clipped = _column(table, "train/clip_fraction")
    axes.fill_between(steps, 0.0, clipped, color=INK, alpha=0.12, linewidth=0)
    _line(axes, steps, clipped, color=INK, linewidth=1.1)
    most = float(np.nanmax(clipped)) if np.isfinite(clipped).any() else 0.0
    axes.set_ylim(0.0, min(1.0, max(0.3, 1.15 * most)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _verdicts(table: MetricsTable) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which updates were walked back, and which rejected: those have no `kl_step`."""
    import numpy as np

    alpha = _column(table, "train/alpha")
    missing = np.isnan(_column(table, "train/kl_step")) & ~np.isnan(
        _column(table, "train/kl_exact")
    )
    rejected = missing if "train/kl_step" in table.columns else alpha == 0.0
    return (alpha < 1.0) & ~rejected, rejected


def _scale(axes: Axes, kl: Values, bound: Values) -> float:
    """Set the KL axis, as `FAR` and `NEAR` say; its upper end is where infinity is drawn."""
    import numpy as np

    limit = _last(bound)
    known = kl[np.isfinite(kl) & (kl > 0.0)]
    most = float(known.max()) if known.size else 0.0
    top = 1.12 * np.nanmax([most, *bound[np.isfinite(bound)]]) or 1.0
    if limit > 0.0 and 0.0 < most < NEAR * limit:
        axes.set_yscale("log")
        low = max(float(np.quantile(known, 0.1)), 1e-3 * limit)
        axes.set_ylim(10.0 ** np.floor(np.log10(low)), 1.8 * top)
    elif limit > 0.0 and most > FAR * limit:
        decades = float(np.log10(most / limit))
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


def _line(axes: Axes, x: Values, y: Values, **look: Any) -> None:
    """A line with gaps where nothing is known; a point without neighbours is a dot."""
    import numpy as np

    known = np.isfinite(y)
    y = np.where(known, y, np.nan)
    axes.plot(x, y, **look)
    padded = np.pad(known, 1)
    alone = known & ~padded[:-2] & ~padded[2:]
    axes.plot(x[alone], y[alone], "o", color=look["color"], markersize=4.5)


def _from_zero(steps: Values, values: Values) -> tuple[Values, Values]:
    """With the first value from step 0 on, so that a single update has a width."""
    import numpy as np

    known = np.isfinite(values)
    return np.append(0.0, steps[known]), np.append(values[known][:1], values[known])


def _column(table: MetricsTable, name: str) -> Values:
    import numpy as np

    return table.columns.get(name, np.full(len(table), np.nan))


def _last(values: Values) -> float:
    import numpy as np

    known = values[np.isfinite(values)]
    return float(known[-1]) if known.size else float("nan")


def _range(bound: Values) -> str:
    known = sorted({float(x) for x in bound if x == x})
    return f" (bound {' … '.join(f'{x:g}' for x in {known[0]: 0, known[-1]: 0})})" if known else ""


def _axes(figure: Figure, axes: Axes, y: str, x: str = "environment steps") -> Axes:
    tidy(axes, "", x, y)
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    return axes


def _short(steps: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(steps) >= size:
            return f"{steps / size:g} {unit}"
    return f"{steps:g}"


def _finish(figure: Figure, axes: Axes, title: str, said: str) -> Figure:
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
        said, (0.0, 1.0), (0.0, 28.0), "axes fraction", "offset points", color=INK, fontsize=10
    )
    return figure


def _title(path: Path) -> str:
    """Environment, name and seed, as far as they are known."""
    folder = path.resolve()
    try:
        env = f"{read_config(path).get('env', '')}, "
    except KeelError:
        env = ""
    return f"{env}{folder.parent.name}/{folder.name}"
