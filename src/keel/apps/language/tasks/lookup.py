"""Look something up: `value of ab:` → `<search>ab</search><result>xy</result>xy`.

Every example has a table of its own, which the policy never sees. The answer is drawn apart from
all that stands in the prompt: it can only come from the tool, or from luck of a known size.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from keel.apps.language.tasks.draws import check_whole
from keel.apps.language.tasks.protocol import RESULT, RESULT_END, SEARCH, SEARCH_END, Example

NOT_FOUND = "?"
MOST_HOPS = 4
"""Well within the calls that a `ToolLoop` allows."""


@dataclass(frozen=True)
class Lookup:
    """`facts` names with a value each, names being `letters` letters long.

    With `hops` = 2 the question is for the value of the value, `value of value of ab:`, and needs
    two calls, the second of which is written from the first result.
    """

    name: ClassVar[str] = "lookup"
    stop: ClassVar[str] = SEARCH_END
    facts: int = 8
    hops: int = 1
    letters: int = 2

    def __post_init__(self) -> None:
        check_whole(f"{self.name}.letters", self.letters, 1, 4)
        check_whole(f"{self.name}.facts", self.facts, 1, min(self.names, 1000))
        check_whole(f"{self.name}.hops", self.hops, 1, min(self.facts, MOST_HOPS))

    @property
    def names(self) -> int:
        """Number of names there are."""
        return int(len(string.ascii_lowercase) ** self.letters)

    @property
    def guess(self) -> float:
        """Share of answers that are right without a call, at best."""
        return 1.0 / self.names

    @property
    def max_new_tokens(self) -> int:
        """Room for one call more than is needed."""
        call = 2 * self.letters + 4
        return (self.hops + 1) * call + self.letters + 1

    def example(self, rng: np.random.Generator) -> Example:
        """Draw a table; the first of its names lead from the question to the answer."""
        keys = [self._name(i) for i in rng.choice(self.names, self.facts, replace=False)]
        values = [self._name(i) for i in rng.integers(0, self.names, self.facts)]
        facts = dict(zip(keys, values, strict=True))
        facts |= dict(pairwise(keys[: self.hops]))
        data = {"facts": dict(sorted(facts.items())), "key": keys[0], "hops": self.hops}
        prompt = "value of " * self.hops + f"{keys[0]}:"
        return Example(prompt, _perfect(data), data)

    def verify(self, example: Example, completion: str) -> float:
        """1 if the answer, and nothing else, follows the last result (or stands alone)."""
        answer = completion.rpartition(RESULT_END)[2]
        return float(answer == _chain(example.data)[-1])

    def tool(self, example: Example, call: str) -> str:
        """The value of a name, or a question mark."""
        return str(example.data["facts"].get(call, NOT_FOUND))

    def _name(self, index: int) -> str:
        letters = string.ascii_lowercase
        digits = (index // len(letters) ** place % len(letters) for place in range(self.letters))
        return "".join(letters[digit] for digit in digits)


def _chain(data: Mapping[str, Any]) -> list[str]:
    """The name asked for, its value, and so on to the answer."""
    chain = [data["key"]]
    for _ in range(data["hops"]):
        chain.append(data["facts"][chain[-1]])
    return chain


def _perfect(data: Mapping[str, Any]) -> str:
    chain = _chain(data)
    calls = (f"{SEARCH}{x}{SEARCH_END}{RESULT}{y}{RESULT_END}" for x, y in pairwise(chain))
    return "".join(calls) + chain[-1]
