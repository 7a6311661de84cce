"""A batch of experience: what an algorithm learns from and certifies on.

Rows are the first axis. A policy without a hidden state takes every step as a row; a recurrent one,
or a language model, takes a whole sequence, so that nothing is ever shuffled inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keel.types import Tree

CHUNK = 4096
"""Steps evaluated at once: bounds the memory of a pass over a large rollout."""
CHUNK_PIXELS = 512
EMPTY = torch.empty(0)
"""In place of targets that were not computed yet."""


class DemoBatch(NamedTuple):
    """Demonstrated steps `[R, …]` that an update imitates, one beside every row of its rollout."""

    obs: Tree
    """Observations, as the network sees them."""
    action: Tensor
    """Actions, as the distribution takes them."""
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

    def part(self, index: slice) -> DemoBatch:
        """Return consecutive rows, as views."""
        return DemoBatch(
            {key: x[index] for key, x in self.obs.items()}, *(x[index] for x in self[1:])
        )


class Sampled(NamedTuple):
    """Conditions of the sampling, where the update has others: the policy that acts next sees new
    statistics, or is hotter or colder."""

    obs: Tree
    """`[R, …]`: as the network saw them"""
    temperature: float


class Batch(NamedTuple):
    """Tensors `[R, *rest]`; `rest` is `()`, `(A,)` for agents or `(L,)` for tokens."""

    obs: Tree
    behavior: Tree
    """parameters of the distribution that the actions came from"""
    action: Tensor
    log_prob: Tensor
    """Log-probability of `action` under `behavior`."""
    weight: Tensor
    """0 for rows that do not exist: autoreset rows, dead agents, tool text, padding"""
    group_axis: int | None = None
    """the agent axis; None means one group"""
    advantage: Tensor = EMPTY
    """scaled as configured"""
    target: Tensor = EMPTY
    """Target of the critic, in units of reward; in the critic's own inside of an update."""
    old_value: Tensor = EMPTY
    """the critic's raw outputs before the update, `[R, *rest, Q]`"""
    demos: DemoBatch | None = None
    """demonstrated steps, to be imitated beside"""
    sampled: Sampled | None = None
    """None: as the update has it"""
    constants: Mapping[str, Tensor] = {}
    """Tensors that all rows share: the head for the hidden states of `behavior`."""

    @property
    def rows(self) -> int:
        """Number of rows R."""
        return self.weight.shape[0]

    @property
    def old_policy(self) -> Tree:
        """Parameters of the distribution that sampled."""
        return {**self.behavior, **self.constants}

    def as_sampled(self) -> Batch:
        """Return the rows with the observations that the policy sampled on."""
        return self if self.sampled is None else self._replace(obs=self.sampled.obs, sampled=None)

    def sampled_at(self, temperature: float) -> float:
        """Return the temperature that the policy sampled at, given that of the update."""
        return temperature if self.sampled is None else self.sampled.temperature

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply a function to all tensors that have rows; the result is of a single agent."""

        def tree(x: Tree) -> Tree:
            return {key: function(value) for key, value in x.items()}

        def given(x: Tensor) -> Tensor:
            return x if x is EMPTY else function(x)

        sampled = self.sampled
        return Batch(
            obs=tree(self.obs),
            behavior=tree(self.behavior),
            action=function(self.action),
            log_prob=function(self.log_prob),
            weight=function(self.weight),
            advantage=given(self.advantage),
            target=given(self.target),
            old_value=given(self.old_value),
            sampled=None if sampled is None else sampled._replace(obs=tree(sampled.obs)),
            constants=self.constants,
        )

    def part(self, index: slice) -> Batch:
        """Return consecutive rows, as views; without demonstrations."""
        return self.map(lambda x: x[index])._replace(group_axis=self.group_axis)

    def of_members(self, agents: Sequence[int]) -> Batch:
        """Select some agents of rows `[R, A, …]`, as rows of a single one: `[R·K, …]`."""
        return self.map(
            lambda x: x[:, agents[0]] if len(agents) == 1 else x[:, [*agents]].flatten(0, 1)
        )

    def take(self, index: Tensor, real: Tensor) -> Batch:
        """Return some rows of a batch with targets; `real` is 0 for padding.

        What rows of weight 0 hold is wiped: a zero weight alone would still multiply their NaN in
        the backward pass. Observations that are not finite were wiped when the update began.
        """
        weight = take_rows(self.weight, index)
        weight = weight * real.reshape(-1, *[1] * (weight.ndim - 1))
        counts = weight > 0
        return Batch(
            obs=take(self.obs, index),
            behavior=take(self.behavior, index),
            action=take_rows(self.action, index),
            log_prob=take_rows(self.log_prob, index),
            weight=weight,
            group_axis=self.group_axis,
            advantage=torch.where(counts, take_rows(self.advantage, index), 0.0),
            target=torch.where(counts, take_rows(self.target, index), 0.0),
            old_value=torch.where(counts[..., None], take_rows(self.old_value, index), 0.0),
            demos=None if self.demos is None else self.demos.take(index, real),
            constants=self.constants,
        )

    def split(self, size: int) -> list[Batch]:
        """Return pieces of at most `size` rows."""
        rows = torch.arange(self.rows, device=self.weight.device)
        real = torch.ones_like(rows, dtype=self.weight.dtype)
        return [self.take(part, real[: len(part)]) for part in torch.split(rows, size)]

    def without_nan(self) -> Batch:
        """Return the rows without NaN in observations of rows that do not count."""
        counts = self.weight > 0
        if bool(counts.all()):
            return self
        return self._replace(obs={key: wiped(x, counts) for key, x in self.obs.items()})


class Targets(NamedTuple):
    """Advantages and value targets, in the order of a batch's rows."""

    advantage: Tensor
    target: Tensor
    raw: Tensor
    """the critic's raw outputs, `[R, *rest, Q]`"""


