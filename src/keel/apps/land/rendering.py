"""Images of the city, and animations of a game."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from keel.apps.land.arrays import FREE, Array
from keel.apps.land.recording import GameRecord, Snapshot
from keel.apps.land.rules import SIZES
from keel.errors import InputError, KeelError
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, PALE, new_figure, tidy
from keel.tracking.drawing import write_png
from keel.tracking.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"industry": ORANGE, "education": BLUE, "council": GREEN, "housing": "#7048e8"}
WATER, PARK = "#a5d8ff", "#d3ecd8"
HEIGHTS, HALVES = (0.16, 0.34, 0.62), (0.2, 0.26, 0.32)
"""Heights of buildings, and half their widths, in parcels."""
DEPTH = 0.13
"""Offset of a roof to the right, in parcels."""
RIM = 0.55
"""Distance from the middle of the outermost parcels to the edge of the map."""
LIMITS = 100.0, 1_300.0
"""Prices at the ends of the color scale: prestige raises land beyond the prices of any map."""
LEGEND = (
    "★ hub    letters: the largest size that a parcel carries    green: none    "
    "hatched: under construction"
)
FILM_DPI, FRAME_MS, LAST_MS = 72, 350, 2_500


def draw_city(record: GameRecord, snapshot: int = -1) -> Figure:
    """Draw the map with its buildings at one snapshot, and the cash of all developers until then.

    Args:
        record: The game.
        snapshot: Index of the snapshot; by default the last.
    """
    snapshots = record.snapshots[: snapshot % len(record.snapshots) + 1]
    head, high, low = 0.5 + 0.22 * (record.rules.agents > 3), 7.6 * _slant(record), 1.5
    figure = new_figure(8.8, head + high + low + 0.9)
    header, city, strip = figure.subplots(3, 1, height_ratios=[head, high, low])
    _draw_land(figure, city, record, snapshots[-1])
    for parcel in range(record.rules.parcels):
        _draw_building(city, record, snapshots[-1], parcel)
    _draw_cash(strip, record, snapshots)
    _draw_header(header, record, snapshots[-1])
    return figure


def _slant(record: GameRecord) -> float:
    """Return the height of the map over its width."""
    return (record.rules.rows - 1.0 + 2.0 * RIM) / (record.rules.columns - 1.0 + 2.0 * RIM)


def _draw_land(figure: Figure, axes: Axes, record: GameRecord, snapshot: Snapshot) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.patches import FancyBboxPatch

    rules, world = record.rules, record.world
    shades = LinearSegmentedColormap.from_list("land", ["#fff8ea", "#f3d9a4", "#c88a2e"])
    color = ScalarMappable(Normalize(*LIMITS), shades)
    for parcel in range(rules.parcels):
        row, column = divmod(parcel, rules.columns)
        level = int(world.level[0, parcel])
        face = PARK if level < 3 else color.to_rgba(snapshot.price[parcel])
        axes.add_artist(
            FancyBboxPatch(
                (column - 0.45, row - 0.45), 0.9, 0.9, boxstyle="round,pad=0,rounding_size=0.06",
                facecolor=face, edgecolor="white", linewidth=1.0, zorder=1,
            )
        )  # fmt: skip
        if level >= 3:
            carries = SIZES[level - 3]
            axes.text(
                column + 0.41, row + 0.41, carries, ha="right", va="bottom", fontsize=7.5,
                color="#8a6d3b", zorder=3,
            )  # fmt: skip
    _draw_river(axes, record)
    for row, column in world.hubs[0]:
        axes.plot(
            column, row, marker="*", markersize=14, color="#ffd43b", markeredgecolor=INK, zorder=40
        )
    axes.set_xlim(-RIM, rules.columns - 1.0 + RIM)
    axes.set_ylim(rules.rows - 1.0 + RIM, -RIM)
    axes.set_aspect("equal")
    axes.set_axis_off()
    bar = figure.colorbar(color, ax=axes, location="right", fraction=0.022, pad=0.01, aspect=38)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    bar.ax.tick_params(labelsize=8, colors=INK, length=0)
    bar.set_label("price of land today, thousands", fontsize=8.5, color=INK)


def _draw_river(axes: Axes, record: GameRecord) -> None:
    middle, bend, length, phase = record.world.course[0]
    x = np.linspace(-RIM, record.rules.columns - 1.0 + RIM, 200)
    y = middle + bend * np.sin(x / length + phase)
    axes.plot(x, y, color="white", linewidth=15, alpha=0.75, solid_capstyle="butt", zorder=2)
    axes.plot(x, y, color=WATER, linewidth=12, solid_capstyle="butt", zorder=2)


def _draw_building(axes: Axes, record: GameRecord, snapshot: Snapshot, parcel: int) -> None:
    """Draw a block in its owner's color, as high as its size; hatched under construction."""
    from matplotlib.patches import Polygon

    owner = int(snapshot.owner[parcel])
    if owner == FREE:
        return
    row, column = divmod(parcel, record.rules.columns)
    color = COLORS[record.rules.names[owner]]
    size, half = int(snapshot.size[parcel]), HALVES[int(snapshot.size[parcel])]
    high, base = HEIGHTS[size], row + 0.32
    left, right, top = column - half - DEPTH / 2, column + half - DEPTH / 2, base - high
    front = [(left, base), (right, base), (right, top), (left, top)]
    back = [(x + DEPTH, y - DEPTH) for x, y in front]
    roof, side = [front[3], front[2], back[2], back[3]], [front[1], back[1], back[2], front[2]]
    layer = 10 + row
    if snapshot.left[parcel] > 0:
        for face in (front, roof, side):
            axes.add_artist(
                Polygon(
                    face, facecolor=(*_mixed(color, "white", 0.88), 0.75), edgecolor=color,
                    linewidth=0.9, hatch="/////", zorder=layer,
                )
            )  # fmt: skip
        return
    for face, tone, share in ((front, "white", 0.0), (roof, "white", 0.45), (side, "black", 0.28)):
        shade = _mixed(color, tone, share)
        axes.add_artist(Polygon(face, facecolor=shade, edgecolor=INK, linewidth=0.5, zorder=layer))
    axes.text(
        (left + right) / 2, (base + top) / 2, SIZES[size], ha="center", va="center", fontsize=8,
        color="white", fontweight="bold", zorder=layer,
    )  # fmt: skip


