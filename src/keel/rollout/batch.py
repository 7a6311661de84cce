"""A rollout as rows: what a region learns from and certifies on.

Rows are the first axis. A policy without memory takes every step as a row; one with memory, or a
language model, takes a whole sequence, so that nothing is ever shuffled inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.functional import Advantages
from keel.types import Rollout, Tree


@dataclass(frozen=True)
class Rows:
    """`[R, *rest]` tensors of a rollout; `rest` is `()`, `(A,)` for agents or `(L,)` for tokens."""

    obs: Tree
    behaviour: Tree
    action: Tensor
    log_prob: Tensor
    weight: Tensor
    group_axis: int | None

    @property
    def count(self) -> int:
        """R."""
        return self.weight.shape[0]


def rows_of(rollout: Rollout) -> Rows:
    """Steps of environments `[T, N, *rest]` as rows `[T·N, *rest]`, without a copy."""

    def flat(x: Tensor) -> Tensor:
        return x.reshape(-1, *x.shape[2:])

    axis = rollout.group_axis
    return Rows(
        obs={key: flat(x) for key, x in rollout.obs.items()},
        behaviour={key: flat(x) for key, x in rollout.behaviour.items()},
        action=flat(rollout.action),
        log_prob=flat(rollout.log_prob),
        weight=flat(rollout.weight),
        group_axis=None if axis is None else axis - 1,
    )


def take(tree: Tree, index: Tensor) -> Tree:
    """Some rows of every tensor."""
    return {key: x[index] for key, x in tree.items()}


def minibatches(
    rows: int, size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """A shuffled pass over all rows: pairs of row numbers `[size]` and 1/0 for real or padding.

    The remainder is used, not dropped: it is padded with row 0 at weight 0, so that a compiled step
    sees one shape only.
    """
    order = torch.randperm(rows, generator=generator)
    for start in range(0, rows, size):
        index = order[start : start + size]
        real = torch.ones(index.shape[0])
        missing = size - index.shape[0]
        if missing:
            index = torch.cat([index, index.new_zeros(missing)])
            real = torch.cat([real, real.new_zeros(missing)])
        yield index, real


Targets = Callable[[Tensor], Advantages]
"""Parameters `[G, P]` to advantages and targets `[R, *rest]`; called per update or per epoch."""
