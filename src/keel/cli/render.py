"""Explanations on a terminal, or as plain text where there is none."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from keel.printing import printable
from keel.tracking.progress import PipedConsole

if TYPE_CHECKING:
    from keel.explain import Explanation, Table

NUMERIC = {"", *"0123456789−±∞–"}


def simple_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, left: Collection[int] = (0,)
) -> RichTable:
    """Return a table with titles; columns are right-aligned, except those of `left`."""
    table = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for position, column in enumerate(columns):
        table.add_column(
            printable(column), justify="left" if position in left else "right", overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    return table


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, left: Collection[int] = (0,)
) -> None:
    """Print such a table."""
    PipedConsole(highlight=False).print(simple_table(columns, rows, left=left))


def print_explanation(explanation: Explanation, picture: Path | None) -> None:
    """Print title, idea, formula, tables and meaning."""
    console = PipedConsole(highlight=False)
    console.print(Text(explanation.title, style="bold"))
    console.print()
    console.print(Text(explanation.idea))
    console.print()
    console.print(Padding(Text(explanation.formula, style="cyan"), (0, 4)))
    for table in explanation.tables:
        console.print()
        console.print(Text(table.title, style="dim"))
        console.print(_rich(table))
    console.print()
    console.print(Text(explanation.meaning, style="bold"))
    if picture is not None:
        console.print(Text(f"Picture: {picture}", style="dim"))


def _rich(table: Table) -> RichTable:
    result = RichTable(
        box=SIMPLE_HEAD,
        show_header=any(table.columns),
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column, cells in zip(table.columns, zip(*table.rows, strict=True), strict=True):
        numeric = all(cell[:1] in NUMERIC for cell in cells)
        result.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    for row in table.rows:
        result.add_row(*map(Text, row), style="green" if row[-1] == "right" else "")
    return result