def _mixed(color: str, other: str, share: float) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    red, green, blue = (
        (1.0 - share) * a + share * b for a, b in zip(to_rgb(color), to_rgb(other), strict=True)
    )
    return red, green, blue


def _draw_cash(axes: Axes, record: GameRecord, snapshots: list[Snapshot]) -> None:
    rules, months = record.rules, [snapshot.month for snapshot in snapshots]
    cash = np.stack([snapshot.cash for snapshot in record.snapshots]) / 1_000.0
    tidy(axes, "", "month", "cash, millions")
    axes.set_title(LEGEND, loc="left", fontsize=8.5, color=GREY)
    axes.axhspan(-100.0, -rules.credit / 1_000.0, color=PALE, zorder=0)
    axes.axhline(0.0, color=GREY, linewidth=0.8)
    axes.text(0.1, -rules.credit / 1_000.0, " credit line", va="top", fontsize=8, color=GREY)
    for agent, name in enumerate(rules.names):
        axes.plot(months, cash[: len(snapshots), agent], color=COLORS[name], linewidth=1.8)
        axes.plot(
            months[-1], cash[len(snapshots) - 1, agent], "o", color=COLORS[name], markersize=4.5,
            clip_on=False,
        )  # fmt: skip
    axes.set_xlim(0.0, rules.months)
    axes.set_ylim(min(-1.6 * rules.credit / 1_000.0, cash.min() - 1.0), cash.max() + 1.0)


