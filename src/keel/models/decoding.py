"""Decoding: the hidden states of one more token, again and again, for rows of a causal LM.

`make_decoder` takes the backbone of a model, without its head, and gives one of two decoders:

* `LeanDecoder` for the Llama family in its plain form (Llama, Mistral without a window, Qwen 2 and
  3, with or without LoRA). A step runs none of Hugging Face's code, and of a small model on the
  CPU it takes less than half the time;
* `GenericDecoder` for everything else: the model's own forward with its own cache.

Both give the numbers of the model's forward over the whole sequence.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keel.errors import InputError, ShapeError
from keel.functional._shapes import expect_same, expect_shape
from keel.models.decoding_lean import (
    Angles,
    Lean,
    by_loops,
    layer_arrays,
    lean,
    new_cache,
    prompt_mask,
)
from keel.models.parallel import parallel_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS_ABREAST = 16
"""From here on the rows of a step are shared among threads; below, waking them takes longer."""


class Decoder(Protocol):
    """Keeps keys and values of rows; every step adds one position to all rows."""

    def prefill(self, tokens: Tensor, attention: Tensor, capacity: int) -> Tensor:
        """Begin with prompts; what was decoded before is forgotten.

        Args:
            tokens: `[B, P]` int64, padded on the left.
            attention: `[B, P]` bool, False for padding.
            capacity: positions to make room for, P included.

        Returns:
            The hidden states `[B, H]`, after the last norm, of the last position.
        """

    def expand(self, times: int) -> None:
        """Every row `times` times, one after the other: a prompt is read once for its group."""

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, indices `[K]`; finished ones are dropped."""

    def step(self, tokens: Tensor) -> Tensor:
        """One more token `[B]` for every row; its hidden states `[B, H]`, after the last norm."""


def make_decoder(model: PreTrainedModel, tree: Mapping[str, Tensor]) -> Decoder:
    """The fastest decoder there is for a model without its head (as `LlamaModel`, `GPT2Model`).

    Args:
        model: its structure; its own parameters count only where `tree` has none.
        tree: parameters by the names of `model.named_parameters()`. They are copied.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaModel
        >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16,
        ...                      num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaModel(config)
        >>> decoder = make_decoder(model, dict(model.named_parameters()))
        >>> prompts = torch.tensor([[0, 5], [3, 4]])
        >>> hidden = decoder.prefill(prompts, prompts > 0, capacity=4)
        >>> decoder.expand(2)
        >>> decoder.step(torch.tensor([1, 2, 3, 4])).shape
        torch.Size([4, 16])
    """
    check_backbone(model)
    own = dict(model.named_parameters())
    check_tree(own, tree, type(model).__name__)
    with torch.no_grad():
        weights = lean(model, {**own, **tree})
    return LeanDecoder(weights) if weights is not None else GenericDecoder(model, tree)


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


