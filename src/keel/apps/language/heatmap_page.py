"""The HTML of a heat-map: no script and nothing from outside; radio buttons and CSS do the rest.

Colours are classes, one for each measure and level, so that the page can forbid inline styles: its
policy (CSP) allows one style sheet, by its hash, and nothing else. Whatever comes from outside
passes through `plain`, which escapes it.
"""

from __future__ import annotations

import base64
import hashlib
import math
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from keel.apps.language.heatmap import MEASURES, Array, Peak, TokenTable, page_rows, peaks, total
from keel.apps.language.heatmap_style import (
    BOTH_WAYS,
    LEVELS,
    NOT_FINITE,
    style,
)
from keel.data import read_beside
from keel.templates import Markup, Templates, as_markup, join

HTML = Templates(__package__, "heatmap.html")
BEFORE, AFTER = 24, 16
"""Characters of context around a token in the table."""


@dataclass(frozen=True)
class Measure:
    """The way a field of the table is drawn."""

    field: str
    title: str
    meaning: str
    kind: str
    """one of `LEVELS`, `flag` or `mask`"""
    unit: str = ""


SHOWN = read_beside(__file__, "heatmap.yaml", list[Measure])


def page(table: TokenTable, *, max_tokens: int) -> str:
    """Return the page of a checked table."""
    rows = page_rows(table, max_tokens)
    measures = [m for m in SHOWN if getattr(table, m.field) is not None]
    sheet = style([m.kind for m in measures])
    scales = [_scale(getattr(table, m.field), table.weight) for m in measures]
    recorded = [m for m in measures if m.field in MEASURES]
    return HTML.fill(
        "page",
        digest=base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode(),
        title=join([plain(table.run), f" · step {table.step:,}"]),
        sheet=sheet,
        picks=join(HTML.fill("pick" if i else "first_pick", index=i) for i in range(len(measures))),
        cards=join(_cards(table)),
        labels=join(HTML.fill("label", index=i, title=m.title) for i, m in enumerate(measures)),
        legends=join(_legends(table, measures, scales)),
        completions=join((_completion(table, row, measures, scales) for row in rows), "\n"),
        left_out=_left_out(table, rows),
        recorder=_recorder(table, recorded, set(rows)),
    )


def plain(text: str) -> Markup:
    """Escape text for HTML; characters that would act instead of being seen are spelled out."""
    return as_markup("".join(map(_visible, text)))


def number(x: float) -> str:
    """Format a number with three digits and a true minus sign."""
    if np.isnan(x):
        return "not a number"
    if np.isinf(x):
        return "∞" if x > 0 else "−∞"
    return f"{x:.3g}".replace("-", "−")


def level(x: float, top: float, steps: int) -> int:
    """Return −`steps` … `steps`, by the root of |x|/top: an outlier does not hide the others."""
    if top <= 0:
        return 0
    size = round(steps * math.sqrt(min(1.0, abs(x) / top)))
    return size if x >= 0 else -size


def _visible(letter: str) -> str:
    if letter == "\n":
        return letter
    if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
        return f"\\u{ord(letter):04x}"
    return letter


def _scale(x: Array, weight: Array) -> float:
    """Return the largest size of a finite value that counts."""
    sizes = np.abs(x[(weight > 0) & np.isfinite(x)])
    return float(sizes.max()) if sizes.size else 0.0


def _cards(table: TokenTable) -> Iterator[Markup]:
    counted = table.weight > 0
    texts = sum(map(len, table.tokens))
    trained = int(counted.sum())
    reward = table.reward[np.isfinite(table.reward)]
    yield _card("completions", f"{len(table.tokens):,}", f"{texts:,} tokens")
    yield _card("trained on", f"{trained:,}", f"tokens; {texts - trained:,} masked")
    if reward.size:
        spread = f"from {number(reward.min())} to {number(reward.max())}"
        yield _card("reward", number(reward.mean()), spread)
    for field, title in (("kl_old_new", "KL(old‖new)"), ("kl_reference", "KL to the reference")):
        if getattr(table, field) is not None:
            kl = total(getattr(table, field), table.weight)
            below = f"nats a token; {number(kl.per_sequence)} a completion"
            if kl.not_finite:
                below += f"; not finite: {kl.not_finite:,}"
            yield _card(title, number(kl.per_token), below)
    if table.entropy is not None:
        mean = total(table.entropy, table.weight).per_token
        yield _card("entropy", number(mean), "nats a token")
    if table.clipped is not None:
        yield _card("clipped", f"{total(table.clipped, table.weight).per_token:.1%}", "of tokens")


def _card(title: str, value: str, below: str) -> Markup:
    return HTML.fill("card", title=title, value=value, below=below)


def _legends(table: TokenTable, measures: list[Measure], scales: list[float]) -> Iterator[Markup]:
    for i, (m, top) in enumerate(zip(measures, scales, strict=True)):
        scale = _legend(m, top, _has_broken(table, m))
        yield HTML.fill("legend", index=i, scale=scale, meaning=m.meaning)


def _has_broken(table: TokenTable, measure: Measure) -> bool:
    x = getattr(table, measure.field)
    return bool((~np.isfinite(x[table.weight > 0])).any())


