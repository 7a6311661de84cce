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
from html import escape
from itertools import islice
from typing import NamedTuple

import numpy as np

from keel.apps.language.heatmap import MEASURES, Array, Peak, TokenTable, page_rows, peaks, total
from keel.apps.language.heatmap_style import (
    BOTH_WAYS,
    CALM,
    LEVELS,
    NOT_FINITE,
    ONE_WAY,
    style,
)

BEFORE, AFTER = 24, 16
"""Characters of context around a token in the table."""


class Measure(NamedTuple):
    """The way a field of the table is drawn."""

    field: str
    title: str
    meaning: str
    kind: str
    """one of `LEVELS`"""


SHOWN = (
    Measure(
        "kl_old_new",
        "KL(old‖new)",
        "how far the update moved the choice of this token, over the whole vocabulary",
        ONE_WAY,
    ),
    Measure(
        "kl_reference",
        "KL to the reference",
        "how far the new policy stands from the frozen reference, over the whole vocabulary",
        ONE_WAY,
    ),
    Measure(
        "log_ratio",
        "log-ratio",
        "log new − log old of the sampled token: blue more likely now, orange less likely",
        BOTH_WAYS,
    ),
    Measure(
        "advantage",
        "advantage",
        "blue better than expected, orange worse",
        BOTH_WAYS,
    ),
    Measure("entropy", "entropy", "of the new policy at this token", CALM),
    Measure("clipped", "clipped", "the clip took away the gradient of the marked tokens", "flag"),
    Measure(
        "weight", "masked", "hatched: tool text and padding, seen but never trained on", "mask"
    ),
)
UNITS = {"kl_old_new": "nats", "kl_reference": "nats", "log_ratio": "nats", "entropy": "nats"}


def page(table: TokenTable, *, max_tokens: int) -> str:
    """Return the page of a checked table."""
    rows = page_rows(table, max_tokens)
    measures = [m for m in SHOWN if getattr(table, m.field) is not None]
    sheet = style([m.kind for m in measures])
    title = f"{plain(table.run)} · step {table.step:,}"
    picks = "".join(
        f"<input type=radio name=measure class=pick id=m{i}{' checked' * (i == 0)}>"
        for i in range(len(measures))
    )
    scales = [_scale(getattr(table, m.field), table.weight) for m in measures]
    bodies = (_completion(table, row, measures, scales) for row in rows)
    return "\n".join(
        [
            "<!doctype html><html lang=en><meta charset=utf-8>",
            f'<meta http-equiv=Content-Security-Policy content="{_policy(sheet)}">',
            "<meta name=viewport content='width=device-width'>",
            f"<title>{title}</title><style>{sheet}</style>",
            f"{picks}<main><h1>{title}</h1>",
            "<p class=sub>What one update did, token by token: point at one for its numbers</p>",
            f"<div class=cards>{''.join(_cards(table))}</div>",
            _chooser(table, measures, scales),
            *bodies,
            _left_out(table, rows),
            _recorder(table, [m for m in measures if m.field in MEASURES], set(rows)),
            "</main></html>",
        ]
    )


def plain(text: str) -> str:
    """Escape text for HTML; characters that would act instead of being seen are spelled out."""
    return escape("".join(map(_visible, text)))


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


def _policy(sheet: str) -> str:
    digest = base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _scale(x: Array, weight: Array) -> float:
    """Return the largest size of a finite value that counts."""
    sizes = np.abs(x[(weight > 0) & np.isfinite(x)])
    return float(sizes.max()) if sizes.size else 0.0


def _cards(table: TokenTable) -> Iterator[str]:
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


def _card(title: str, value: str, below: str) -> str:
    return f"<div class=card><span>{title}</span><b>{value}</b><small>{below}</small></div>"


def _chooser(table: TokenTable, measures: list[Measure], scales: list[float]) -> str:
    labels = "".join(f"<label for=m{i}>{m.title}</label>" for i, m in enumerate(measures))
    legends = "".join(
        f"<div class='legend l{i}'>{_legend(m, top, _has_broken(table, m))}"
        f"<span class=meaning>{m.meaning}</span></div>"
        for i, (m, top) in enumerate(zip(measures, scales, strict=True))
    )
    return f"<nav><div class=labels>{labels}</div>{legends}</nav>"


def _has_broken(table: TokenTable, measure: Measure) -> bool:
    x = getattr(table, measure.field)
    return bool((~np.isfinite(x[table.weight > 0])).any())


def _legend(measure: Measure, top: float, broken: bool) -> str:
    kind = measure.kind
    if kind == "flag":
        parts = "<i class=flag1>clipped</i><i class=flag0>not</i><i class=off>masked</i>"
    elif kind == "mask":
        parts = "<i class=mask1>trained on</i><i class=off>masked</i>"
    else:
        steps = LEVELS[kind]
        first = -steps if kind == BOTH_WAYS else 0
        swatches = "".join(f"<i class={_swatch(kind, n)}></i>" for n in range(first, steps + 1))
        unit = UNITS.get(measure.field, "")
        ends = (number(-top) if first else "0", f"{number(top)} {unit}".strip() + ", root scale")
        parts = f"<em>{ends[0]}</em><span class=strip>{swatches}</span><em>{ends[1]}</em>"
        parts += "<i class=off>masked</i>"
    if broken:
        parts += f"<i class={NOT_FINITE}>not finite</i>"
    return f"<span class=scale>{parts}</span>"


