"""Add two numbers on paper: `add 478+95:` → `8+5+0=13,7+9+1=17,4+0+1=5#573`.

Digit by digit from the right, with the carry as third summand. Only what follows the marker is
verified: the policy may think in any way, or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from keel.apps.language.tasks.draws import check_lengths
from keel.apps.language.tasks.protocol import MARKER, Example, after_marker


@dataclass(frozen=True)
class Addition:
    """Sums of two numbers of `shortest … longest` digits, each length equally likely."""

    name: ClassVar[str] = "addition"
    stop: ClassVar[None] = None
    shortest: int = 2
    longest: int = 4

    def __post_init__(self) -> None:
        check_lengths(self.name, self.shortest, self.longest, 12)

    @property
    def max_new_tokens(self) -> int:
        step, last = len("9+9+1=19,"), self.longest + 1
        return step * self.longest + last + 1

    def example(self, rng: np.random.Generator) -> Example:
        """Draw two numbers."""
        left, right = (self._number(rng) for _ in range(2))
        answer = f"{scratchpad(left, right)}{MARKER}{left + right}"
        return Example(f"add {left}+{right}:", answer, {"left": left, "right": right})

    def verify(self, example: Example, completion: str) -> float:
        """1 if the sum stands behind the last marker."""
        total = example.data["left"] + example.data["right"]
        return float(after_marker(completion) == str(total))

    def _number(self, rng: np.random.Generator) -> int:
        digits = int(rng.integers(self.shortest, self.longest + 1))
        return int(rng.integers(10 ** (digits - 1), 10**digits))


def scratchpad(left: int, right: int) -> str:
    """The addition on paper: digit + digit + carry = sum, from the right.

    Examples:
        >>> scratchpad(95, 7)
        '5+7+0=12,9+0+1=10'
    """
    lines, carry = [], 0
    while left or right:
        left, x = divmod(left, 10)
        right, y = divmod(right, 10)
        lines.append(f"{x}+{y}+{carry}={x + y + carry}")
        carry = (x + y + carry) // 10
    return ",".join(lines)
