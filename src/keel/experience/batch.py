"""A rollout as rows: what a region learns from and certifies on.

Rows are the first axis. A policy without a hidden state takes every step as a row; a recurrent one,
or a language model, takes a whole sequence, so that nothing is ever shuffled inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from keel.types import Rollout, Tree

CHUNK = 4096
"""Steps evaluated at once: bounds the memory of a pass over a large rollout."""
CHUNK_PIXELS = 512


class DemoBatch(NamedTuple):
    """Demonstrated steps `[R, …]` that an update imitates, one beside every row of its rollout."""

    obs: Tree
    """as the network sees them"""
    action: Tensor
    """as the distribution takes it"""
    weight: Tensor
    """`[R]`: what −log π is multiplied by"""
    real: Tensor
    """`[R]`: 0 for padding, else 1; the loss is a mean over these"""

    def take(self, index: Tensor, real: Tensor) -> DemoBatch:
        """Return some rows; `real` is 0 for padding."""
        return DemoBatch(
            take(self.obs, index),
            take_rows(self.action, index),
            take_rows(self.weight, index) * real,
            take_rows(self.real, index) * real,
        )


class Sampled(NamedTuple):
    """Conditions of the sampling, where the update has others: the policy that acts next sees new
    statistics, or is hotter or colder."""

    obs: Tree
    """`[R, …]`: as the network saw them"""
    temperature: float


@dataclass(frozen=True)
class Rows:
    """Tensors `[R, *rest]` of a rollout; `rest` is `()`, `(A,)` for agents or `(L,)` for tokens."""

    obs: Tree
    behavior: Tree
    action: Tensor
    log_prob: Tensor
    weight: Tensor
    group_axis: int | None
    demos: DemoBatch | None = None
    """demonstrated steps, to be imitated beside"""
    sampled: Sampled | None = None
    """None: as the update has it"""

    @property
    def count(self) -> int:
        """Number of rows R."""
        return self.weight.shape[0]

    def as_sampled(self) -> Rows:
        """Return the rows with the observations that the policy sampled on."""
        return self if self.sampled is None else replace(self, obs=self.sampled.obs, sampled=None)

    def sampled_at(self, temperature: float) -> float:
        """Return the temperature that the policy sampled at, given that of the update."""
        return temperature if self.sampled is None else self.sampled.temperature


def rows_of(rollout: Rollout) -> Rows:
    """Return steps `[T, N, *rest]` as rows `[T·N, *rest]` without a copy; recurrent, `[N, T]`."""
    axis = rollout.group_axis
    flat = as_rows(
        {"action": rollout.action, "log_prob": rollout.log_prob, "weight": rollout.weight}, rollout
    )
    return Rows(
        obs=obs_rows(rollout.obs, rollout),
        behavior=as_rows(rollout.behavior, rollout),
        action=flat["action"],
        log_prob=flat["log_prob"],
        weight=flat["weight"],
        group_axis=None if axis is None else axis - 1,
    )


def as_rows(tree: Tree, rollout: Rollout) -> Tree:
    """Reorder tensors `[T, N, …]` as `rows_of` does."""
    if rollout.hidden_state is None:
        return {key: x.reshape(-1, *x.shape[2:]) for key, x in tree.items()}
    return {key: x.transpose(0, 1).contiguous() for key, x in tree.items()}


def obs_rows(obs: Tree, rollout: Rollout) -> Tree:
    """Return observations as the network takes them: sequences with their initial hidden state."""
    return as_rows(obs, rollout) | (rollout.hidden_state or {})


def take(tree: Tree, index: Tensor) -> Tree:
    """Return some rows of every tensor."""
    return {key: take_rows(x, index) for key, x in tree.items()}


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return `x[index]`, but whole rows at a time: for images that is twenty times faster.

    Images `[R, C, H, W]` that lie with their channels last are left so.
    """
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2)
    return x.index_select(0, index)


def wiped(x: Tensor, counts: Tensor) -> Tensor:
    """Replace numbers that are not finite in observations of rows that do not count."""
    if not x.is_floating_point() or x.shape[: counts.ndim] != counts.shape:
        return x  # integers are always numbers; a hidden state belongs to no single row
    counts = counts.reshape(*counts.shape, *[1] * (x.ndim - counts.ndim))
    return torch.where(counts, x, x.nan_to_num(0.0, 0.0, 0.0))


def minibatches(
    rows: int, size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over shuffled rows: pairs of row numbers `[size]` and 1/0 for real or padding."""
    return in_order(torch.randperm(rows, generator=generator), size)


def in_order(order: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over all rows as `minibatches` does, in a given order.

    The remainder is used, not dropped: it is padded with row 0 at weight 0, so that a compiled step
    sees one shape only.
    """
    real = torch.ones(size)
    for start in range(0, len(order), size):
        index = order[start : start + size]
        missing = size - index.shape[0]
        if missing:
            index = torch.cat([index, index.new_zeros(missing)])
            real = torch.cat([real[:-missing], real.new_zeros(missing)])
        yield index, real


def mapped(rows: Rows, function: Callable[[Tensor], Tensor]) -> Rows:
    """Apply a function to all tensors of rows; the result is of a single agent."""
    sampled = rows.sampled
    if sampled is not None:
        sampled = sampled._replace(obs={key: function(x) for key, x in sampled.obs.items()})
    return Rows(
        obs={key: function(x) for key, x in rows.obs.items()},
        behavior={key: function(x) for key, x in rows.behavior.items()},
        action=function(rows.action),
        log_prob=function(rows.log_prob),
        weight=function(rows.weight),
        group_axis=None,
        sampled=sampled,
    )


class Targets(NamedTuple):
    """Advantages and value targets of an update, in the order of `rows_of`."""

    advantage: Tensor
    """scaled as configured"""
    target: Tensor
    """of the critic, in units of reward"""
    raw: Tensor
    """the critic's raw outputs, `[R, *rest, Q]`"""


def of_members(rows: Rows, targets: Targets, agents: Sequence[int]) -> tuple[Rows, Targets]:
    """Select some agents of rows `[R, A, …]`, as rows of a single one: `[R·K, …]`."""

    def own(x: Tensor) -> Tensor:
        return x[:, agents[0]] if len(agents) == 1 else x[:, [*agents]].flatten(0, 1)

    return mapped(rows, own), Targets(*map(own, targets))


TargetFunction = Callable[[Tensor], Targets]
"""Parameters `[G, P]` to advantages and targets `[R, *rest]`; called per update or per epoch."""


def chunks(rows: Rows | DemoBatch, workers: int = 1) -> list[slice]:
    """Return slices of all rows, with something to do for all `workers`."""
    pixels = any(x.ndim - rows.weight.ndim >= 3 for x in rows.obs.values())
    count = rows.weight.shape[0]
    size = max(1, (CHUNK_PIXELS if pixels else CHUNK) // rows.weight[0].numel())
    size = min(size, -(-count // workers))
    return [slice(start, start + size) for start in range(0, count, size)]
