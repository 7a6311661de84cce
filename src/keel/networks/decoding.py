"""Decoding: the hidden states of one more token, again and again, for rows of a causal LM.

The model's own forward runs, with its own KV cache, so every model of Hugging Face that keeps keys
and values is decoded, with or without adapters. A prompt is read once, its keys and values are then
repeated for its group, and finished rows are dropped from the cache.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from keel.errors import InputError, ShapeError, expect_same, expect_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Rows:
    """Where the rows of a decoder stand."""

    real: Tensor
    """`[B, capacity]` bool: False for the padding of the prompts, True for all that may follow"""
    length: Tensor
    """`[B]`: real tokens so far, which is the position of the next one"""
    filled: int
    """positions so far, padding included"""

    def at(self, rows: Tensor) -> Rows:
        """Those with these indices `[K]`."""
        return replace(self, real=self.real[rows], length=self.length[rows])

    def after(self, tokens: Tensor) -> Rows:
        """With one more token each, if there is room."""
        count, capacity = self.real.shape
        if not count:
            raise InputError("step: no row to go on with; prefill prompts first")
        if self.filled == capacity:
            raise InputError(
                f"capacity: all {capacity} positions are filled; prefill with room for more"
            )
        expect_shape("tokens", tokens, (count,), "one for every row")
        return replace(self, length=self.length + 1, filled=self.filled + 1)


NO_ROWS = Rows(torch.empty(0, 0, dtype=torch.bool), torch.empty(0, dtype=torch.int64), 0)


def prompt_rows(tokens: Tensor, attention: Tensor, capacity: int) -> Rows:
    """Rows that hold these prompts; raise unless they are padded on the left, and nowhere else."""
    if tokens.ndim != 2 or not tokens.numel():
        raise ShapeError(f"tokens: expected prompts [B, P], got shape {list(tokens.shape)}")
    expect_same("tokens", tuple(tokens.shape), attention=attention)
    count, width = tokens.shape
    if capacity < width:
        raise InputError(f"capacity: {capacity} positions cannot hold prompts of {width}")
    real = attention.bool()
    holes = (real[:, :-1] & ~real[:, 1:]).any(1) | ~real[:, -1]
    if holes.any():
        raise InputError(
            f"attention: prompt {int(holes.nonzero()[0, 0])} is padded after a token or has none; "
            "pad on the left only (tokenizer.padding_side = 'left')"
        )
    room = real.new_ones(count, capacity - width)
    return Rows(torch.cat([real, room], 1), real.sum(1), width)


def prompt_positions(rows: Rows) -> Tensor:
    """Of the tokens of prompts, `[B, P]`: 0 for the first real one, and for padding."""
    return (rows.real[:, : rows.filled].cumsum(1) - 1).clamp(min=0)


def repeated(rows: Rows, times: int) -> Tensor:
    """The indices of all rows, each `times` times."""
    if times < 1:
        raise InputError(f"times: expected at least 1, got {times}; `keep` drops rows")
    index = torch.arange(len(rows.length), device=rows.length.device)
    return index.repeat_interleave(times)


def check_index(rows: Tensor) -> None:
    """Raise unless these are indices."""
    if rows.ndim != 1 or rows.dtype != torch.int64:
        raise InputError(
            f"rows: expected indices [K] of int64, got {rows.dtype} of shape {list(rows.shape)}; "
            "of a mask, they are mask.nonzero()[:, 0]"
        )


class Decoder:
    """A copy of a model without its head (as `LlamaModel`, `GPT2Model`), and its KV cache.

    Every step adds one position to all rows.

    Args:
        model: its structure; its own parameters count only where `tree` has none.
        tree: parameters by the names of `model.named_parameters()`. They are copied.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaModel
        >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16,
        ...                      num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaModel(config)
        >>> decoder = Decoder(model, dict(model.named_parameters()))
        >>> prompts = torch.tensor([[0, 5], [3, 4]])
        >>> hidden_state = decoder.prefill(prompts, prompts > 0, capacity=4)
        >>> decoder.expand(2)
        >>> decoder.step(torch.tensor([1, 2, 3, 4])).shape
        torch.Size([4, 16])
    """

    def __init__(self, model: PreTrainedModel, tree: Mapping[str, Tensor]) -> None:
        check_backbone(model)
        check_tree(dict(model.named_parameters()), tree, type(model).__name__)
        self._model = loaded(model, tree)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._rows = NO_ROWS
        self._kv_cache: Any = None

    @torch.no_grad()
    def prefill(self, tokens: Tensor, attention: Tensor, capacity: int) -> Tensor:
        """Begin with prompts; what was decoded before is forgotten.

        Args:
            tokens: `[B, P]` int64, padded on the left.
            attention: `[B, P]` bool, False for padding.
            capacity: positions to make room for, P included.

        Returns:
            The hidden states `[B, H]`, after the last norm, of the last position.
        """
        check_positions(self._model, capacity)
        self._rows, self._kv_cache = prompt_rows(tokens, attention, capacity), None
        return self._run(tokens, prompt_positions(self._rows), self._rows.filled)

    @torch.no_grad()
    def expand(self, times: int) -> None:
        """Repeat every row `times` times, one after the other: a group shares its prompt's cache.

        Args:
            times: rows that come of each.
        """
        self._select(repeated(self._rows, times))

    @torch.no_grad()
    def keep(self, rows: Tensor) -> None:
        """Go on with some of the rows; finished ones are dropped.

        Args:
            rows: their indices, `[K]`.
        """
        check_index(rows)
        self._select(rows)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Add one token to every row; return its hidden states `[B, H]`, after the last norm.

        Args:
            tokens: `[B]`.
        """
        rows, after = self._rows, self._rows.after(tokens)
        hidden_state = self._run(tokens.unsqueeze(1), rows.length.unsqueeze(1), after.filled)
        self._rows = after
        return hidden_state

    def _run(self, tokens: Tensor, positions: Tensor, filled: int) -> Tensor:
        given = {"position_ids": positions} if self._takes_positions else {}
        output = self._model(
            input_ids=tokens,
            attention_mask=self._rows.real[:, :filled].long(),
            past_key_values=self._kv_cache,
            use_cache=True,
            **given,
        )
        self._kv_cache = output.past_key_values
        hidden_state: Tensor = output.last_hidden_state[:, -1]
        return hidden_state

    def _select(self, index: Tensor) -> None:
        if self._kv_cache is not None:
            self._kv_cache.reorder_cache(index)  # of any length; the one method all caches have
        self._rows = self._rows.at(index)


