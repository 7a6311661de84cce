"""The city as it stands, drawn; and the months of a game as a film."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from keel.apps.land.arrays import FREE, Array
from keel.apps.land.recording import Chronicle, Scene
from keel.apps.land.rules import SIZES
from keel.errors import InputError, KeelError
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, PALE, new_figure, tidy
from keel.runs.drawing import write_png
from keel.runs.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"industry": ORANGE, "education": BLUE, "council": GREEN, "housing": "#7048e8"}
WATER, PARK = "#a5d8ff", "#d3ecd8"
HEIGHTS, HALVES = (0.16, 0.34, 0.62), (0.2, 0.26, 0.32)
"""How high buildings stand, and half their width, in parcels."""
DEPTH = 0.13
"""By which a roof is set back to the right, in parcels."""
RIM = 0.55
"""From the middle of the outermost parcels to the edge of the map."""
LIMITS = 100.0, 1_300.0
"""Of the shading by price: land near prestige costs more than on any map."""
LEGEND = (
    "★ hub    letters: the largest size that a parcel carries    green: none    "
    "hatched: under construction"
)
FILM_DPI, FRAME_MS, LAST_MS = 72, 350, 2_500


def draw_city(story: Chronicle, scene: int = -1) -> Figure:
    """The map with what stands on it in one of the scenes, and everybody's cash until then."""
    seen = story.scenes[: scene % len(story.scenes) + 1]
    head, high, low = 0.5 + 0.22 * (story.rules.agents > 3), 7.6 * _slant(story), 1.5
    figure = new_figure(8.8, head + high + low + 0.9)
    header, city, strip = figure.subplots(3, 1, height_ratios=[head, high, low])
    _draw_land(figure, city, story, seen[-1])
    for parcel in range(story.rules.parcels):
        _draw_building(city, story, seen[-1], parcel)
    _draw_cash(strip, story, seen)
    _say(header, story, seen[-1])
    return figure


def _slant(story: Chronicle) -> float:
    """Height of the map by its width."""
    return (story.rules.rows - 1.0 + 2.0 * RIM) / (story.rules.columns - 1.0 + 2.0 * RIM)


def _draw_land(figure: Figure, axes: Axes, story: Chronicle, scene: Scene) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.patches import FancyBboxPatch

    rules, world = story.rules, story.world
    shades = LinearSegmentedColormap.from_list("land", ["#fff8ea", "#f3d9a4", "#c88a2e"])
    colour = ScalarMappable(Normalize(*LIMITS), shades)
    for parcel in range(rules.parcels):
        row, column = divmod(parcel, rules.columns)
        level = int(world.level[0, parcel])
        face = PARK if level < 3 else colour.to_rgba(scene.price[parcel])
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
    _draw_river(axes, story)
    for row, column in world.hubs[0]:
        axes.plot(
            column, row, marker="*", markersize=14, color="#ffd43b", markeredgecolor=INK, zorder=40
        )
    axes.set_xlim(-RIM, rules.columns - 1.0 + RIM)
    axes.set_ylim(rules.rows - 1.0 + RIM, -RIM)
    axes.set_aspect("equal")
    axes.set_axis_off()
    bar = figure.colorbar(colour, ax=axes, location="right", fraction=0.022, pad=0.01, aspect=38)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    bar.ax.tick_params(labelsize=8, colors=INK, length=0)
    bar.set_label("price of land today, thousands", fontsize=8.5, color=INK)


def _draw_river(axes: Axes, story: Chronicle) -> None:
    middle, bend, length, phase = story.world.course[0]
    x = np.linspace(-RIM, story.rules.columns - 1.0 + RIM, 200)
    y = middle + bend * np.sin(x / length + phase)
    axes.plot(x, y, color="white", linewidth=15, alpha=0.75, solid_capstyle="butt", zorder=2)
    axes.plot(x, y, color=WATER, linewidth=12, solid_capstyle="butt", zorder=2)


def _draw_building(axes: Axes, story: Chronicle, scene: Scene, parcel: int) -> None:
    """A block in its owner's colour, as high as its size; hatched while it is being built."""
    from matplotlib.patches import Polygon

    owner = int(scene.owner[parcel])
    if owner == FREE:
        return
    row, column = divmod(parcel, story.rules.columns)
    colour = COLOURS[story.rules.names[owner]]
    size, half = int(scene.size[parcel]), HALVES[int(scene.size[parcel])]
    high, base = HEIGHTS[size], row + 0.32
    left, right, top = column - half - DEPTH / 2, column + half - DEPTH / 2, base - high
    front = [(left, base), (right, base), (right, top), (left, top)]
    back = [(x + DEPTH, y - DEPTH) for x, y in front]
    roof, side = [front[3], front[2], back[2], back[3]], [front[1], back[1], back[2], front[2]]
    layer = 10 + row
    if scene.left[parcel] > 0:
        for face in (front, roof, side):
            axes.add_artist(
                Polygon(
                    face, facecolor=(*_mixed(colour, "white", 0.88), 0.75), edgecolor=colour,
                    linewidth=0.9, hatch="/////", zorder=layer,
                )
            )  # fmt: skip
        return
    for face, tone, much in ((front, "white", 0.0), (roof, "white", 0.45), (side, "black", 0.28)):
        shade = _mixed(colour, tone, much)
        axes.add_artist(Polygon(face, facecolor=shade, edgecolor=INK, linewidth=0.5, zorder=layer))
    axes.text(
        (left + right) / 2, (base + top) / 2, SIZES[size], ha="center", va="center", fontsize=8,
        color="white", fontweight="bold", zorder=layer,
    )  # fmt: skip


