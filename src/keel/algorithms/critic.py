"""Fitting the critic apart from the policy, as second-order regions do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from keel.algorithms.optimizer import Minibatch, Step
from keel.errors import InputError
from keel.experience.batch import Batch, chunks, in_order
from keel.functional.reduce import aggregate, denominator
from keel.losses.ppo import Statistics
from keel.networks.agent import Agent
from keel.trust_region.gate import BAD_STEPS, not_finite
from keel.types import HyperParams, OptimizerState


@dataclass(frozen=True)
class CriticObjective:
    """The critic's loss, of its own parameters `[1, C]` on `Agent.critic_inputs`."""

    value_clip: float | None = None

    def __call__(
        self, agent: Agent, params: Tensor, batch: Batch, hparams: Tensor
    ) -> tuple[Tensor, Statistics]:
        """Return the loss `[1]`, and its statistics."""
        raw = agent.critic_outputs(params, batch.obs)
        each = agent.critic.loss(raw, batch.target, batch.old_value, self.value_clip)
        total = denominator(batch.weight)
        loss = aggregate(each, batch.weight, denominator_of_batch=total).reshape(-1)
        nothing, detached = torch.zeros_like(loss), loss.detach()
        return loss, Statistics(detached, nothing, detached, *[nothing] * 6)


Sweep = Callable[[OptimizerState, Batch, Tensor, int, Tensor], tuple[OptimizerState, Tensor]]
"""(the critic's optimizer state, all rows, their order, size of a minibatch, hyperparameters) → the
optimizer state after one pass, and each minibatch's loss and gradient norm, `[M, 2]`."""


@runtime_checkable
class Sweeping(Protocol):
    """A step that can take a whole pass at once."""

    @property
    def sweep(self) -> Sweep:
        """The pass."""


class Fit(NamedTuple):
    """The optimizer after the fit, and means over its steps."""

    opt_state: OptimizerState
    metrics: dict[str, float]


@dataclass(frozen=True)
class CriticFit:
    """A fit of the critic: `epochs` passes over the rollout in shuffled minibatches of Adam."""

    epochs: int = 10
    minibatch: int = 256
    max_grad_norm: float = 0.5
    objective: CriticObjective = CriticObjective()

    def __call__(
        self,
        agent: Agent,
        opt_state: OptimizerState,
        batch: Batch,
        hparams: HyperParams,
        rng: torch.Generator,
        step: Step,
    ) -> Fit:
        """Fit the critic of a single agent; what it shares with the policy stays as it is."""
        start, device = agent.critic_from, opt_state.params.device
        batch = _critic_batch(agent, opt_state.params, batch)
        ages = opt_state.steps[:, 1:].repeat(1, 2)  # a critic alone: both ages are its own
        params, first, second = (x[:, start:].contiguous() for x in opt_state[:3])
        own = OptimizerState(params, first, second, ages)
        hparam_values = hparams.tensor().to(device)
        sweep = step.sweep if isinstance(step, Sweeping) else _sweep(step)
        measured: list[Tensor] = []
        for _ in range(self.epochs):
            order = torch.randperm(batch.rows, generator=rng)
            own, by_minibatch = sweep(own, batch, order, self.minibatch, hparam_values)
            measured.append(by_minibatch)
            _expect_finite(torch.cat(measured), opt_state.params, batch)
        losses, size = torch.cat(measured).unbind(1)
        params, first, second = (
            torch.cat([old[:, :start], new], 1)
            for old, new in zip(opt_state[:3], own[:3], strict=True)
        )
        steps = torch.cat([opt_state.steps[:, :1], own.steps[:, 1:]], 1)
        return Fit(
            OptimizerState(params, first, second, steps),
            {
                "train/value_loss": losses.mean().item(),
                "train/critic_loss_first": losses[0].item(),
                "train/critic_loss_last": losses[-1].item(),
                "train/gradient_norm": size[size.isfinite()].mean().item(),
                "train/gradient_clipped": (size > self.max_grad_norm).double().mean().item(),
                "train/non_finite_gradients": float((~size.isfinite()).sum().item()),
                "train/epochs": float(self.epochs),
            },
        )


def require_critic(agent: Agent) -> None:
    """Raise unless the agent has parameters that the value alone depends on."""
    if agent.critic_from == agent.initial.shape[1]:
        raise InputError(
            "network: TRPO fits the critic apart, and no parameter here is the value's alone; give "
            "the value layers of its own, or use --algo ppo"
        )


def _sweep(step: Step) -> Sweep:
    """Return a pass, step by step."""

    def sweep(
        own: OptimizerState, batch: Batch, order: Tensor, minibatch: int, hparams: Tensor
    ) -> tuple[OptimizerState, Tensor]:
        device = own.params.device
        active = torch.ones(1, dtype=torch.bool, device=device)
        measured = []
        for index, real in in_order(order, minibatch):
            chosen = index.to(device), real.to(device)
            result = step(own, Minibatch(batch, *chosen, hparams, active))
            own = result.opt_state
            measured.append(torch.stack([result.statistics.value_loss, result.gradient_norm], 1))
        return own, torch.cat(measured)

    return sweep


def _expect_finite(measured: Tensor, params: Tensor, batch: Batch) -> None:
    """Raise after too many steps that were not taken, or if not even the loss is finite."""
    finite, applied = (bool(x) for x in measured.isfinite().all(0))
    skipped = int((~measured[:, 1].isfinite()).sum())
    if finite and (applied or skipped < BAD_STEPS):
        return
    what = "the critic's gradient" if finite else "the critic's loss"
    tensors = {"target": batch.target, "weight": batch.weight}
    raise not_finite(what, skipped, params, tensors)


def _critic_batch(agent: Agent, params: Tensor, batch: Batch) -> Batch:
    """Return the rows as the critic's own parameters see them, with targets in its units."""
    parts = chunks(batch) if agent.shares else [slice(None)]  # a trunk's pass needs memory
    obs = [agent.critic_inputs(params, {k: x[p] for k, x in batch.obs.items()}) for p in parts]
    return batch._replace(
        obs=obs[0] if len(obs) == 1 else {k: torch.cat([x[k] for x in obs]) for k in obs[0]},
        behavior={},
        target=agent.target_of(params, batch.target),
        demos=None,
        sampled=None,
    )
