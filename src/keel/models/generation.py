"""Whole completions at once, for small models of the Llama family on the CPU.

Nobody looks at a token before the last is written: so no tools, and every token of the vocabulary
may be drawn. For everything else there is a decoder, step by step (`keel.models.decoding`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from keel.models import compiled_pass
from keel.models.compiled_pass import Written
from keel.models.decoding import prompt_rows
from keel.models.decoding_lean import fits, is_plain, merge_adapters


@dataclass(frozen=True)
class Writer:
    """A backbone and its parameters, adapters merged."""

    model: Any
    parameters: Mapping[str, Tensor]

    def takes(self, head: Tensor) -> bool:
        """Whether all that a head `[V, ·]` says can be read again, and a bias is no part of it."""
        words = self.parameters["embed_tokens.weight"]
        return head.shape[1] == words.shape[1] and len(head) <= len(words)

    @torch.no_grad()
    def write(
        self,
        tokens: Tensor,
        attention: Tensor,
        head: Tensor,
        chances: Tensor,
        temperature: float,
        stop: int,
    ) -> Written:
        """Completions of prompts `[U, P]`, padded at the left.

        Args:
            attention: bool `[U, P]`, False for padding.
            head: `[V, H]`.
            chances: `[U·group, T]` float64, uniform in [0, 1): T tokens at most, prompt by prompt.
            temperature: 0 takes the likeliest.
            stop: a row ends with this token.
        """
        prompt_rows(tokens, attention, tokens.shape[1])  # raises unless they are padded so
        rows = len(chances)
        members = torch.arange(len(tokens)).repeat_interleave(rows // len(tokens))
        words = self.parameters["embed_tokens.weight"].contiguous()
        scene = compiled_pass.scene_of(self.model, attention.bool(), members, chances.shape[1])
        return compiled_pass.generate(
            embedding(tokens.flatten(), words),
            compiled_pass.stacked(self.parameters, len(self.model.layers)),
            scene,
            (words, self.parameters["norm.weight"].contiguous(), head.contiguous()),
            chances,
            temperature,
            stop,
        )


@torch.no_grad()
def make_writer(model: Any, parameters: Mapping[str, Tensor]) -> Writer | None:
    """None unless compiled loops know the model; `parameters` by its own names, where they are not
    those that it holds."""
    if not is_plain(model):
        return None
    merged = merge_adapters(model, {**dict(model.named_parameters()), **parameters})
    if merged is None or not fits(model, merged):
        return None
    merged = {name: value.detach() for name, value in merged.items()}
    if not compiled_pass.is_for_loops(merged["norm.weight"]):
        return None
    return Writer(model, merged)
