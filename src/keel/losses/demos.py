"""Behavior cloning inside a trust region: its loss, and how hard it pulls beside the policy's own.

The loss is part of what the region optimises, so the bound on the exact KL covers it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from keel.experience.batch import Batch, DemoBatch, chunks
from keel.losses.ppo import cloning_loss
from keel.networks.agent import Agent
from keel.types import HyperParams


def mean_cloning_loss(agent: Agent, params: Tensor, demos: DemoBatch, temperature: float) -> float:
    """Return `cloning_loss` over all demonstrated steps, piece by piece."""
    total = demos.real.sum().clamp(min=1.0)
    with torch.no_grad():
        parts = [demos.part(index) for index in chunks(demos)]
        sums = [cloning_loss(agent, params, x, temperature) * x.real.sum() for x in parts]
    return (torch.cat(sums).double().sum() / total).item()


class Pull(NamedTuple):
    """The gradients of both losses in the policy's parameters, before the update."""

    cloning: Tensor
    """`[P]` float64, without its coefficient"""
    policy_norm: float
    cloning_norm: float
    cosine: float
    """NaN where one of them is 0"""


def pull(agent: Agent, params: Tensor, batch: Batch, hparams: HyperParams) -> Pull:
    """Differentiate the surrogate and the cloning loss, each on all of its rows.

    Where the policy is still the one that sampled, the surrogate's gradient is that of −A log π.

    Args:
        agent: a single agent.
        params: `[1, P]`.
        batch: a rollout with advantages and demonstrations.
        hparams: values in force; the temperature is read.
    """
    demos = batch.demos
    assert demos is not None
    total = batch.weight.sum().clamp(min=1.0)
    demo_total = demos.real.sum().clamp(min=1.0)

    def surrogate(index: slice, leaf: Tensor) -> Tensor:
        part = batch.part(index).without_nan()
        log_prob = agent.dist.log_prob(
            agent.policy(leaf, part.obs, hparams.temperature), part.action
        )
        counts = part.weight > 0
        gain = torch.where(counts, log_prob, 0.0) * torch.where(counts, part.advantage, 0.0)
        return -(part.weight * gain).sum() / total

    def cloning(index: slice, leaf: Tensor) -> Tensor:
        part = demos.part(index)
        share = part.real.sum() / demo_total
        return cloning_loss(agent, leaf, part, hparams.temperature).sum() * share

    own = _gradient(surrogate, params, chunks(batch), agent.policy_columns)
    other = _gradient(cloning, params, chunks(demos), agent.policy_columns)
    norms = own.norm().item(), other.norm().item()
    product = math.prod(norms)
    cosine = (own @ other).item() / product if product > 0.0 else math.nan
    return Pull(other, *norms, cosine)


def _gradient(
    loss: Callable[[slice, Tensor], Tensor],
    params: Tensor,
    parts: list[slice],
    columns: Tensor,
) -> Tensor:
    """Return the gradient of the sum over the parts, `[P]` in float64; 0 outside of `columns`."""
    total = torch.zeros(params.shape[1], dtype=torch.float64, device=params.device)
    for part in parts:
        leaf = params.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(part, leaf), leaf)
        total += gradient[0]
    return torch.where(columns, total, 0.0)


@dataclass(frozen=True)
class Limit:
    """Bound on the pull of demonstrations in an update, relative to the policy's own gradient.

    ‖coef · ∇ cloning‖ ≤ trust · max_ratio · ‖∇ surrogate‖, where the trust is what a controller has
    left of the coefficient it began with.
    """

    coef: float
    max_ratio: float = 1.0
    floor: float = 0.01

    def __call__(self, hparams: HyperParams, before: Pull) -> HyperParams:
        """Lower `bc_coef` to what is allowed, at most down to the floor."""
        if not before.cloning_norm > 0.0:
            return hparams
        trusted = self.max_ratio * hparams.bc_coef / self.coef
        most = trusted * before.policy_norm / before.cloning_norm
        if not most > self.floor:  # or NaN
            most = self.floor
        return replace(hparams, bc_coef=min(hparams.bc_coef, most))


def cloning_metrics(
    before: Pull, hparams: HyperParams, policy_loss: float, bc_loss: float
) -> dict[str, float]:
    """Return the metrics of cloning, as the registry names them."""
    weighted = hparams.bc_coef * bc_loss
    by_loss = abs(weighted) / (abs(policy_loss) + 1e-8)
    pulled = hparams.bc_coef * before.cloning_norm
    by_gradient = math.nan if pulled == 0.0 else math.inf  # with nothing to go by beside it
    if before.policy_norm != 0.0:
        by_gradient = pulled / before.policy_norm
    return {
        "train/policy_loss_ppo": policy_loss,
        "train/bc_loss": bc_loss,
        "train/policy_loss_bc_weighted": weighted,
        "train/bc_ppo_ratio": by_loss,
        "train/bc_gradient_ratio": by_gradient,
        "train/bc_cosine": before.cosine,
        "train/bc_gradient_norm": before.cloning_norm,
        "train/bc_coef": hparams.bc_coef,
    }
