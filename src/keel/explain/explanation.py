"""Parts of an explanation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from keel.data import read_beside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NATS_PER_BIT = math.log(2.0)


@dataclass(frozen=True)
class Table:
    """A small table of text; the first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Explanation:
    """The idea, the formula, the numbers for the values given, and a picture of them."""

    title: str
    idea: str
    formula: str
    tables: tuple[Table, ...]
    meaning: str
    numbers: Mapping[str, object]
    draw: Callable[[Figure], None]


class Texts(NamedTuple):
    """What an explanation says whatever the numbers are."""

    idea: str
    formula: str


@cache
def texts_of(topic: str) -> Texts:
    """Return the idea and the formula of a topic, as `texts.yaml` has them."""
    return Texts(**read_beside(__file__, "texts.yaml", dict[str, dict[str, str]])[topic])


def make_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str | float]], digits: int = 4
) -> Table:
    """Return a table of texts and numbers.

    Args:
        title: Title of the table.
        columns: Titles of the columns.
        rows: Cells of every row.
        digits: Digits of the numbers.
    """
    cells = (tuple(x if isinstance(x, str) else number(x, digits) for x in row) for row in rows)
    return Table(title, tuple(columns), tuple(cells))


def number(x: float, digits: int = 5) -> str:
    """Format a number for people: ∞ as such, no exponent where none is needed."""
    if math.isnan(x):
        return "–"
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    size = abs(x)
    if size != 0.0 and (size < 10.0 ** (1 - digits) or size >= 1e7):
        return f"{x:.{max(digits - 3, 1)}e}".replace("-", "−")
    return f"{x:.{digits}f}".replace("-", "−")


def bits(nats: float) -> float:
    """Convert nats to bits."""
    return nats / NATS_PER_BIT


def nats_table(title: str, *rows: tuple[str, float], first: str = "") -> Table:
    """Return a table of numbers in nats and in bits; `first` is the title of their names."""
    cells = ((name, nats, bits(nats)) for name, nats in rows)
    return make_table(title, (first, "nats", "bits"), cells, digits=5)
