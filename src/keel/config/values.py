"""Values from outside: YAML text, small files, and how they are named in an error."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

import yaml

from keel.errors import InputError

MOST_BYTES = 1 << 20
"""Size up to which a file of settings is read: larger ones, and devices without end, are none."""

DEEPEST = 100
"""Levels of lists and mappings within each other; PyYAML takes minutes for thousands."""

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 80, 80, 40


def describe(value: Any) -> str:
    """Return a short `repr` on one line, however large or deeply nested the value is."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # whole numbers of more digits than Python writes out
        return f"a {type(value).__name__} that is too large to be shown"


class _Loader(yaml.SafeLoader):
    """Plain data, at most `DEEPEST` levels of it."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError("nested too deeply")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML as plain data.

    Args:
        text: The document.
        where: Its file or field, for the error message.

    Raises:
        InputError: In one line, for everything that PyYAML cannot read. Values that do not fit
            their type (`!!int abc`, `2020-99-99`) end in errors of many kinds, not only its own.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        reason = error.problem or error.context or "no reason given"
        raise InputError(f"{where}{line}: not plain YAML ({describe_reason(reason)})") from None
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise InputError(f"{where}: not plain YAML ({describe_reason(reason)})") from None


def describe_reason(reason: str) -> str:
    """Return the first line of another library's message, cut where it is long."""
    first = next(iter(reason.splitlines()), "")
    return first if len(first) <= 160 else f"{first[:157]}…"


def read_text(path: Path) -> str:
    """Read a small UTF-8 file, or say in one line why it cannot be."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # a name with a null character
        raise InputError(f"{describe(str(path))}: cannot be read ({error})") from None
    if len(data) > MOST_BYTES:
        raise InputError(f"{path}: larger than {MOST_BYTES >> 20} MiB, no file of settings")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 text (byte {data[error.start]:#04x} at position {error.start}); "
            "save it as UTF-8"
        ) from None
