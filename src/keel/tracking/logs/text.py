"""Lines of a text of any size, and the numbers in them; nothing in a text is ever executed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from keel.errors import RunError

LONGEST = 1 << 20
"""Bytes of a line that is read; longer ones are passed over."""
DEEPEST = 8
"""Mappings in mappings that are read."""
MOST_VALUES = 4_000
"""Values of one row."""
_BLOCK = 1 << 18
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_RAY = re.compile(r"^\((?:[\w.<>:-]+ )?pid=\d+(?:, ip=[^)\s]*)?\)(?: \[repeated [^\]]*\])? ?")
NUMBER = (
    r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|nan|NaN|inf(?:inity)?|Infinity)"
)
_PLAIN = re.compile(NUMBER)
_WRAPPED = re.compile(rf"(?:\w{{1,20}}\.)?\w{{1,20}}\(({NUMBER})(?:,[\w.=' :]{{0,60}}){{0,6}}\)")
_LONGEST_NUMBER = 200


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text, without colors and the name of the process that Ray prints before.

    What a progress bar writes over itself is lines of its own. A `RunError` where the file cannot
    be read.

    Args:
        path: The text.
    """
    for line in _whole_lines(path):
        text = line.decode("utf-8", "replace")
        for part in text.split("\r") if "\r" in text else (text,):
            clean = _ANSI.sub("", part) if "\x1b" in part else part
            yield _RAY.sub("", clean) if "pid=" in clean[:200] else clean


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Yield lines of at most `LONGEST` bytes; the rest of a longer one is passed over."""
    try:
        with path.open("rb", buffering=_BLOCK) as file:
            while line := file.readline(LONGEST):
                if not line.endswith(b"\n") and len(line) >= LONGEST:
                    while (rest := file.readline(LONGEST)) and not rest.endswith(b"\n"):
                        pass
                    continue
                yield line.rstrip(b"\n")
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror or error}") from error


def number(text: str) -> float | None:
    """Return the number that a text is, also `np.float64(0.1)` and `tensor(0.1)`; None if none.

    Examples:
        >>> number("np.float64(0.25)"), number("nan"), number("-1e-3"), number("1_000")
        (0.25, nan, -0.001, None)
    """
    text = text.strip()
    if len(text) > _LONGEST_NUMBER:
        return None
    if _PLAIN.fullmatch(text):
        return float(text)
    match = _WRAPPED.fullmatch(text) if text.endswith(")") else None
    return float(match[1]) if match else None


def numbers(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a mapping, those of mappings in it under `a/b`; nothing else.

    `"global_step/max_steps": "2/4389"` is 2. What is no number is left out.
    """
    found: dict[str, float] = {}
    pending: list[tuple[str, Mapping[str, Any], int]] = [("", data, 0)]
    while pending and len(found) < MOST_VALUES:
        prefix, mapping, depth = pending.pop()
        for key, value in mapping.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping):
                if depth < DEEPEST and key != "config":
                    pending.append((f"{name}/", value, depth + 1))
            elif (known := _as_number(value)) is not None:
                found[name] = known
    return found


def _as_number(value: object) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if isinstance(value, str) and len(value) < 60:
        return _of_total(value) if "/" in value else number(value)
    return None


def _of_total(text: str) -> float | None:
    """Return the first number of `2/4389`."""
    done, _, total = text.partition("/")
    return float(done) if done.strip().isdecimal() and total.strip().isdecimal() else None


_KEY = re.compile(r"""\s*,?\s*(['"])((?:(?!\1)[^\\]){1,300})\1\s*:\s*""")
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_BARE = re.compile(r"[^,{}\[\]()'\"]{1,80}(?:\([^()]{0,120}\))?")
_START = re.compile(r"""\{\s*['"]""")


def python_mapping(line: str) -> dict[str, float] | None:
    """Return the numbers of the Python dictionary that a line holds; None if it holds none.

    The text is only looked through, key by key, and never evaluated. Of a line that was cut off,
    what stands before the cut counts.

    Args:
        line: As a trainer printed it, with anything before and after the dictionary.

    Examples:
        >>> python_mapping("INFO {'loss': 0.0, 'kl': nan, 'lr': '1e-06', 'n': np.float64(2.0)}")
        {'loss': 0.0, 'kl': nan, 'lr': 1e-06, 'n': 2.0}
    """
    start = _START.search(line)
    if start is None:
        return None
    found: dict[str, float] = {}
    at = start.start() + 1
    while len(found) < MOST_VALUES and (key := _KEY.match(line, at)):
        text, at = _value(line, key.end())
        if text is None:
            break
        known = _as_number(text)
        if known is not None:
            found[key[2]] = known
    return found or None


def _value(line: str, at: int) -> tuple[str | None, int]:
    """Return the text of a value, without quotes, and where it ends; None where it is cut off."""
    if line[at : at + 1] in "[{(" and at < len(line):
        return "", _after_brackets(line, at)
    match = _STRING.match(line, at)
    if match:
        return match[0][1:-1], match.end()
    match = _BARE.match(line, at)
    if match is None or match.end() == len(line):  # the rest of a number may be missing
        return None, at
    return match[0], match.end()


def _after_brackets(line: str, at: int) -> int:
    """Return the place after the bracket that closes the one at `at`."""
    depth = 0
    while at < len(line):
        if line[at] in "'\"":
            string = _STRING.match(line, at)
            if string is None:  # it is cut off
                return len(line)
            at = string.end()
            continue
        depth += (line[at] in "[{(") - (line[at] in ")}]")
        at += 1
        if depth == 0:
            break
    return at


def parts_of(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """Cut lines into lists of about `size` characters each."""
    part: list[str] = []
    length = 0
    for line in lines:
        part.append(line)
        length += len(line) + 1
        if length >= size:
            yield part
            part, length = [], 0
    if part:
        yield part