def _legend(measure: Measure, top: float, broken: bool) -> Markup:
    kind = measure.kind
    if kind in ("flag", "mask"):
        scale = HTML.fill(kind)
    else:
        steps = LEVELS[kind]
        first = -steps if kind == BOTH_WAYS else 0
        scale = HTML.fill(
            "strip",
            low=number(-top) if first else "0",
            swatches=join(
                HTML.fill("swatch", name=_swatch(kind, n), text="") for n in range(first, steps + 1)
            ),
            high=f"{number(top)} {measure.unit}".strip() + ", root scale",
        )
    if broken:
        return join([scale, HTML.fill("swatch", name=NOT_FINITE, text="not finite")])
    return scale


def _swatch(kind: str, size: int) -> str:
    return f"{kind}{'m' if size < 0 else ''}{abs(size)}"


def _completion(
    table: TokenTable, row: int, measures: list[Measure], scales: list[float]
) -> Markup:
    texts, counted = table.tokens[row], table.weight[row] > 0
    kl = total(table.kl_old_new[row : row + 1], table.weight[row : row + 1])
    tokens = [_token(table, row, position, measures, scales) for position in range(len(texts))]
    if padding := table.weight.shape[1] - len(texts):
        tokens.append(HTML.fill("padding", count=padding))
    return HTML.fill(
        "completion",
        number=row + 1,
        reward=number(float(table.reward[row])),
        trained=int(counted.sum()),
        kl=number(kl.per_sequence),
        kl_token=number(kl.per_token),
        prompt=plain(table.prompts[row]),
        tokens=join(tokens),
    )


def _token(
    table: TokenTable, row: int, position: int, measures: list[Measure], scales: list[float]
) -> Markup:
    text = table.tokens[row][position]
    lines = [f"{_printable(text)}   completion {row + 1}, token {position + 1}"]
    for m in measures[:-1]:
        x = getattr(table, m.field)[row, position]
        lines.append(f"{m.title:<20} {_value(m, x)} {m.unit}")
    if table.weight[row, position] > 0:
        classes = [
            _class(m, i, float(getattr(table, m.field)[row, position]), top)
            for i, (m, top) in enumerate(zip(measures, scales, strict=True))
        ]
    else:
        classes = ["off"]
        lines.append("masked: not trained on")
    return HTML.fill(
        "token",
        classes=" ".join(["t", *filter(None, classes)]),
        row=row,
        position=position,
        tooltip=join(map(plain, lines), "&#10;"),
        text=plain(_printable(text)),
        breaks=Markup("<br>" * min(text.count("\n"), 2)),
    )


def _class(measure: Measure, index: int, x: float, top: float) -> str:
    """Return the measure's letter and level, as in the style sheet; nothing where it is white."""
    letter = chr(ord("a") + index)
    if not np.isfinite(x):
        return f"{letter}x"
    if measure.kind in ("flag", "mask"):
        return f"{letter}1" if x > 0 else ""
    size = level(x, top, LEVELS[measure.kind])
    if measure.kind != BOTH_WAYS:
        size = max(size, 0)
    return f"{letter}{'m' if size < 0 else ''}{abs(size)}" if size else ""


def _value(measure: Measure, x: float) -> str:
    if measure.kind == "flag":
        return "yes" if x > 0 else "no"
    return number(float(x))


def _column(measure: Measure) -> Markup:
    if measure.unit:
        return HTML.fill("column", title=measure.title, unit=measure.unit)
    return as_markup(measure.title)


def _printable(text: str) -> str:
    """Return a token as it can be seen: blanks and line breaks have signs of their own."""
    if not text:
        return "∅"
    if not text.strip(" "):
        return "␣" * len(text)
    return text.replace("\n", "↵").replace("\t", "⇥")


def _left_out(table: TokenTable, rows: list[int]) -> Markup:
    missing, count = len(table.tokens) - len(rows), len(table.tokens)
    if not missing:
        return Markup()
    return HTML.fill("left_out", missing=f"{missing:,}", total=f"{count:,}")


def _recorder(table: TokenTable, measures: list[Measure], rows: set[int]) -> Markup:
    """Return the flight recorder: the tokens that carry the KL."""
    top = peaks(table)
    if not top:
        return HTML.fill("nothing_moved")
    columns = ["", "completion", "token in its context", "share", *map(_column, measures)]
    carried = sum(peak.share for peak in top if np.isfinite(peak.share))
    return HTML.fill(
        "recorder",
        shown=len(top),
        total=f"{int((table.weight > 0).sum()):,}",
        carried=f"{carried:.0%}",
        head=join(HTML.fill("head", text=name) for name in columns),
        rows=join(_line(table, i, peak, measures, rows) for i, peak in enumerate(top, 1)),
    )


def _line(
    table: TokenTable, rank: int, peak: Peak, measures: list[Measure], rows: set[int]
) -> Markup:
    row, position, share = peak
    where: str = f"{row + 1}, token {position + 1}"
    if row in rows:
        where = HTML.fill("link", row=row, position=position, text=where)
    cells = [
        str(rank),
        where,
        _context(table, row, position),
        "–" if np.isnan(share) else f"{share:.1%}",
        *(_value(m, getattr(table, m.field)[row, position]) for m in measures),
    ]
    return HTML.fill("row", cells=join(HTML.fill("cell", text=cell) for cell in cells))


def _context(table: TokenTable, row: int, position: int) -> Markup:
    texts = table.tokens[row]
    before = table.prompts[row] + "".join(islice(texts, position))
    after = "".join(islice(texts, position + 1, None))
    left, right = (plain(part.replace("\n", "↵")) for part in (before[-BEFORE:], after[:AFTER]))
    token = plain(_printable(texts[position]))
    return HTML.fill("context", left=left, token=token, right=right)
