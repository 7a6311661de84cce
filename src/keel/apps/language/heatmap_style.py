"""The one style sheet of a heat-map: Keel's colours, from white to three quarters of each.

A token carries a class for each measure, its letter and its level (`a7`, `cm3`); the radio button
that is checked decides which of them colours it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keel.look import BLUE, GREY, INK, ORANGE, PALE

ONE_WAY, BOTH_WAYS, CALM = "hot", "way", "calm"
LEVELS = {ONE_WAY: 12, BOTH_WAYS: 10, CALM: 12}
"""Steps from white to the strongest colour."""
NOT_FINITE = "broken"
STRONGEST = 0.75
"""Largest share of a colour on which ink stays readable."""
SOFT = "#52606d"

BASE = f"""
* {{ box-sizing: border-box; }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: {INK}; background: #fff; margin: 0; }}
main {{ margin: 0 auto; max-width: 1120px; padding: 28px 24px 96px; }}
h1 {{ font-size: 24px; margin: 0 0 2px; overflow-wrap: anywhere; }}
h2 {{ font-size: 16px; margin: 0; }}
.sub, .facts {{ color: {SOFT}; margin: 0; }}
.head {{ display: flex; flex-wrap: wrap; gap: 0 14px; align-items: baseline; }}
.cards {{ display: flex; flex-wrap: wrap; gap: 12px; margin: 18px 0 20px; }}
.card {{ border: 1px solid {PALE}; border-radius: 8px; padding: 10px 14px; flex: 1 1 136px; }}
.card span, .card small {{ display: block; color: {SOFT}; font-size: 13px; }}
.card b {{ display: block; font-size: 20px; font-variant-numeric: tabular-nums; }}
.pick {{ position: fixed; top: 0; opacity: 0; pointer-events: none; }}
nav {{ position: sticky; top: 0; background: #fff; padding: 10px 0; z-index: 1;
  border-bottom: 1px solid {PALE}; }}
.labels {{ display: flex; flex-wrap: wrap; gap: 6px; }}
label {{ border: 1px solid {PALE}; border-radius: 999px; padding: 3px 14px; cursor: pointer; }}
label:hover {{ border-color: {GREY}; }}
.legend {{ display: none; flex-wrap: wrap; gap: 4px 18px; align-items: center; margin-top: 10px;
  min-height: 24px; font-size: 13px; }}
.scale {{ display: inline-flex; gap: 8px; align-items: center; }}
.scale em {{ font-style: normal; font-variant-numeric: tabular-nums; }}
.strip {{ display: inline-flex; border: 1px solid {PALE}; border-radius: 4px; overflow: hidden; }}
.strip i {{ width: 14px; height: 16px; }}
.scale > i {{ font-style: normal; border-radius: 4px; padding: 0 8px; }}
.meaning {{ color: {SOFT}; }}
section {{ margin: 26px 0 0; }}
.prompt {{ margin: 8px 0 0; padding: 6px 12px; border-left: 4px solid {PALE}; color: {SOFT};
  white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.5 ui-monospace, monospace; }}
.text {{ margin: 8px 0 0; font: 15px/2 ui-monospace, monospace; overflow-wrap: anywhere; }}
.t {{ white-space: pre-wrap; unicode-bidi: isolate; border-radius: 3px; padding: 3px 1px;
  margin-right: 1px; box-shadow: inset 0 0 0 1px {PALE}; }}
.off {{ color: {SOFT}; background: repeating-linear-gradient(135deg, {PALE} 0 4px, #fff 4px 7px); }}
.flag0 {{ box-shadow: inset 0 0 0 1px {PALE}; }}
.t:hover {{ box-shadow: inset 0 0 0 2px {INK}; }}
.t:target {{ box-shadow: 0 0 0 3px {INK}; scroll-margin: 140px; }}
.t[data-told]:hover::after {{ content: attr(data-told); position: fixed; right: 20px; bottom: 20px;
  z-index: 2; white-space: pre; background: #fff; color: {INK}; border: 1px solid {GREY};
  border-radius: 8px; padding: 10px 14px; font: 13px/1.6 ui-monospace, monospace;
  box-shadow: 0 6px 24px {GREY}66; max-width: calc(100vw - 40px); overflow: hidden; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 8px 0;
  width: 100%; font-size: 13px; }}
th, td {{ padding: 4px 9px 4px 0; text-align: right; border-bottom: 1px solid {PALE};
  white-space: nowrap; }}
th {{ font-weight: 600; white-space: normal; vertical-align: bottom; line-height: 1.3; }}
td:nth-child(2), th:nth-child(2), td:nth-child(3), th:nth-child(3) {{ text-align: left; }}
td a {{ color: {BLUE}; }}
q {{ quotes: none; font: 13px/1.5 ui-monospace, monospace; color: {SOFT}; white-space: pre;
  unicode-bidi: isolate; }}
q span {{ display: inline-block; min-width: 24ch; text-align: right; }}
th small {{ display: block; font-weight: 400; color: {SOFT}; }}
.rest {{ margin: 14px 0 0; }}
mark {{ background: {ORANGE}59; color: {INK}; border-radius: 3px; padding: 1px 2px; }}
@media print {{ nav {{ position: static; }} .t, .strip i {{ print-color-adjust: exact; }} }}
"""


def style(kinds: Sequence[str]) -> str:
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
    return "\n".join([BASE, *flags, *legends, *rules, ""])


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