def _draw_header(axes: Axes, record: GameRecord, snapshot: Snapshot) -> None:
    """Write the title, and a line for each developer."""
    from matplotlib.patches import Patch

    rules = record.rules
    handles = []
    for agent, name in enumerate(rules.names):
        sizes = np.bincount(snapshot.size[snapshot.owner == agent], minlength=len(SIZES))
        mix = " ".join(f"{count} {size}" for count, size in zip(sizes, SIZES, strict=True))
        label = f"{name}: {mix}, {_millions(snapshot.npv[agent])}"
        handles.append(Patch(facecolor=COLORS[name], edgecolor="none", label=label))
    so_far = "" if snapshot.month == rules.months else " so far"
    axes.set_axis_off()
    axes.text(
        0.0, 1.0, f"LandDev-v0, map {record.seed:,}: after {snapshot.month} of {rules.months} "
        f"months, NPV{so_far} {_millions(snapshot.npv.sum())}",
        fontsize=13, color=INK, fontweight="bold", va="top", transform=axes.transAxes,
    )  # fmt: skip
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(-0.008, -0.12), frameon=False,
        ncols=2 if rules.agents == 4 else rules.agents, fontsize=9.5, labelcolor=INK,
        handlelength=1.0, columnspacing=1.6, borderpad=0.0,
    )  # fmt: skip


def _millions(thousands: float) -> str:
    return f"{thousands / 1_000.0:+.1f} m".replace("-", "−")


def write_city(record: GameRecord, path: Path, snapshot: int = -1) -> None:
    """Write the city at one snapshot as a PNG.

    Args:
        record: The game.
        path: File ending in .png.
        snapshot: Index of the snapshot; by default the last.
    """
    if path.suffix.lower() != ".png":
        raise InputError(f"picture: {path.name!r} must end in .png")
    write_png(draw_city(record, snapshot), path)


def city_pixels(record: GameRecord, snapshot: int = -1, dpi: int = FILM_DPI) -> Array:
    """Return the figure of `draw_city` as pixels, `[height, width, 3]` uint8."""
    from PIL import Image

    data = io.BytesIO()
    draw_city(record, snapshot).savefig(data, format="png", dpi=dpi)
    return np.asarray(Image.open(data).convert("RGB"))


def _commonest_colors(pixels: list[Array]) -> Array:
    """Return the most frequent colors, `[≤ 256, 3]` uint8: flat areas keep their exact colors."""
    sample = np.concatenate(
        [x.reshape(-1, 3) for x in (*pixels[:: 1 + len(pixels) // 4], pixels[-1])]
    )
    red, green, blue = sample.astype(np.int64).T
    packed = red << 16 | green << 8 | blue
    colors, count = np.unique(packed, return_counts=True)
    best = colors[np.argsort(-count, kind="stable")[:256]]
    return np.stack([best >> 16, best >> 8, best], -1).astype(np.uint8)


def write_gif(record: GameRecord, path: Path) -> None:
    """Write a GIF of all snapshots, which pauses on the last.

    Args:
        record: The game.
        path: File ending in .gif.
    """
    from PIL import Image

    if path.suffix.lower() != ".gif":
        raise InputError(f"film: {path.name!r} must end in .gif")
    pixels = [city_pixels(record, snapshot) for snapshot in range(len(record.snapshots))]
    palette = Image.new("P", (1, 1))
    palette.putpalette(_commonest_colors(pixels).tobytes())
    frames = [
        Image.fromarray(x).quantize(palette=palette, dither=Image.Dither.NONE) for x in pixels
    ]
    data = io.BytesIO()
    frames[0].save(
        data, "GIF", save_all=True, append_images=frames[1:], loop=0,
        duration=[FRAME_MS] * (len(frames) - 1) + [LAST_MS],
    )  # fmt: skip
    try:
        replace_file(path, data.getvalue())
    except OSError as error:
        raise KeelError(f"{path}: cannot be written: {error.strerror}") from error
