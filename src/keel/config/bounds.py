"""Bounds of numbers among the settings: written at the field, checked in one place.

A number without a bound at its field must not be negative.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import Meta

from keel.config.values import describe
from keel.errors import InputError

MOST = 2**63 - 1
"""The largest whole number that fits into 64 bits."""

NOT_NEGATIVE = Meta(ge=0)
ANY_NUMBER = Meta()
ABOVE_0 = Meta(gt=0)
AT_LEAST_1 = Meta(ge=1)
AT_LEAST_2 = Meta(ge=2)
SHARE = Meta(ge=0, le=1)
SHARE_ABOVE_0 = Meta(gt=0, le=1)
BETWEEN_0_AND_1 = Meta(gt=0, lt=1, description="a number between 0 and 1")
DECAY = Meta(gt=0, le=1, description="a factor up to 1")
GROWTH = Meta(ge=1, description="a factor of at least 1")
THREADS = Meta(ge=0, le=1024)
"""Beyond some thousands of threads, torch and the system fail at work."""


def check_numbers(config: Any) -> None:
    """Raise an `InputError` for a number that is not finite, or outside of its bounds.

    Args:
        config: A dataclass of settings, of environments or of tokens.
    """
    for name, value, bound in _numbers(config):
        if isinstance(value, int) and abs(value) > MOST:
            raise InputError(f"{name}: expected at most {MOST:,}, got {describe(value)}")
        if not math.isfinite(value):
            raise InputError(f"{name}: expected a finite number, got {value}")
        if expected := _missed(bound, value):
            raise InputError(f"{name}: expected {expected}")


def _missed(bound: Meta, value: float) -> str:
    """Return what a number should have been, and what it is; nothing where it is in its bounds."""
    low, high = bound.ge, bound.le
    if bound.gt is not None and value <= bound.gt:
        expected = f"a number above {bound.gt:g}"
    elif low is not None and value < low:
        expected = f"at least {low:g}" if low else "no negative number"
    elif high is not None and value > high:
        if high > 1:
            return f"at most {high:,}, got {value:,}"
        expected = "a number from 0 to 1"
    elif bound.lt is None or value < bound.lt:
        return ""
    return f"{bound.description or expected}, got {value}"


def _numbers(config: Any, prefix: str = "") -> Iterator[tuple[str, float, Meta]]:
    kind: Any = type(config)
    for name, bound in _bounds(kind).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{name}.")
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, int | float) and not isinstance(part, bool):
                yield f"{prefix}{name}", part, bound


@cache
def _bounds(kind: type) -> dict[str, Meta]:
    hints = typing.get_type_hints(kind, include_extras=True)
    metadata = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {
        name: next((x for x in marks if isinstance(x, Meta)), NOT_NEGATIVE)
        for name, marks in metadata.items()
    }
