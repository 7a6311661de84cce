"""`keel explain code-length`: KL as the detour of a traveller whose map is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from keel.explain.explanation import Explanation, Table, make_table, number, texts_of
from keel.explain.figures import legend_below
from keel.explain.inputs import check_distributions, check_names
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NARROW = 0.04
"""Share of the axis below which an outcome has no room for its name."""


class Road(NamedTuple):
    """Lengths of the roads to a place, in bits."""

    name: str
    p: float
    """how often the place is visited"""
    shortest: float
    mapped: float
    detour: float
    weighted: float
    """p · detour"""


def explain_code_length(
    p: Sequence[float] = (0.7, 0.2, 0.1),
    q: Sequence[float] = (0.5, 0.3, 0.2),
    *,
    names: Sequence[str] | None = None,
) -> Explanation:
    """Explain KL(P‖Q) as extra code length: roads laid by the map Q, walked as P has it.

    Args:
        p: How often each outcome happens `[A]`: the terrain.
        q: How often it is expected `[A]`: the map.
        names: Names of the outcomes `[A]`.

    Examples:
        >>> round(explain_code_length([0.5, 0.5], [0.25, 0.75]).numbers["detour_bits"], 4)
        0.2075
    """
    check_distributions("P", p, "Q", q)
    labels = check_names(names, len(p))
    best, mapped = ([_length(x) for x in values] for values in (p, q))
    detours = [b - a if math.isfinite(a) else 0.0 for a, b in zip(best, mapped, strict=True)]
    weighted = [w * x if w > 0.0 else 0.0 for w, x in zip(p, detours, strict=True)]
    shortest = math.fsum(w * x for w, x in zip(p, best, strict=True) if w > 0.0)
    detour = math.fsum(weighted) if all(map(math.isfinite, weighted)) else math.inf
    roads = list(map(Road, labels, p, best, mapped, detours, weighted))
    return Explanation(
        f"A map of the wrong terrain costs {number(detour, 4)} bits a trip",
        *texts_of("code_length"),
        tables=(
            _road_table(roads),
            make_table(
                "Bits a trip, on average",
                ("", ""),
                (
                    ("shortest: the entropy of P", shortest),
                    ("by the map: the cross-entropy of P under Q", shortest + detour),
                    ("detour: KL(P‖Q)", detour),
                ),
            ),
        ),
        meaning=_meaning(roads, shortest, detour),
        numbers={
            "shortest_bits": shortest,
            "mapped_bits": shortest + detour,
            "detour_bits": detour,
            "outcomes": [
                {"name": name, "p": a, "shortest_bits": b, "mapped_bits": c, "weighted_detour": d}
                for name, a, b, c, _, d in roads
            ],
        },
        draw=lambda figure: _draw(figure, roads, detour),
    )


def _length(probability: float) -> float:
    """Return the ideal code length in bits."""
    return -math.log2(probability) + 0.0 if probability > 0.0 else math.inf


def _road_table(roads: list[Road]) -> Table:
    cells = (
        (name, w, number(a, 3), number(b, 3), number(x, 3), y) for name, w, a, b, x, y in roads
    )
    columns = ("place", "visited, P", "shortest", "by the map", "detour", "P · detour")
    return make_table("Roads, in bits", columns, cells)


def _meaning(roads: list[Road], shortest: float, detour: float) -> str:
    worst = max(roads, key=lambda road: road.weighted).name
    if math.isinf(detour):
        return f"The map has no road to {worst!r}, where P goes: no finite detour leads there."
    if detour < 1e-12:
        return "The map is right: no road is longer than it has to be."
    saved = -math.fsum(road.weighted for road in roads if road.weighted < 0.0)
    return (
        f"By the map a trip takes {shortest + detour:.4f} bits where {shortest:.4f} would do. "
        f"Roads that are too long cost {detour + saved:.4f}, most of it to {worst!r}; roads that "
        f"are shorter than needed save {saved:.4f}, and that is always less."
    )


def _draw(figure: Figure, roads: list[Road], detour: float) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1.0))
    lengths = [x for road in roads for x in (road.shortest, road.mapped)]
    top = 1.3 * max([1.0, *filter(math.isfinite, lengths)])
    start, named = 0.0, {}
    for road in roads:
        if road.p > 0.0:
            _draw_road(left, start, start + road.p, road.shortest, min(road.mapped, top))
        if road.p >= NARROW:
            named[start + road.p / 2.0] = road.name
        start += road.p
    left.set_xticks(list(named), list(named.values()))
    left.set_xlim(0.0, 1.0)
    left.set_ylim(0.0, top)
    tidy(left, "Roads: as wide as the place is visited", "", "bits").grid(False, axis="x")
    _draw_sum(right, roads, detour)
    legend_below(figure, left)


def _draw_road(axes: Axes, start: float, end: float, short: float, long: float) -> None:
    axes.hlines(short, start, end, color=BLUE, linewidth=3, label="shortest: terrain P")
    axes.hlines(long, start, end, color=ORANGE, linewidth=3, label="by the map Q")
    color, label = (GREEN, "too long") if long > short else (GREY, "shorter than needed")
    if long != short:
        axes.fill_between(
            [start, end], short, long, color=color, alpha=0.35, linewidth=0, label=label
        )
    axes.axvline(end, color=GREY, linewidth=0.6)


def _draw_sum(axes: Axes, roads: list[Road], detour: float) -> None:
    """Draw what each place adds, from left to right, and the sum."""
    running = 0.0
    for position, road in enumerate(roads):
        step = road.weighted if math.isfinite(road.weighted) else 0.0
        axes.bar(position, step, 0.65, bottom=running, color=GREEN if step >= 0.0 else GREY)
        running += step
    if math.isfinite(detour):
        axes.bar(len(roads), detour, 0.65, color=INK)
    axes.axhline(0.0, color=INK, linewidth=0.8)
    axes.autoscale_view()
    axes.set_ylim(top=1.08 * max(axes.get_ylim()[1], 1e-9))
    axes.set_xticks(range(len(roads) + 1), [*(road.name for road in roads), "KL"])
    tidy(axes, "Detours, added up", "", "P · detour, bits").grid(False, axis="x")
