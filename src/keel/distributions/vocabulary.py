"""The distribution of the next token: hidden states and a head, never the logits of a whole batch.

A rollout keeps the hidden states that its tokens were drawn from, `[R, L, H]`. Logits over a
vocabulary of 150,000 would be a thousand times that; they are made again, a few tokens at a time,
wherever a log-prob, an entropy or a KL is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from keel.distributions.actions import Dist
from keel.errors import InputError
from keel.functional.vocabulary import (
    MAX_ELEMENTS,
    TokenComparison,
    vocabulary_comparison,
    vocabulary_kl,
    vocabulary_log_prob,
)
from keel.types import Tree

HIDDEN, HEAD = "hidden", "head"


@dataclass(frozen=True, eq=False)
class Vocabulary(Dist):
    """Distribution over `n` tokens. Parameters are `hidden` `[*lead, H]` and `head` `[n, H]`."""

    n: int
    width: int
    """H"""
    max_elements: int = MAX_ELEMENTS
    exact: bool = True
    exact_entropy: bool = True
    constants: tuple[str, ...] = (HEAD,)

    @property
    def outputs(self) -> int:
        """Width of a hidden state."""
        return self.width

    def params(self, output: Tensor, mask: Tensor | None, temperature: float | Tensor) -> Tree:
        """Return the hidden states over the temperature, which divides the logits so."""
        return {HIDDEN: output / temperature}

    def log_prob(self, params: Tree, action: Tensor) -> Tensor:
        """Return log π of tokens `[*lead]`."""
        return self.both(params, action)[0]

    def entropy(self, params: Tree) -> Tensor:
        """Return the entropy over the whole vocabulary, `[*lead]`."""
        hidden = params[HIDDEN]
        anything = hidden.new_zeros(hidden.shape[:-1]).long()
        return self.both(params, anything)[1]

    def both(self, params: Tree, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy, `[*lead]` each, in one pass over the vocabulary."""
        tokens = vocabulary_log_prob(
            params[HIDDEN], params[HEAD], action.long(), max_elements=self.max_elements
        )
        return tokens.log_prob, tokens.entropy

    def kl(self, p: Tree, q: Tree) -> Tensor:
        """Return the exact KL(p‖q) over the whole vocabulary, `[*lead]`."""
        return vocabulary_kl(p[HIDDEN], p[HEAD], q[HIDDEN], q[HEAD], max_elements=self.max_elements)

    def compare(self, p: Tree, q: Tree, action: Tensor) -> TokenComparison:
        """Return both KLs, and log-prob and entropy of q, in one pass, without gradients."""
        sides = p[HIDDEN], p[HEAD], q[HIDDEN], q[HEAD]
        return vocabulary_comparison(*sides, action.long(), max_elements=self.max_elements)

    def fisher(self, params: Tree, tangent: Tree) -> Tree:
        """Raise an `InputError`: natural steps are not offered for tokens."""
        raise InputError("a vocabulary: TRPO steps are not offered for tokens; use PPO or GRPO")
