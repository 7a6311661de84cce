"""Networks for a choice among items: parcels of a map, replicas of a service.

Every item is scored by the same small network, which also sees what is true of all of them. So the
number of parameters does not grow with the number of items, and what was learned about one holds
for all: a map on which they lie otherwise is no new task.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from keel.models.networks import Activation, activation, orthogonal


class Layout(NamedTuple):
    """A flat observation: `context` numbers, then `items` × `features`."""

    context: int
    items: int
    features: int

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[*lead, context]` and `[*lead, items, features]`."""
        items = x[..., self.context :].reshape(*x.shape[:-1], self.items, self.features)
        return x[..., : self.context], items


class Embedding(nn.Module):
    """Two layers over every item, which see the context as well; then all items together."""

    def __init__(
        self, layout: Layout, width: int, act: Activation, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.layout, self.width = layout, width
        self.act = activation(act)
        self.item = nn.Linear(layout.features, width)
        self.context = nn.Linear(layout.context, width, bias=False)
        self.second = nn.Linear(width, width)
        for layer in (self.item, self.context, self.second):
            orthogonal(layer, math.sqrt(2.0), generator)

    @property
    def pooled(self) -> int:
        """Numbers that say what all items are like together."""
        return 2 * self.width + self.layout.context

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[*lead, items, width]`, and `[*lead, pooled]`: mean, largest, and the context."""
        context, items = self.layout.split(x)
        # the context's part is one product for all items, not one for each
        h = self.act(self.item(items) + self.context(context)[..., None, :])
        h = self.act(self.second(h))
        return h, torch.cat([h.mean(-2), h.amax(-2), context], -1)


class Scorer(nn.Module):
    """Logits: `each` for every item, then `others` that belong to none (to wait, say)."""

    def __init__(
        self,
        layout: Layout,
        width: int,
        each: int,
        others: int,
        act: Activation,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.act = activation(act)
        self.embedding = Embedding(layout, width, act, generator)
        self.score = nn.Linear(width, each)
        self.pool = nn.Linear(self.embedding.pooled, width)
        self.other = nn.Linear(width, others)
        orthogonal(self.score, 0.01, generator)
        orthogonal(self.pool, math.sqrt(2.0), generator)
        orthogonal(self.other, 0.01, generator)

    def forward(self, x: Tensor) -> Tensor:
        """`[*lead, items · each + others]`, item by item."""
        items, pooled = self.embedding(x)
        other = self.other(self.act(self.pool(pooled)))
        return torch.cat([self.score(items).flatten(-2), other], -1)


class Pooled(nn.Module):
    """Numbers about all items together: a critic."""

    def __init__(
        self,
        layout: Layout,
        width: int,
        outputs: int,
        act: Activation,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.act = activation(act)
        self.embedding = Embedding(layout, width, act, generator)
        self.pool = nn.Linear(self.embedding.pooled, width)
        self.last = nn.Linear(width, outputs)
        orthogonal(self.pool, math.sqrt(2.0), generator)
        orthogonal(self.last, 1.0, generator)

    def forward(self, x: Tensor) -> Tensor:
        """`[*lead, outputs]`."""
        _, pooled = self.embedding(x)
        value: Tensor = self.last(self.act(self.pool(pooled)))
        return value
