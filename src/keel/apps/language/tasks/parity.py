"""Is the number of ones odd? `parity 1011:` → `1101#1`: the parity so far, then the answer.

The short chain writes the parity after each bit; the long one each bit and the parity after it,
`1:1,0:1,1:0,1:1#1`, which is longer but needs no counting of positions. Without a chain a policy
can but guess, and is right half of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import xor
from typing import ClassVar, Literal

import numpy as np

from keel.apps.language.tasks.draws import check_lengths, draw_text
from keel.apps.language.tasks.protocol import MARKER, Example, after_marker
from keel.errors import check_choice

Chain = Literal["short", "long"]
CHAINS = ("short", "long")


@dataclass(frozen=True)
class Parity:
    """`chain` is what warm-up answers look like; the verifier takes any."""

    name: ClassVar[str] = "parity"
    stop: ClassVar[None] = None
    shortest: int = 6
    longest: int = 14
    chain: Chain = "short"

    def __post_init__(self) -> None:
        check_lengths(self.name, self.shortest, self.longest, 64)
        check_choice(f"{self.name}.chain", self.chain, CHAINS)

    @property
    def max_new_tokens(self) -> int:
        step = len("1") if self.chain == "short" else len("1:1,")
        return step * self.longest + len("#1") + 1

    def example(self, rng: np.random.Generator) -> Example:
        """Draw the bits."""
        bits = draw_text(rng, "01", self.shortest, self.longest)
        so_far = list(accumulate(map(int, bits), xor))
        if self.chain == "short":
            chain = "".join(map(str, so_far))
        else:
            chain = ",".join(f"{bit}:{odd}" for bit, odd in zip(bits, so_far, strict=True))
        return Example(f"parity {bits}:", f"{chain}{MARKER}{so_far[-1]}", {"bits": bits})

    def verify(self, example: Example, completion: str) -> float:
        """1 if the parity stands behind the last marker."""
        odd = example.data["bits"].count("1") % 2
        return float(after_marker(completion) == str(odd))
