"""Helpers of several tasks: random strings, and checks of their options."""

from __future__ import annotations

from typing import Any

import numpy as np

from keel.errors import InputError


def draw_text(rng: np.random.Generator, characters: str, shortest: int, longest: int) -> str:
    """Draw a string of `shortest … longest` characters, all lengths and characters equally likely.

    Examples:
        >>> draw_text(np.random.default_rng(0), "ab", 3, 3)
        'bbb'
    """
    length = int(rng.integers(shortest, longest + 1))
    return "".join(characters[i] for i in rng.integers(0, len(characters), length))


def check_whole(where: str, value: Any, least: int, most: int) -> None:
    """Raise unless an option is a whole number from `least` to `most`."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not least <= value <= most:
        raise InputError(f"{where}: expected a whole number from {least} to {most}, got {value!r}")


def check_lengths(task: str, shortest: Any, longest: Any, most: int) -> None:
    """Raise unless 1 ≤ `shortest` ≤ `longest` ≤ `most`."""
    check_whole(f"{task}.longest", longest, 1, most)
    check_whole(f"{task}.shortest", shortest, 1, longest)
