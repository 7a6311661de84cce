"""Columns of numbers from a CSV file of any size, read block by block.

A block of plain numbers becomes one JSON array, which msgspec decodes several times faster than
`csv` splits lines and `float` reads their cells. Blocks that hold anything else (quotes, words,
lines of another length) take the slow way, line by line.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from keel.errors import RunError
from keel.tracking.integrity import describe_lines

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

BLOCK = 1 << 18
LONGEST = 16 << 20
"""Bytes of a line, or of a cell with line breaks in it, that are held in memory."""
COMMA, NEWLINE, ZERO = b",\n0"
BOM = b"\xef\xbb\xbf"


class Columns(NamedTuple):
    """The chosen columns of a CSV file."""

    values: dict[str, Values]
    """`[rows]` each, by name; NaN where a cell holds no number"""
    lines: NDArray[np.int64]
    """`[rows]`: the line of the file that each row stands on"""
    comment: str
    """the first line, if it begins with #"""
    damage: list[str]
    """Lines that were dropped."""


class _Block(NamedTuple):
    """Whole lines of a file."""

    data: bytes
    line: int
    """number of the first of them, from 1"""


@dataclass
class _Dropped:
    """Line numbers, by what is wrong with them."""

    fields: list[int] = field(default_factory=list)
    unreadable: list[int] = field(default_factory=list)
    long: list[int] = field(default_factory=list)
    foreign: list[int] = field(default_factory=list)

    def sentences(self) -> list[str]:
        sentences = describe_lines(self.fields, "with another number of fields than the header")
        sentences += describe_lines(self.unreadable, "that are no CSV")
        sentences += describe_lines(self.long, f"of more than {LONGEST >> 20} MiB")
        if self.foreign:
            sentences.append(f"{len(self.foreign):,} lines are not UTF-8; the characters became �")
        return sentences


def read_columns(path: Path, choose: Callable[[list[str], str], Sequence[str]]) -> Columns:
    """Read some columns of a CSV file; a `RunError` if it cannot be read or has no row.

    Args:
        path: the file.
        choose: is called with the names in the header and the comment before it, and returns
            the names of the columns to read.
    """
    import numpy as np

    dropped = _Dropped()
    try:
        with path.open("rb") as file:
            comment, names, line = _header(path, file)
            chosen = list(dict.fromkeys(choose(names, comment)))
            positions = [len(names) - 1 - names[::-1].index(name) for name in chosen]
            parts: list[Values] = []
            numbers: list[NDArray[np.int64]] = []
            for block in _blocks(file, line, dropped):
                values, lines = _parse(block, len(names), positions, dropped)
                parts.append(values)
                numbers.append(lines)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not sum(map(len, numbers)):
        raise RunError(f"{path}: no line of numbers in it")
    columns = {
        name: np.concatenate([part[:, i] for part in parts]) for i, name in enumerate(chosen)
    }
    return Columns(columns, np.concatenate(numbers), comment, dropped.sentences())


def _header(path: Path, file: BinaryIO) -> tuple[str, list[str], int]:
    """Return the comment, the names of the columns, and the number of the line after them."""
    comment, number = "", 1
    line = file.readline(LONGEST).removeprefix(BOM)
    if line.startswith(b"#"):
        comment, number = line.decode(errors="replace"), 2
        line = file.readline(LONGEST)
    try:
        names = next(csv.reader([line.decode(errors="replace")]), [])
    except csv.Error as error:
        raise RunError(f"{path}: its header cannot be read: {error}") from error
    if not names:
        raise RunError(f"{path}: no line of numbers in it")
    return comment, names, number + 1


def _blocks(file: BinaryIO, line: int, dropped: _Dropped) -> Iterator[_Block]:
    """Cut the file into whole lines; a cell in quotes may go over several of them."""
    while data := file.read(BLOCK) + file.readline(LONGEST):
        data += _rest_of_cell(file, data)
        if not data.endswith(b"\n") and len(data) > LONGEST:
            end = data.rfind(b"\n") + 1
            data, line_after = data[:end], line + data.count(b"\n")
            dropped.long.append(line_after)
            _skip_line(file)
            yield _Block(data, line)
            line = line_after + 1
            continue
        yield _Block(data, line)
        line += data.count(b"\n")


