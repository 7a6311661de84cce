"""One optimizer step on one minibatch: gradient, clipping and Adam on the parameter matrix.

The whole step is one function of tensors, so that it can be compiled as one graph: on a 64×64 MLP
that is about three times faster than eager, where Python between small operations is the cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from keel.experience.batch import Batch
from keel.losses.ppo import Objective, Statistics
from keel.networks.accelerate import Kind
from keel.networks.agent import Agent
from keel.resources import parallel_map
from keel.types import HPARAM_INDEX, OptimizerState

BETAS = (0.9, 0.999)
EPSILON = 1e-5
"""Larger than Adam's usual 1e-8: PPO's small gradients need it ("37 details", number 3)."""


class StepResult(NamedTuple):
    """The optimizer after a step, and its statistics."""

    opt_state: OptimizerState
    statistics: Statistics
    gradient_norm: Tensor
    """`[G]`, before clipping"""
    applied: Tensor
    """`[G]` bool: a non-finite gradient is never applied, a stopped group never moved"""


class Minibatch(NamedTuple):
    """What a step learns from, and how."""

    rows: Batch
    """all rows of the update"""
    chosen: Tensor
    """`[B]`: the rows of this minibatch"""
    real: Tensor
    """`[B]`: 0 for padding"""
    hparams: Tensor
    """values in the order of `HPARAM_INDEX`"""
    active: Tensor
    """`[G]` bool: the groups that may move"""

    @property
    def taken(self) -> Batch:
        """Its own rows."""
        return self.rows.take(self.chosen, self.real)


Step = Callable[[OptimizerState, Minibatch], StepResult]
Loss = Callable[..., tuple[Tensor, Statistics]]
"""(agent, parameters, minibatch, hyperparameters) → the loss per group, and statistics;
of micro-batches with `total`, what the whole minibatch is divided by."""
Total = Callable[[Tensor], tuple[Tensor, Statistics]]


def joined_metrics(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average over agents; the largest of what warns, the sum of what counts."""
    metrics = {key: math.fsum(table[key] for table in tables) / len(tables) for key in tables[0]}
    metrics["train/gate_log_ratio"] = max(table["train/gate_log_ratio"] for table in tables)
    for key in ("train/non_finite_gradients", "error/non_finite_ratio_count"):
        if key in metrics:
            metrics[key] *= len(tables)
    return metrics


def initial_opt_state(params: Tensor) -> OptimizerState:
    """Return the optimizer before the first step."""
    zeros = torch.zeros_like(params)
    steps = torch.zeros(params.shape[0], 2, device=params.device)
    return OptimizerState(params, zeros, zeros.clone(), steps)


def make_step(
    agent: Agent,
    objective: Loss,
    *,
    max_grad_norm: float,
    compiled: bool = False,
    micro: int | None = None,
    workers: int = 1,
) -> Step:
    """Return one step of Adam on an objective.

    Args:
        agent: the agent.
        objective: the loss; it may take the critic's parameters alone, then these are all.
        max_grad_norm: bound on the norm of a group's gradient.
        compiled: whether `torch.compile` compiles the step.
        micro: rows over which the gradient is added up at a time, for models whose activations are
            large; the objective then says what all of them are divided by (`denominator`).
        workers: pieces of a minibatch taken in parallel.
    """
    critic_columns = agent.layout.columns("critic").to(agent.initial.device)
    gradient_of = _Gradient(agent, objective, compiled, micro, workers)

    def step(opt_state: OptimizerState, minibatch: Minibatch) -> StepResult:
        rows, index, real, hparams, active = minibatch
        if workers > 1:  # rows of a group stay together, and share the reading of their prompt
            index, order = index.sort()
            real = real[order]
        gradient, statistics = gradient_of(opt_state.params, rows.take(index, real), hparams)
        norm = gradient.norm(dim=1)
        applied = torch.isfinite(norm) & active
        scale = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        rate, factor = (hparams[HPARAM_INDEX[name]] for name in ("learning_rate", "critic_factor"))
        if not compiled and _all_move_alike(opt_state, applied) and factor == 1.0:
            moved = _plain_adam(opt_state, gradient.mul_(scale[:, None]), rate.item())
        else:
            gradient = torch.where(applied[:, None], gradient * scale[:, None], 0.0)
            columns = agent.policy_columns[-gradient.shape[1] :]
            rates = torch.where(critic_columns[-gradient.shape[1] :], rate * factor, rate)
            moved = _adam(opt_state, gradient, rates, applied, columns)
        return StepResult(moved, statistics, norm, applied)

    return torch.compile(step, fullgraph=True, dynamic=False) if compiled else step