TargetFunction = Callable[[Tensor], Targets]
"""Parameters of the critic `[G, P]` to advantages and value targets."""


@dataclass(frozen=True)
class Experience:
    """A batch with targets, and the way to compute them again by another critic."""

    batch: Batch
    targets: TargetFunction
    """for updates that recompute advantages between their epochs"""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the collection and the targets."""
    signals: Mapping[str, float] = field(default_factory=dict)
    """Input of the controllers beside the update's report: fields of `Outcome`."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Amounts that are reported per second, such as tokens."""
    agents: tuple[str, ...] = ()
    """names of several agents"""
    temperature: float = 1.0
    """Temperature of the policy that acts next."""
    detail: Any = None
    """Data that the source needs again after the update."""
    seconds: float = 0.0
    """Seconds that sampling took."""

    def by_critic(self, params: Tensor) -> Batch:
        """Return the batch with targets by the critic at other parameters."""
        with torch.no_grad():
            targets = self.targets(params)
        return self.batch._replace(advantage=targets.advantage, target=targets.target)


def take(tree: Tree, index: Tensor) -> Tree:
    """Return some rows of every tensor."""
    return {key: take_rows(x, index) for key, x in tree.items()}


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return `x[index]`, but whole rows at a time: for images that is twenty times faster.

    Images `[R, C, H, W]` that lie with their channels last are left so.

    Args:
        x: `[R, …]`.
        index: Row numbers, `[B]`.
    """
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2)
    return x.index_select(0, index)


def wiped(x: Tensor, counts: Tensor) -> Tensor:
    """Replace numbers that are not finite in observations of rows that do not count.

    Args:
        x: Observations, `[*lead, …]`.
        counts: bool `[*lead]`: rows that count.
    """
    if not x.is_floating_point() or x.shape[: counts.ndim] != counts.shape:
        return x  # integers are always numbers; a hidden state belongs to no single row
    counts = counts.reshape(*counts.shape, *[1] * (x.ndim - counts.ndim))
    return torch.where(counts, x, x.nan_to_num(0.0, 0.0, 0.0))


def minibatches(
    rows: int, size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over shuffled rows: pairs of row numbers `[size]` and 1/0 for real or padding.

    Args:
        rows: Number of rows.
        size: Rows of a minibatch.
        generator: Random generator of the order.
    """
    return in_order(torch.randperm(rows, generator=generator), size)


def in_order(order: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over all rows as `minibatches` does, in a given order.

    The remainder is used, not dropped: it is padded with row 0 at weight 0, so that a compiled step
    sees one shape only.

    Args:
        order: Row numbers, `[R]`.
        size: Rows of a minibatch.
    """
    real = torch.ones(size)
    for start in range(0, len(order), size):
        index = order[start : start + size]
        missing = size - index.shape[0]
        if missing:
            index = torch.cat([index, index.new_zeros(missing)])
            real = torch.cat([real[:-missing], real.new_zeros(missing)])
        yield index, real


def chunks(rows: Batch | DemoBatch, workers: int = 1) -> list[slice]:
    """Return slices of all rows, with something to do for all `workers`."""
    pixels = any(x.ndim - rows.weight.ndim >= 3 for x in rows.obs.values())
    count = rows.weight.shape[0]
    size = max(1, (CHUNK_PIXELS if pixels else CHUNK) // rows.weight[0].numel())
    size = min(size, -(-count // workers))
    return [slice(start, start + size) for start in range(0, count, size)]