def _swatch(kind: str, size: int) -> str:
    return f"{kind}{'m' if size < 0 else ''}{abs(size)}"


def _completion(table: TokenTable, row: int, measures: list[Measure], scales: list[float]) -> str:
    texts, counted = table.tokens[row], table.weight[row] > 0
    kl = total(table.kl_old_new[row : row + 1], table.weight[row : row + 1])
    spans = "".join(
        _token(table, row, position, measures, scales) for position in range(len(texts))
    )
    padding = table.weight.shape[1] - len(texts)
    if padding:
        spans += f"<span class='t off'>{padding} × padding</span>"
    facts = [
        f"reward <b>{number(float(table.reward[row]))}</b>",
        f"{int(counted.sum())} tokens trained on",
        f"KL {number(kl.per_sequence)} nats, {number(kl.per_token)} a token",
    ]
    return (
        f"<section><div class=head><h2>Completion {row + 1}</h2>"
        f"<p class=facts>{' · '.join(facts)}</p></div>"
        f"<p class=prompt>{plain(table.prompts[row])}</p><p class=text>{spans}</p></section>"
    )


def _token(
    table: TokenTable, row: int, position: int, measures: list[Measure], scales: list[float]
) -> str:
    text = table.tokens[row][position]
    lines = [f"{_printable(text)}   completion {row + 1}, token {position + 1}"]
    for m in measures[:-1]:
        x = getattr(table, m.field)[row, position]
        lines.append(f"{m.title:<20} {_value(m, x)} {UNITS.get(m.field, '')}")
    if table.weight[row, position] > 0:
        classes = [
            _class(m, i, float(getattr(table, m.field)[row, position]), top)
            for i, (m, top) in enumerate(zip(measures, scales, strict=True))
        ]
    else:
        classes = ["off"]
        lines.append("masked: not trained on")
    tooltip = "&#10;".join(plain(line) for line in lines)
    breaks = "<br>" * min(text.count("\n"), 2)
    mark = " ".join(["t", *filter(None, classes)])
    return (
        f'<span class="{mark}" id=t{row}-{position} data-told="{tooltip}">'
        f"{plain(_printable(text))}</span>{breaks}"
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


def _column(measure: Measure) -> str:
    unit = UNITS.get(measure.field)
    return f"{measure.title}<small>{unit}</small>" if unit else measure.title


def _printable(text: str) -> str:
    """Return a token as it can be seen: blanks and line breaks have signs of their own."""
    if not text:
        return "∅"
    if not text.strip(" "):
        return "␣" * len(text)
    return text.replace("\n", "↵").replace("\t", "⇥")


def _left_out(table: TokenTable, rows: list[int]) -> str:
    missing = len(table.tokens) - len(rows)
    if not missing:
        return ""
    return (
        f"<p class='sub rest'>{missing:,} of {len(table.tokens):,} completions are left out, "
        "those with the least KL; totals and the table below include them.</p>"
    )


def _recorder(table: TokenTable, measures: list[Measure], rows: set[int]) -> str:
    """Return the flight recorder: the tokens that carry the KL."""
    top = peaks(table)
    heading = "<section><h2>Flight recorder: the tokens that carry the most KL</h2>"
    if not top:
        return f"{heading}<p class=sub>No token carries any KL: nothing moved.</p></section>"
    columns = ["", "completion", "token in its context", "share", *map(_column, measures)]
    head = "".join(f"<th>{name}</th>" for name in columns)
    body = "".join(_line(table, i, peak, measures, rows) for i, peak in enumerate(top, 1))
    carried = sum(peak.share for peak in top if np.isfinite(peak.share))
    note = (
        f"These {len(top)} of {int((table.weight > 0).sum()):,} tokens carry {carried:.0%} of it."
    )
    return (
        f"{heading}<p class=sub>{note}</p>"
        f"<div class=wide><table><tr>{head}</tr>{body}</table></div></section>"
    )


def _line(table: TokenTable, rank: int, peak: Peak, measures: list[Measure], rows: set[int]) -> str:
    row, position, share = peak
    where = f"{row + 1}, token {position + 1}"
    if row in rows:
        where = f"<a href=#t{row}-{position}>{where}</a>"
    cells = [
        str(rank),
        where,
        _context(table, row, position),
        "–" if np.isnan(share) else f"{share:.1%}",
        *(_value(m, getattr(table, m.field)[row, position]) for m in measures),
    ]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _context(table: TokenTable, row: int, position: int) -> str:
    texts = table.tokens[row]
    before = table.prompts[row] + "".join(islice(texts, position))
    after = "".join(islice(texts, position + 1, None))
    left, right = (plain(part.replace("\n", "↵")) for part in (before[-BEFORE:], after[:AFTER]))
    return f"<q><span>{left}</span><mark>{plain(_printable(texts[position]))}</mark>{right}</q>"
