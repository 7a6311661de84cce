"""Put characters in order: `sort hc7ab:` → `7abch`."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from keel.apps.language.tasks.draws import check_lengths, draw_text
from keel.apps.language.tasks.protocol import Example

SYMBOLS = string.digits + string.ascii_lowercase


@dataclass(frozen=True)
class Sort:
    """Digits before letters; what occurs twice is written twice."""

    name: ClassVar[str] = "sort"
    stop: ClassVar[None] = None
    shortest: int = 5
    longest: int = 8

    def __post_init__(self) -> None:
        check_lengths(self.name, self.shortest, self.longest, 64)

    @property
    def max_new_tokens(self) -> int:
        return self.longest + 1

    def example(self, rng: np.random.Generator) -> Example:
        """Draw the characters."""
        text = draw_text(rng, SYMBOLS, self.shortest, self.longest)
        return Example(f"sort {text}:", in_order(text), {"text": text})

    def verify(self, example: Example, completion: str) -> float:
        """1 for the right characters in the right order, and nothing else."""
        return float(completion == in_order(example.data["text"]))


def in_order(text: str) -> str:
    """Return the characters of a text, sorted."""
    return "".join(sorted(text))