def make_chosen_step(kind: Kind, agent: Agent, objective: Loss, *, max_grad_norm: float) -> Step:
    """Return the step of a kind (`keel.networks.accelerate`), for a single agent or all together.

    Args:
        kind: what takes it; kernels must be able to.
        agent: the agent.
        objective: the whole loss, or that of the critic alone.
        max_grad_norm: bound on the norm of a group's gradient.
    """
    if kind != "kernels":
        compiled = kind == "torch.compile"
        return make_step(agent, objective, max_grad_norm=max_grad_norm, compiled=compiled)
    if isinstance(objective, Objective):
        from keel.algorithms.dense import make_dense_step

        return make_dense_step(agent, objective, max_grad_norm=max_grad_norm)
    from keel.algorithms.dense_critic import DenseCriticStep

    return DenseCriticStep(agent, max_grad_norm=max_grad_norm)


@dataclass(frozen=True)
class _Gradient:
    """The gradient of an objective on a minibatch, whole or added up from micro-batches."""

    agent: Agent
    objective: Loss
    compiled: bool
    micro: int | None
    workers: int

    def __call__(self, params: Tensor, batch: Batch, hparams: Tensor) -> tuple[Tensor, Statistics]:
        """Return the gradient `[G, P]`, and statistics of the whole minibatch."""
        size = self.micro
        if size is None and self.workers > 1:
            size = -(-batch.rows // self.workers)
        if size is None:
            return self._of(params, batch, hparams)
        total = self.objective.denominator(batch)  # type: ignore[attr-defined]
        gradient, statistics = torch.zeros_like(params), []
        pieces = batch.split(size)
        for begin in range(0, len(pieces), self.workers):  # gradients of a few pieces at a time
            for added, own in parallel_map(
                lambda piece: self._of(params, piece, hparams, total=total),
                pieces[begin : begin + self.workers],
                self.workers,
            ):
                gradient += added
                statistics.append(own)
        return gradient, _together(statistics)

    def _of(
        self, params: Tensor, part: Batch, hparams: Tensor, **total: Tensor
    ) -> tuple[Tensor, Statistics]:
        def loss_of(params: Tensor) -> tuple[Tensor, Statistics]:
            loss, statistics = self.objective(self.agent, params, part, hparams, **total)
            return loss.sum(), statistics  # rows of the matrix are independent: a sum keeps so

        # `torch.compile` captures `func.grad` and not `autograd.grad`; eagerly the latter is faster
        return (_functional if self.compiled else _autograd)(loss_of, params)


def _together(parts: list[Statistics]) -> Statistics:
    """Join statistics of micro-batches: sums of means over one denominator, largest extremes."""
    sums = Statistics(*(torch.stack(x).sum(0) for x in zip(*parts, strict=True)))
    largest = torch.stack([part.log_ratio_max for part in parts]).amax(0)  # NaN wins
    return sums._replace(log_ratio_max=largest)


def _autograd(function: Total, params: Tensor) -> tuple[Tensor, Statistics]:
    leaf = params.detach().requires_grad_()
    loss, statistics = function(leaf)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient, statistics


def _functional(function: Total, params: Tensor) -> tuple[Tensor, Statistics]:
    gradient, statistics = torch.func.grad(function, has_aux=True)(params)
    return gradient, statistics


def _adam(
    old: OptimizerState, gradient: Tensor, rate: Tensor, applied: Tensor, policy: Tensor
) -> OptimizerState:
    """Apply Adam (Kingma and Ba 2015); a group that may not move keeps its moments and age, too."""
    rows = applied[:, None]
    steps = old.steps + rows
    age = torch.where(policy, steps[:, :1], steps[:, 1:]).clamp(min=1.0)
    first = torch.where(rows, BETAS[0] * old.first + (1 - BETAS[0]) * gradient, old.first)
    second = torch.where(rows, BETAS[1] * old.second + (1 - BETAS[1]) * gradient**2, old.second)
    spread = (second / (1 - BETAS[1] ** age)).sqrt() + EPSILON
    direction = first / (1 - BETAS[0] ** age) / spread
    params = torch.where(rows, old.params - rate * direction, old.params)
    return OptimizerState(params, first, second, steps)


def _all_move_alike(opt_state: OptimizerState, applied: Tensor) -> bool:
    return bool(applied.all()) and bool((opt_state.steps == opt_state.steps[0, 0]).all())


def _plain_adam(old: OptimizerState, gradient: Tensor, rate: float) -> OptimizerState:
    """Apply `_adam` where all move and are of one age: a third of its passes over the parameters.

    A CNN has two million of them, and 30 ms of every step went there.
    """
    steps = old.steps + 1.0
    age = steps[0, 0].item()
    first = torch.lerp(old.first, gradient, 1 - BETAS[0])
    second = (old.second * BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
    shrink = (1 - BETAS[1] ** age) ** 0.5  # of both, numerator and denominator: one pass less
    spread = second.sqrt().add_(EPSILON * shrink)
    params = torch.addcdiv(old.params, first, spread, value=-rate * shrink / (1 - BETAS[0] ** age))
    return OptimizerState(params, first, second, steps)
