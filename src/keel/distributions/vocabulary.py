"""The distribution of the next token: hidden states and a head, never the logits of a whole batch.

A rollout keeps the hidden states that its tokens were drawn from, `[R, L, H]`. Logits over a
vocabulary of 150,000 would be a thousand times that; they are made again, a few tokens at a time,
wherever a log-prob, an entropy or a KL is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from keel.errors import InputError
from keel.functional import vocabulary_kl, vocabulary_log_prob
from keel.functional.vocabulary import MAX_ELEMENTS, TokenComparison, vocabulary_comparison
from keel.types import Tree

HIDDEN, HEAD = "hidden", "head"


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """One of `n` tokens. Parameters are `hidden` `[*lead, H]` and `head` `[n, H]`."""

    n: int
    width: int
    """H"""
    max_elements: int = MAX_ELEMENTS
    exact: bool = True
    exact_entropy: bool = True

    @property
    def outputs(self) -> int:
        """The width of a hidden state."""
        return self.width

    def params(self, output: Tensor, mask: Tensor | None, temperature: float | Tensor) -> Tree:
        """Hidden states; a temperature divides the logits, and so it may divide them."""
        return {HIDDEN: output / temperature}

    def log_prob(self, params: Tree, action: Tensor) -> Tensor:
        """Of tokens `[*lead]`."""
        return self.both(params, action)[0]

    def entropy(self, params: Tree) -> Tensor:
        """Over the whole vocabulary."""
        hidden = params[HIDDEN]
        anything = hidden.new_zeros(hidden.shape[:-1]).long()
        return self.both(params, anything)[1]

    def both(self, params: Tree, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy in one pass over the vocabulary."""
        found = vocabulary_log_prob(
            params[HIDDEN], params[HEAD], action.long(), max_elements=self.max_elements
        )
        return found.log_prob, found.entropy

    def kl(self, p: Tree, q: Tree) -> Tensor:
        """Exact, over the whole vocabulary."""
        return vocabulary_kl(p[HIDDEN], p[HEAD], q[HIDDEN], q[HEAD], max_elements=self.max_elements)

    def compare(self, p: Tree, q: Tree, action: Tensor) -> TokenComparison:
        """Both KLs, and the log-prob and entropy of q, in one pass over the vocabulary; without
        gradients."""
        sides = p[HIDDEN], p[HEAD], q[HIDDEN], q[HEAD]
        return vocabulary_comparison(*sides, action.long(), max_elements=self.max_elements)

    def fisher(self, params: Tree, tangent: Tree) -> Tree:
        """Not needed by any first-order region; a natural step would need it."""
        raise InputError("a vocabulary: TRPO steps are not offered for tokens; use PPO or GRPO")