def _rest_of_cell(file: BinaryIO, data: bytes) -> bytes:
    """Read on to the line in which a cell in quotes ends, if one is open at the end of `data`."""
    lines: list[bytes] = []
    quotes, size = data.count(b'"'), len(data)
    while quotes % 2 and size <= LONGEST and (line := file.readline(LONGEST)):
        lines.append(line)
        quotes, size = quotes + line.count(b'"'), size + len(line)
    return b"".join(lines)


def _skip_line(file: BinaryIO) -> None:
    while (part := file.readline(BLOCK)) and not part.endswith(b"\n"):
        pass


def _parse(
    block: _Block, width: int, positions: list[int], dropped: _Dropped
) -> tuple[Values, NDArray[np.int64]]:
    """Return the rows of a block, `[rows, len(places)]`, and the lines they stand on."""
    import numpy as np

    cells = _plain_numbers(block.data, width)
    if cells is not None:
        return cells[:, positions], np.arange(block.line, block.line + len(cells))
    rows, lines = [], []
    for line, row in _rows(block, dropped):
        if len(row) == width:
            rows.append([_number(row[position]) for position in positions])
            lines.append(line)
        elif row:  # an empty line is none
            dropped.fields.append(line)
    values = np.array(rows, dtype=np.float64).reshape(len(rows), len(positions))
    return values, np.array(lines, dtype=np.int64)


def _plain_numbers(data: bytes, width: int) -> Values | None:
    """Return all cells of a block, `[rows, width]`; None if it holds anything but numbers."""
    import msgspec
    import numpy as np

    if b'"' in data:
        return None
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    if not data.endswith(b"\n"):
        data += b"\n"
    text = np.frombuffer(data, np.uint8)
    is_end = (text == COMMA) | (text == NEWLINE)
    ends = np.flatnonzero(is_end)  # one for every cell
    if len(ends) % width or not _is_table(text[ends].reshape(-1, width)):
        return None
    empty = np.flatnonzero(is_end & np.append(True, is_end[:-1]))
    if empty.size:  # a number for msgspec to read, which is none afterwards
        data = np.insert(text, empty, ZERO).tobytes()
    flat = b"[" + data[:-1].replace(b"\n", b",") + b"]"
    try:
        cells = msgspec.json.decode(flat, type=list[float])
        values = np.fromiter(cells, dtype=np.float64, count=len(ends))
    except msgspec.MsgspecError:
        numbers = _numbers_and_nan(flat)
        if numbers is None:
            return None
        values = numbers
    values[np.searchsorted(ends, empty)] = np.nan
    return values.reshape(-1, width)


def _numbers_and_nan(flat: bytes) -> Values | None:
    """Return all cells of a JSON array with numbers and `nan`; None if there are other words."""
    import msgspec
    import numpy as np

    try:
        cells = msgspec.json.decode(flat.replace(b"nan", b"null"), type=list[float | None])
    except msgspec.MsgspecError:
        return None
    return np.array(cells, dtype=np.float64)


def _is_table(ends: NDArray[np.uint8]) -> bool:
    """Return whether every row of `[rows, width]` delimiters ends with its only newline."""
    return bool((ends[:, -1] == NEWLINE).all() and (ends[:, :-1] == COMMA).all())


def _rows(block: _Block, dropped: _Dropped) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of every row that is CSV."""
    text = block.data.decode(errors="replace")
    if "\ufffd" in text:
        lines = text.split("\n")
        dropped.foreign += [block.line + i for i, x in enumerate(lines) if "\ufffd" in x]
    reader = csv.reader(io.StringIO(text, newline=""))
    old_limit = csv.field_size_limit(LONGEST)
    try:
        while True:
            line = block.line + reader.line_num
            try:
                yield line, next(reader)
            except StopIteration:
                return
            except csv.Error:
                dropped.unreadable.append(line)
    finally:
        csv.field_size_limit(old_limit)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
