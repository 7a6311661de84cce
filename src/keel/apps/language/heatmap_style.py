"""The one style sheet of a heat-map: Keel's colours, from white to three quarters of each.

A token carries a class for each measure, its letter and its level (`a7`, `cm3`); the radio button
that is checked decides which of them colours it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keel import templates
from keel.look import BLUE, INK, ORANGE
from keel.templates import Markup

ONE_WAY, BOTH_WAYS, CALM = "hot", "way", "calm"
LEVELS = {ONE_WAY: 12, BOTH_WAYS: 10, CALM: 12}
"""Steps from white to the strongest colour."""
NOT_FINITE = "broken"
STRONGEST = 0.75
"""Largest share of a colour on which ink stays readable."""


def style(kinds: Sequence[str]) -> Markup:
    """Return the sheet for measures of these kinds, in the order of their letters."""
    used = dict.fromkeys(kind for kind in kinds if kind in LEVELS)
    legends = (
        f".{kind}{name} {{ background: {color}; }}" for kind in used for name, color in shades(kind)
    )
    rules = (rule for i, kind in enumerate(kinds) for rule in _measure(i, kind))
    flags = (
        f".flag1 {{ background: {mix(ORANGE, 0.6)}; }}",
        f".mask1 {{ background: {mix(BLUE, 0.2)}; }}",
        f".{NOT_FINITE} {{ background: {INK}; color: #fff; }}",
    )
    base = templates.style(__package__, "heatmap.css")
    return Markup("\n".join([f"\n{base}", *flags, *legends, *rules, ""]))


def shades(kind: str) -> Iterator[tuple[str, str]]:
    """Yield name and colour of every level: `7`, and `m7` on the other side of white."""
    steps = LEVELS[kind]
    up = BLUE if kind in (BOTH_WAYS, CALM) else ORANGE
    for size in range(steps + 1):
        yield str(size), mix(up, STRONGEST * size / steps)
        if kind == BOTH_WAYS and size:
            yield f"m{size}", mix(ORANGE, STRONGEST * size / steps)


def mix(color: str, share: float) -> str:
    """So much of a colour in white.

    Examples:
        >>> mix("#000000", 0.5)
        '#808080'
    """
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 + share * (part - 255)):02x}" for part in parts)


def _measure(index: int, kind: str) -> Iterator[str]:
    """Return the rules that change when the radio button of this measure is checked."""
    letter, checked = chr(ord("a") + index), f"#m{index}:checked~main"
    label = f"label[for=m{index}]"
    yield f"{checked} {label} {{ background: {INK}; color: #fff; border-color: {INK}; }}"
    yield f"#m{index}:focus-visible~main {label} {{ outline: 3px solid {mix(BLUE, 0.5)}; }}"
    yield f"{checked} .l{index} {{ display: flex; }}"
    yield f"{checked} .{letter}x {{ background: {INK}; color: #fff; }}"
    if kind == "flag":
        yield f"{checked} .{letter}1 {{ background: {mix(ORANGE, 0.6)}; }}"
    elif kind == "mask":
        yield f"{checked} .{letter}1 {{ background: {mix(BLUE, 0.2)}; }}"
    else:
        for name, color in shades(kind):
            if name != "0":
                yield f"{checked} .{letter}{name} {{ background: {color}; }}"
