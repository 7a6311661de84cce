"""Fitting the critic apart from the policy, as second-order regions do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from keel.functional import aggregate, denominator, value
from keel.models.agent import Agent
from keel.regions.faults import BAD_STEPS, not_finite
from keel.regions.objective import Batch, Statistics
from keel.regions.stepper import Optimum, Step
from keel.rollout.batch import Learned, Rows, minibatches
from keel.types import Knobs


@dataclass(frozen=True)
class CriticObjective:
    """½(V − R)², of the critic's own parameters `[1, C]` on `Agent.critic_inputs`."""

    value_clip: float | None = None

    def __call__(
        self, agent: Agent, params: Tensor, batch: Batch, knobs: Tensor, group_axis: int | None
    ) -> tuple[Tensor, Statistics]:
        """The loss `[1]`, and what there is to say about it."""
        now = agent.critic(params, batch.obs).squeeze(-1)
        each = (
            value.squared(now, batch.target)
            if self.value_clip is None
            else value.clipped(now, batch.old_value, batch.target, self.value_clip).loss
        )
        total = denominator(batch.weight)
        loss = aggregate(each, batch.weight, denominator_of_batch=total).reshape(-1)
        nothing, seen = torch.zeros_like(loss), loss.detach()
        return loss, Statistics(seen, nothing, seen, *[nothing] * 5)


class Fit(NamedTuple):
    """The optimizer after the fit, and means over its steps."""

    optimum: Optimum
    metrics: dict[str, float]


@dataclass(frozen=True)
class CriticFit:
    """`epochs` passes over the rollout in shuffled minibatches of Adam."""

    epochs: int = 10
    minibatch: int = 256
    max_grad_norm: float = 0.5
    objective: CriticObjective = CriticObjective()

    def __call__(
        self,
        agent: Agent,
        optimum: Optimum,
        rows: Rows,
        learned: Learned,
        knobs: Knobs,
        rng: torch.Generator,
        step: Step,
    ) -> Fit:
        """Fit the critic of a single agent; what it shares with the policy stays as it is."""
        start, device = agent.critic_from, optimum.params.device
        batch = _critic_batch(agent, optimum.params, rows, learned)
        ages = optimum.steps[:, 1:].expand(-1, 2)  # a critic alone: both ages are its own
        params, first, second = (x[:, start:].contiguous() for x in optimum[:3])
        own = Optimum(params, first, second, ages)
        dials, active = knobs.tensor().to(device), torch.ones(1, dtype=torch.bool, device=device)
        losses, norms, skipped = [], [], 0
        for _ in range(self.epochs):
            for index, real in minibatches(rows.count, self.minibatch, rng):
                index, real = index.to(device), real.to(device)
                result = step(own, batch, index, real, dials, active)
                own = result.optimum
                losses.append(result.statistics.value_loss)
                norms.append(result.gradient_norm)
                if not bool(result.applied.all()):
                    skipped += 1
                    finite = bool(result.statistics.loss.isfinite().all())
                    if not finite or skipped >= BAD_STEPS:
                        what = "the critic's gradient" if finite else "the critic's loss"
                        seen = {"target": batch.target, "weight": batch.weight}
                        raise not_finite(what, skipped, optimum.params, seen)
        params, first, second = (
            torch.cat([old[:, :start], new], 1)
            for old, new in zip(optimum[:3], own[:3], strict=True)
        )
        steps = torch.cat([optimum.steps[:, :1], own.steps[:, 1:]], 1)
        size = torch.cat(norms)
        return Fit(
            Optimum(params, first, second, steps),
            {
                "train/value_loss": torch.cat(losses).mean().item(),
                "train/critic_loss_first": losses[0].item(),
                "train/critic_loss_last": losses[-1].item(),
                "train/gradient_norm": size[size.isfinite()].mean().item(),
                "train/gradient_clipped": (size > self.max_grad_norm).double().mean().item(),
                "train/non_finite_gradients": float(skipped),
                "train/epochs": float(self.epochs),
            },
        )


def _critic_batch(agent: Agent, params: Tensor, rows: Rows, learned: Learned) -> Batch:
    inputs = agent.critic_inputs(params, rows.obs)
    return Batch(
        obs=inputs,
        behaviour={},
        action=rows.action,
        log_prob=rows.log_prob,
        advantage=learned.advantage,
        target=learned.target,
        old_value=learned.value,
        weight=rows.weight,
    )
