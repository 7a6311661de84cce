"""Sentences about what a reader had to leave out, and where it stood."""

from __future__ import annotations

from collections.abc import Sequence

NAMED = 5
"""Lines that are named one by one."""


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