def loaded(model: PreTrainedModel, tree: Mapping[str, Tensor]) -> Any:
    """A copy of the model that holds copies of these parameters, without dropout."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(tree[name].detach().clone(), requires_grad=False)
        for name, parameter in model.named_parameters()
        if name in tree
    }
    copied: Any = copy.deepcopy(model, memo)
    return copied.eval()


def check_backbone(model: Any) -> None:
    """Raise unless it is a causal LM without its head, which keeps keys and values."""
    name = type(model).__name__
    if model.get_output_embeddings() is not None:
        raise InputError(f"model: {name} has a head; give what is below it, model.base_model")
    if model.config.is_encoder_decoder:
        raise InputError(f"model: {name} has an encoder; only causal LMs are decoded here")
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise InputError(
            f"model: the forward of {name} takes no past_key_values; only causal LMs that keep "
            "keys and values are decoded here"
        )


def check_tree(own: Mapping[str, Tensor], tree: Mapping[str, Tensor], name: str) -> None:
    """Raise unless every tensor of `tree` has its place among the model's own parameters."""
    for key, tensor in tree.items():
        if key not in own:
            raise InputError(
                f"tree: {name} has no parameter {key!r}; names are those of named_parameters()"
            )
        expect_shape(f"tree[{key!r}]", tensor, tuple(own[key].shape), f"that of {name}")


def check_positions(model: Any, capacity: int) -> None:
    """Raise if positions are looked up in a table that does not reach so far."""
    limit = getattr(model.config, "max_position_embeddings", None)
    words = model.get_input_embeddings()
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not words]
    if limit is not None and capacity > limit and any(m.num_embeddings >= limit for m in tables):
        raise InputError(
            f"capacity: {capacity} positions, but {type(model).__name__} knows {limit}; "
            "use shorter prompts or completions"
        )