class LeanDecoder:
    """For the Llama family: the layers of `keel.models.decoding_lean`, and a cache beside them."""

    def __init__(self, weights: Lean) -> None:
        self._weights = weights
        self._loop: Any = None
        if by_loops(weights):
            from keel.models import decoding_loops  # numba is a second, which others need not pay

            self._loop = decoding_loops.layer
            self._arrays = layer_arrays(weights)
        self._rows = NO_ROWS
        self._cache: list[Tensor] = []
        """keys and values of every layer, `[B, 2, KV, capacity, D]`"""
        self._angles: Angles = (torch.empty(0), torch.empty(0))
        self._penalty = torch.empty(0)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, attention: Tensor, capacity: int) -> Tensor:
        """See `Decoder`."""
        weights = self._weights
        self._rows = prompt_rows(tokens, attention, capacity)
        self._angles = weights.angles(capacity)
        self._penalty = weights.penalty(self._rows.real)
        self._cache = []
        positions = prompt_positions(self._rows).flatten()
        angles = self._angles[0][positions], self._angles[1][positions]
        mask = None if attention.all() else prompt_mask(attention)
        x = F.embedding(tokens.flatten(), weights.embedding)
        for layer in weights.layers:
            qkv = weights.heads(layer, x, angles)
            qkv = qkv.view(*tokens.shape, *qkv.shape[1:])
            self._cache.append(new_cache(qkv[:, :, :, -2:], capacity))
            weights.finish(layer, x, weights.read(qkv, mask))
        return weights.normalise(x.view(*tokens.shape, -1)[:, -1], weights.norm)

    @torch.no_grad()
    def expand(self, times: int) -> None:
        """See `Decoder`."""
        self._select(repeated(self._rows, times))

    @torch.no_grad()
    def keep(self, rows: Tensor) -> None:
        """See `Decoder`."""
        check_index(rows)
        self._select(rows)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder`."""
        rows, after = self._rows, self._rows.after(tokens)
        x = F.embedding(tokens, self._weights.embedding)
        if self._loop is not None:
            self._by_loops(x, rows)
        else:
            self._by_torch(x, rows)
        self._rows = after
        return self._weights.normalise(x, self._weights.norm)

    def _by_torch(self, x: Tensor, rows: Rows) -> None:
        weights, at = self._weights, rows.filled
        angles = self._angles[0][rows.length], self._angles[1][rows.length]
        for layer, cache in zip(weights.layers, self._cache, strict=True):
            qkv = weights.heads(layer, x, angles)
            weights.finish(layer, x, weights.attend(qkv, cache, at, self._penalty))

    def _by_loops(self, x: Tensor, rows: Rows) -> None:
        starts = (rows.filled - rows.length).numpy()
        angles = self._angles[0].numpy(), self._angles[1].numpy()
        dials = self._weights.scale, self._weights.epsilon
        everything, caches = x.numpy(), [cache.numpy() for cache in self._cache]

        def through(part: slice) -> None:
            for arrays, cache in zip(self._arrays, caches, strict=True):
                self._loop(
                    everything[part], *arrays, angles, cache[part], starts[part], rows.filled, dials
                )

        parallel_for(through, len(x), ROWS_ABREAST)

    def _select(self, index: Tensor) -> None:
        filled = self._rows.filled
        for i, cache in enumerate(self._cache):  # one by one: no more than a layer is there twice
            room = cache.new_empty(len(index), *cache.shape[1:])
            room[..., :filled, :] = cache[..., :filled, :].index_select(0, index)
            self._cache[i] = room
        self._rows = self._rows.at(index)
        self._penalty = self._weights.penalty(self._rows.real)


class GenericDecoder:
    """For any causal LM: a copy of the model with the parameters in it, and its own cache."""

    def __init__(self, model: PreTrainedModel, tree: Mapping[str, Tensor]) -> None:
        self._model = loaded(model, tree)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._rows = NO_ROWS
        self._cache: Any = None

    @torch.no_grad()
    def prefill(self, tokens: Tensor, attention: Tensor, capacity: int) -> Tensor:
        """See `Decoder`."""
        check_positions(self._model, capacity)
        self._rows, self._cache = prompt_rows(tokens, attention, capacity), None
        return self._run(tokens, prompt_positions(self._rows), self._rows.filled)

    @torch.no_grad()
    def expand(self, times: int) -> None:
        """See `Decoder`."""
        self._select(repeated(self._rows, times))

    @torch.no_grad()
    def keep(self, rows: Tensor) -> None:
        """See `Decoder`."""
        check_index(rows)
        self._select(rows)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder`."""
        rows, after = self._rows, self._rows.after(tokens)
        hidden = self._run(tokens.unsqueeze(1), rows.length.unsqueeze(1), after.filled)
        self._rows = after
        return hidden

    def _run(self, tokens: Tensor, positions: Tensor, filled: int) -> Tensor:
        given = {"position_ids": positions} if self._takes_positions else {}
        output = self._model(
            input_ids=tokens,
            attention_mask=self._rows.real[:, :filled].long(),
            past_key_values=self._cache,
            use_cache=True,
            **given,
        )
        self._cache = output.past_key_values
        hidden: Tensor = output.last_hidden_state[:, -1]
        return hidden

    def _select(self, index: Tensor) -> None:
        if self._cache is not None:
            self._cache.reorder_cache(index)  # of any length; the one method that all caches have
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