def _mixed(colour: str, other: str, much: float) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    red, green, blue = (
        (1.0 - much) * a + much * b for a, b in zip(to_rgb(colour), to_rgb(other), strict=True)
    )
    return red, green, blue


def _draw_cash(axes: Axes, story: Chronicle, seen: list[Scene]) -> None:
    rules, months = story.rules, [scene.month for scene in seen]
    cash = np.stack([scene.cash for scene in story.scenes]) / 1_000.0
    tidy(axes, "", "month", "cash, millions")
    axes.set_title(LEGEND, loc="left", fontsize=8.5, color=GREY)
    axes.axhspan(-100.0, -rules.credit / 1_000.0, color=PALE, zorder=0)
    axes.axhline(0.0, color=GREY, linewidth=0.8)
    axes.text(0.1, -rules.credit / 1_000.0, " credit line", va="top", fontsize=8, color=GREY)
    for agent, name in enumerate(rules.names):
        axes.plot(months, cash[: len(seen), agent], color=COLOURS[name], linewidth=1.8)
        axes.plot(
            months[-1], cash[len(seen) - 1, agent], "o", color=COLOURS[name], markersize=4.5,
            clip_on=False,
        )  # fmt: skip
    axes.set_xlim(0.0, rules.months)
    axes.set_ylim(min(-1.6 * rules.credit / 1_000.0, cash.min() - 1.0), cash.max() + 1.0)


def _say(axes: Axes, story: Chronicle, scene: Scene) -> None:
    """The title, and a line for each developer."""
    from matplotlib.patches import Patch

    rules = story.rules
    handles = []
    for agent, name in enumerate(rules.names):
        sizes = np.bincount(scene.size[scene.owner == agent], minlength=len(SIZES))
        mix = " ".join(f"{count} {size}" for count, size in zip(sizes, SIZES, strict=True))
        told = f"{name}: {mix}, {_millions(scene.npv[agent])}"
        handles.append(Patch(facecolor=COLOURS[name], edgecolor="none", label=told))
    so_far = "" if scene.month == rules.months else " so far"
    axes.set_axis_off()
    axes.text(
        0.0, 1.0, f"LandDev-v0, map {story.seed:,}: after {scene.month} of {rules.months} months, "
        f"NPV{so_far} {_millions(scene.npv.sum())}",
        fontsize=13, color=INK, fontweight="bold", va="top", transform=axes.transAxes,
    )  # fmt: skip
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(-0.008, -0.12), frameon=False,
        ncols=2 if rules.agents == 4 else rules.agents, fontsize=9.5, labelcolor=INK,
        handlelength=1.0, columnspacing=1.6, borderpad=0.0,
    )  # fmt: skip


def _millions(thousands: float) -> str:
    return f"{thousands / 1_000.0:+.1f} m".replace("-", "−")


def write_city(story: Chronicle, path: Path, scene: int = -1) -> None:
    """As a PNG."""
    if path.suffix.lower() != ".png":
        raise InputError(f"picture: {path.name!r} must end in .png")
    write_png(draw_city(story, scene), path)


def city_pixels(story: Chronicle, scene: int = -1, dpi: int = FILM_DPI) -> Array:
    """`[height, width, 3]` uint8: what `draw_city` draws, for films and for `render`."""
    from PIL import Image

    data = io.BytesIO()
    draw_city(story, scene).savefig(data, format="png", dpi=dpi)
    return np.asarray(Image.open(data).convert("RGB"))


def _commonest_colours(pixels: list[Array]) -> Array:
    """`[≤ 256, 3]` uint8: flat areas keep their exact colours, which no general palette gives."""
    some = np.concatenate(
        [x.reshape(-1, 3) for x in (*pixels[:: 1 + len(pixels) // 4], pixels[-1])]
    )
    red, green, blue = some.astype(np.int64).T
    packed = red << 16 | green << 8 | blue
    found, count = np.unique(packed, return_counts=True)
    best = found[np.argsort(-count, kind="stable")[:256]]
    return np.stack([best >> 16, best >> 8, best], -1).astype(np.uint8)


def write_film(story: Chronicle, path: Path) -> None:
    """A GIF of all months, which stays on the last."""
    from PIL import Image

    if path.suffix.lower() != ".gif":
        raise InputError(f"film: {path.name!r} must end in .gif")
    pixels = [city_pixels(story, scene) for scene in range(len(story.scenes))]
    palette = Image.new("P", (1, 1))
    palette.putpalette(_commonest_colours(pixels).tobytes())
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
