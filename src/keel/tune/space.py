"""Search spaces: a range, on a logarithmic scale or not, or a few choices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.config import parse_yaml
from keel.errors import InputError

Choices = tuple[Any, ...]


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; whole ones if both are."""

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        """True if the range holds whole numbers only."""
        return isinstance(self.low, int) and isinstance(self.high, int)


Space = Mapping[str, Range | Choices]

DEFAULT: Space = {
    "region.learning_rate": Range(1e-4, 3e-3, log=True),
    "region.epochs": (2, 4, 8),
    "region.minibatch": (64, 128, 256),
    "region.clip": (0.1, 0.2, 0.3),
    "advantage.gamma": (0.98, 0.99, 0.995),
    "advantage.lam": (0.9, 0.95, 0.98),
    "explore.entropy_coef": (0.0, 0.001, 0.01),
}
"""Settings that matter most for PPO."""


def read_space(definitions: Sequence[str]) -> Space:
    """Parse a search space.

    Args:
        definitions: `FIELD=LOW..HIGH`, `FIELD=LOW..HIGH:log` or `FIELD=A,B,C` each.
    """
    space: dict[str, Range | Choices] = {}
    for definition in definitions:
        name, equals, text = definition.partition("=")
        if not (name and equals and text):
            raise InputError(f"--search {definition}: expected FIELD=LOW..HIGH or FIELD=A,B,C")
        space[name.replace("-", "_")] = _range(definition, text) if ".." in text else _choices(text)
    return space


def _choices(text: str) -> Choices:
    return tuple(parse_yaml(part, f"--search {text}") for part in text.split(","))


def _range(definition: str, text: str) -> Range:
    ends, colon, scale = text.partition(":")
    low, high = (_number(definition, part) for part in ends.split("..", 1))
    if colon and scale != "log":
        raise InputError(f"--search {definition}: after ':' only log is known, got {scale!r}")
    if not low < high:
        raise InputError(f"--search {definition}: {low} is not below {high}")
    if colon and not low > 0:
        raise InputError(f"--search {definition}: a logarithmic range begins above 0")
    return Range(low, high, bool(colon))


def _number(definition: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"--search {definition}: {text!r} is no number")
    return int(text) if text.lstrip("-").isdigit() else number
