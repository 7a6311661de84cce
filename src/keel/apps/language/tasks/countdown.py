"""Make a target of given numbers: `make 26 from 3 5 7:` → `3*7+5`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from keel.apps.language.tasks.draws import check_whole
from keel.apps.language.tasks.expressions import evaluate, expressions
from keel.apps.language.tasks.protocol import Example
from keel.errors import InputError

MOST = 100
"""The largest target; the sum of the numbers never exceeds it, so there is always one."""


@dataclass(frozen=True)
class Countdown:
    """`count` numbers from 1 to `largest`, each to be used once, by `+`, `-`, `*` and parentheses.

    A target is one of the values from 1 to 100 that can be made, all equally likely; the answer is
    one of the ways to make it.
    """

    name: ClassVar[str] = "countdown"
    stop: ClassVar[None] = None
    count: int = 3
    largest: int = 12

    def __post_init__(self) -> None:
        check_whole(f"{self.name}.count", self.count, 2, 4)
        check_whole(f"{self.name}.largest", self.largest, 1, MOST // self.count)

    @property
    def max_new_tokens(self) -> int:
        digits, brackets = len(str(self.largest)), 2 * (self.count - 1)
        return self.count * digits + self.count - 1 + brackets + 1

    def example(self, rng: np.random.Generator) -> Example:
        """Draw numbers, a target that can be reached, and a way to reach it."""
        numbers = sorted(rng.integers(1, self.largest + 1, self.count).tolist())
        ways: dict[int, set[str]] = {}
        for expression in expressions(numbers):
            if 1 <= expression.value <= MOST:
                ways.setdefault(expression.value, set()).add(expression.text)
        target = sorted(ways)[rng.integers(len(ways))]
        texts = sorted(ways[target])
        answer = texts[rng.integers(len(texts))]
        prompt = f"make {target} from {' '.join(map(str, numbers))}:"
        return Example(prompt, answer, {"numbers": numbers, "target": target})

    def verify(self, example: Example, completion: str) -> float:
        """1 for an expression of that value in which every number occurs once."""
        try:
            value, numbers = evaluate(completion)
        except InputError:
            return 0.0
        right = sorted(numbers) == sorted(example.data["numbers"])
        return float(right and value == example.data["target"])
