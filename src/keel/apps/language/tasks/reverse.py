"""Write characters backwards: `reverse hc7ab:` → `ba7ch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from keel.apps.language.tasks.draws import check_lengths, draw_text
from keel.apps.language.tasks.protocol import Example
from keel.apps.language.tasks.sort import SYMBOLS


@dataclass(frozen=True)
class Reverse:
    """The last character first."""

    name: ClassVar[str] = "reverse"
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
        return Example(f"reverse {text}:", text[::-1], {"text": text})

    def verify(self, example: Example, completion: str) -> float:
        """1 for the whole string backwards, and nothing else."""
        return float(completion == example.data["text"][::-1])
