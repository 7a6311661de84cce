"""Networks for a choice among items: parcels of a map, replicas of a service.

Every item is scored by the same small network, which also sees what is true of all of them. So the
number of parameters does not grow with the number of items, and what was learned about one holds
for all: a map on which they lie otherwise is no new task. Items of which nothing is legal are left
out, which in a game that fills up is most of the work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from keel.networks.actor_critic import (
    FEATURES,
    MLP,
    Activation,
    Flatten,
    Outputs,
    Part,
    activation,
    orthogonal,
)
from keel.types import MASK, Tree

ITEMS, LEGAL = "items", "legal"
"""Keys of what a critic sees that looks at items, beside `FEATURES`."""


class Embedding(nn.Module):
    """Two layers over every item, which see the context as well, and the mean over items.

    Args:
        context: numbers C about the whole row.
        features: numbers F about each item.
        width: of both layers.
        act: non-linearity.
        generator: source of the initial weights.
    """

    def __init__(
        self,
        context: int,
        features: int,
        width: int,
        act: Activation,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.pooled = width + context
        """numbers that say what all items are like together"""
        self.act = activation(act)
        self.item = nn.Linear(features, width)
        self.context = nn.Linear(context, width, bias=False) if context else None
        self.second = nn.Linear(width, width)
        for layer in (self.item, self.context, self.second):
            if layer is not None:
                orthogonal(layer, math.sqrt(2.0), generator)

    def pure(
        self, params: Tree, prefix: str, context: Tensor, items: Tensor, row: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Embed items: `[M, width]`, and `[B, pooled]`, their mean beside the context.

        Args:
            params: parameters by name.
            prefix: of the names.
            context: `[B, C]`.
            items: `[M, F]`.
            row: `[M]`, the row of the context that each item belongs to.
        """
        h = _layer(params, f"{prefix}.item", items)
        if self.context is not None:
            # one product for all items of a row, not one for each
            context_part = linear(context, params[f"{prefix}.context.weight"])
            h = h + context_part.index_select(0, row)
        h = self.act(_layer(params, f"{prefix}.second", self.act(h)))
        total = h.new_zeros(len(context), h.shape[1]).index_add(0, row, h)
        count = torch.bincount(row, minlength=len(context)).clamp(min=1)
        return h, torch.cat([total / count[:, None], context], -1)


