"""Lines of `metrics.jsonl` that are not as they were written: how they are noticed, and told.

A checksum ends every line, so that one changed digit is noticed:
{"step":2048,"train/kl_exact":0.01} becomes {"step":2048,"train/kl_exact":0.01,"crc":"ab54d286"},
the CRC-32 of the line as it was without it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

NAMED = 5
"""Lines that are named one by one."""
KEY = "crc"
_START = f',"{KEY}":"'.encode()
_END = re.compile(rb'"[0-9a-f]{8}"\}$')
_LENGTH = len(_START) + 8 + len(b'"}')


def add_checksum(line: bytes) -> bytes:
    """Return a line of JSON, `{…}` without a newline, with its checksum as the last entry."""
    return line[:-1] + _START + b'%08x"}' % zlib.crc32(line)


def has_checksum(line: bytes) -> bool:
    """Return whether a line ends in a checksum, damaged or not; lines of an older Keel do not."""
    return line[-_LENGTH:].startswith(_START) or _END.search(line) is not None


def fits_checksum(line: bytes) -> bool:
    """Return whether a line is as it was when its checksum was added."""
    return has_checksum(line) and add_checksum(line[:-_LENGTH] + b"}") == line


def damaged_lines(lines: list[bytes]) -> set[int]:
    """Return the indices of lines that do not fit their checksum.

    Lines before the first checksum were written by an older Keel; after it, every line has one.
    """
    first = next((i for i, line in enumerate(lines) if has_checksum(line)), len(lines))
    later = range(first, len(lines))
    return {i for i in later if lines[i].strip() and not fits_checksum(lines[i])}


def name_lines(lines: Sequence[int], more: int = 0) -> str:
    """Name some lines of a file, and how many more there are.

    Examples:
        >>> name_lines([4]), name_lines([4, 9, 12]), name_lines([4, 9], more=40)
        ('line 4', 'lines 4, 9 and 12', 'lines 4, 9 and 40 more')
    """
    hidden = more + len(lines[NAMED:])
    parts = [str(line) for line in lines[:NAMED]] + ([f"{hidden} more"] if hidden else [])
    if len(parts) == 1:
        return f"line {parts[0]}"
    return f"lines {', '.join(parts[:-1])} and {parts[-1]}"


def describe_lines(lines: Sequence[int], problem: str) -> list[str]:
    """Say how many lines were dropped, why and where; nothing if there are none.

    Examples:
        >>> describe_lines([4, 9], "that hold no step")
        ['2 lines that hold no step were dropped (lines 4 and 9)']
    """
    if not len(lines):
        return []
    is_single = len(lines) == 1
    count = "1 line" if is_single else f"{len(lines):,} lines"
    names = name_lines([int(line) for line in lines[: NAMED + 1]], max(0, len(lines) - NAMED - 1))
    return [f"{count} {problem} {'was' if is_single else 'were'} dropped ({names})"]


def describe_missing(lines: int) -> str:
    """Say how many lines are missing.

    Examples:
        >>> describe_missing(1), describe_missing(2)
        ('1 line is missing since the run ended', '2 lines are missing since the run ended')
    """
    return f"{lines:,} {'line is' if lines == 1 else 'lines are'} missing since the run ended"