class Scorer(nn.Module):
    """An actor that scores items: `each` logits for every item, then `others` that belong to none.

    Args:
        embedding: of the items.
        each: logits per item.
        others: logits of actions without an item (to wait, say).
        act: non-linearity.
        generator: source of the initial weights.
    """

    def __init__(
        self,
        embedding: Embedding,
        each: int,
        others: int,
        act: Activation,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.act, self.embedding = activation(act), embedding
        width = embedding.second.out_features
        self.score = nn.Linear(width, each)
        orthogonal(self.score, 0.01, generator)
        self.other = None
        if others:
            sizes = (self.embedding.pooled, width, others)
            self.other = MLP(sizes, act, generator, last_gain=0.01)

    def pure(
        self, params: Tree, prefix: str, context: Tensor, items: Tensor, legal: Tensor | None
    ) -> Tensor:
        """Return logits `[B, items · each + others]`, item by item; 0 for items left out."""
        rows, index, chosen = _chosen(items, legal)
        h, pooled = self.embedding.pure(params, f"{prefix}.embedding", context, chosen, rows)
        zeros = h.new_zeros(items.shape[0] * items.shape[1], self.score.out_features)
        scores = _layer(params, f"{prefix}.score", h)
        logits = zeros.index_copy(0, index, scores).reshape(len(items), -1)
        if self.other is None:
            return logits
        return torch.cat([logits, self.other.pure(params, f"{prefix}.other", pooled)], -1)


class Pooled(nn.Module):
    """A critic of all items together.

    Args:
        embedding: of the items.
        outputs: numbers Q of the critic.
        act: non-linearity.
        generator: source of the initial weights.
    """

    def __init__(
        self, embedding: Embedding, outputs: int, act: Activation, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.embedding = embedding
        sizes = (embedding.pooled, embedding.second.out_features, outputs)
        self.last = MLP(sizes, act, generator, last_gain=1.0)

    def pure(
        self, params: Tree, prefix: str, context: Tensor, items: Tensor, legal: Tensor | None
    ) -> Tensor:
        """Run with other parameters."""
        rows, _, chosen = _chosen(items, legal)
        _, pooled = self.embedding.pure(params, f"{prefix}.embedding", context, chosen, rows)
        return self.last.pure(params, f"{prefix}.last", pooled)


def _layer(params: Tree, name: str, x: Tensor) -> Tensor:
    return linear(x, params[f"{name}.weight"], params[f"{name}.bias"])


def _chosen(items: Tensor, legal: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of legal items, their places among all, and their features `[M, F]`."""
    if legal is None:
        legal = torch.ones(items.shape[:2], dtype=torch.bool, device=items.device)
    index = legal.flatten().nonzero().squeeze(1)
    rows = torch.div(index, items.shape[1], rounding_mode="floor")
    return rows, index, items.flatten(0, 1).index_select(0, index)


class PointerActorCritic(nn.Module):
    """An actor that scores items, and a critic: of the same items, or of the state alone.

    A critic of the state alone is many times cheaper. How many items are looked at depends on the
    masks: shapes that differ from call to call can be neither compiled nor stacked, so `Agent`
    takes one agent after the other.

    Args:
        encoder: from observation trees to the context.
        key: of the matrix of items in the observation.
        shape: items and features of that matrix.
        actions: number of actions.
        hidden: widths of the hidden layers; the last is that of the embedding.
        act: non-linearity.
        values: outputs Q of the critic.
        generator: source of the initial weights.
        critic_encoder: of a critic that sees the state alone.
    """

    ragged = one_by_one = True
    """Shapes inside depend on the masks."""

    def __init__(
        self,
        encoder: Flatten,
        key: str,
        shape: tuple[int, int],
        actions: int,
        hidden: Sequence[int],
        act: Activation,
        values: int,
        generator: torch.Generator,
        critic_encoder: Flatten | None = None,
    ) -> None:
        super().__init__()
        (self.count, features), width = shape, hidden[-1]
        self.key, self.encoder = key, encoder
        self.each, others = divmod(actions, self.count)

        def embedding() -> Embedding:
            return Embedding(encoder.size, features, width, act, generator)

        self.actor = Scorer(embedding(), self.each, others, act, generator)
        self.critic_encoder = critic_encoder
        self.critic: Pooled | MLP
        if critic_encoder is None:
            self.critic = Pooled(embedding(), values, act, generator)
        else:
            self.critic = MLP((critic_encoder.size, *hidden, values), act, generator, last_gain=1.0)

    def forward(self, obs: Tree, part: Part = "both") -> Outputs:
        """Run actor and critic, or the part asked for."""
        return self.pure(dict(self.named_parameters()), obs, part)

    def pure(self, params: Tree, obs: Tree, part: Part = "both") -> Outputs:
        """Run with other parameters; `torch.func.functional_call` took a quarter of the time."""
        items = obs[self.key].float()
        lead = items.shape[:-2]
        inputs: tuple[Tensor, Tensor, Tensor | None] | None = None
        if part != "critic" or self.critic_encoder is None:
            context = items.new_zeros(math.prod(lead), 0)
            if self.encoder.size:
                context = self.encoder(obs).reshape(-1, self.encoder.size)
            inputs = context, items.reshape(-1, *items.shape[-2:]), self._legal(obs)
        policy = value = None
        if part != "critic":
            assert inputs is not None
            policy = self.actor.pure(params, "actor", *inputs).reshape(*lead, -1)
        if part != "actor":
            if isinstance(self.critic, MLP):
                assert self.critic_encoder is not None
                value = self.critic.pure(params, "critic", self.critic_encoder(obs))
            else:
                assert inputs is not None
                value = self.critic.pure(params, "critic", *inputs).reshape(*lead, -1)
        return Outputs(policy, value)

    def critic_view(self, params: Tree, obs: Tree) -> Tree:
        """Return the inputs of the critic, of rows `[B, …]`."""
        if self.critic_encoder is not None:
            return {FEATURES: self.critic_encoder(obs)}
        legal = self._legal(obs)
        inputs = {FEATURES: self.encoder(obs), ITEMS: obs[self.key].float()}
        return inputs if legal is None else inputs | {LEGAL: legal}

    def critic_outputs(self, own: Tree, inputs: Tree) -> Tensor:
        """Return outputs `[B, Q]` of the critic's own parameters, on a `critic_view`."""
        if isinstance(self.critic, MLP):
            return self.critic.pure(own, "critic", inputs[FEATURES])
        return self.critic.pure(own, "critic", inputs[FEATURES], inputs[ITEMS], inputs.get(LEGAL))

    def _legal(self, obs: Tree) -> Tensor | None:
        """Return bool `[B, items]`, true for items with any legal action."""
        mask = obs.get(MASK)
        if mask is None:
            return None
        flat = mask.bool().reshape(-1, mask.shape[-1])[:, : self.count * self.each]
        return flat.reshape(-1, self.count, self.each).any(-1)
