"""Measurements of an update over all rows of its rollout: the exact KL and its company."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keel.experience.batch import Batch, DemoBatch, chunks
from keel.functional.divergence import exp_minus_linear
from keel.functional.ratio import Ratio, policy_ratio
from keel.networks.agent import Agent
from keel.resources import parallel_map
from keel.types import Tree


class Measurement(NamedTuple):
    """Comparison of the policy at some parameters with the one that sampled; `[R, *rest]` each."""

    kl: Tensor
    """exact KL(old‖new)"""
    kl_reverse: Tensor
    ratio: Ratio
    entropy: Tensor


def measure(agent: Agent, params: Tensor, batch: Batch, temperature: float) -> Measurement:
    """Evaluate the policy once on every row.

    Args:
        agent: the agent.
        params: `[G, P]`.
        batch: the rollout, `[R, *rest]`.
        temperature: of the policy.
    """
    parts = parallel_map(
        lambda index: _measure(agent, params, batch.part(index), temperature),
        chunks(batch, agent.workers),
        agent.workers,
    )
    if len(parts) == 1:
        return parts[0]
    ratio = Ratio(*(torch.cat(x) for x in zip(*(part.ratio for part in parts), strict=True)))
    return Measurement(
        kl=torch.cat([part.kl for part in parts]),
        kl_reverse=torch.cat([part.kl_reverse for part in parts]),
        ratio=ratio,
        entropy=torch.cat([part.entropy for part in parts]),
    )


def exact_kl(agent: Agent, params: Tensor, batch: Batch, temperature: float) -> Tensor:
    """Return the mean exact KL(old‖new) per group, `[G]` in float64: the quantity that is bounded.

    Args:
        agent: the agent.
        params: `[G, P]` of the new policy.
        batch: a rollout with the distributions of the old one.
        temperature: of the new policy.
    """

    def part(index: slice) -> Tensor:
        own = batch.part(index)
        return agent.dist.kl(own.old_policy, agent.policy(params, own.obs, temperature))

    with torch.no_grad():
        parts = parallel_map(part, chunks(batch, agent.workers), agent.workers)
    return group_mean(torch.cat(parts), batch)


class Bounded:
    """The KL that is bounded: from the policy that sampled the rows to one that would act next.

    Where one of them has a temperature, policies are also compared without it, as they are when
    they are evaluated; the larger KL counts.
    """

    def __init__(self, agent: Agent, params: Tensor, batch: Batch, temperature: float) -> None:
        """`params` `[G, P]` sampled the rows; `temperature` is that of the policy acting next."""
        self.agent, self.batch, self.temperature = agent, batch, temperature
        self._cold: Batch | None = None
        if temperature != 1.0 or batch.sampled_at(temperature) != 1.0:
            before = behavior_at(agent, params, batch.as_sampled(), 1.0)
            self._cold = batch._replace(behavior=before)

    def kl(self, params: Tensor, row_kl: Tensor | None = None) -> Tensor:
        """Return the mean exact KL, `[G]` on the CPU, of agents that share a row the largest.

        Args:
            params: `[G, P]` of the policy acting next.
            row_kl: `[R, *rest]`, the KL of every row at the temperature, where it was measured.
        """
        if row_kl is None:
            kl = exact_kl(self.agent, params, self.batch, self.temperature)
        else:
            kl = group_mean(row_kl, self.batch)
        if self._cold is not None:
            kl = torch.maximum(kl, exact_kl(self.agent, params, self._cold, 1.0))
        return self.agent.worst(kl).cpu()


def demo_kl(agent: Agent, old: Tensor, new: Tensor, demos: DemoBatch, temperature: float) -> float:
    """Return the mean exact KL(old‖new) on demonstrated states, which nothing bounds."""
    return kl_between(agent, (old, demos), (new, demos), temperature).double().mean().item()


Side = tuple[Tensor, Batch | DemoBatch]
"""Parameters, and the rows on whose observations they act."""


@torch.no_grad()
def kl_between(agent: Agent, old: Side, new: Side, temperature: float) -> Tensor:
    """Return the exact KL(old‖new) of every row, piece by piece."""
    parts = [
        agent.dist.kl(
            *(
                agent.policy(params, {k: x[index] for k, x in rows.obs.items()}, temperature)
                for params, rows in (old, new)
            )
        )
        for index in chunks(old[1])
    ]
    return torch.cat(parts)


def behavior_at(agent: Agent, params: Tensor, batch: Batch, temperature: float) -> Tree:
    """Return the policy's distributions on all rows, without a head, which is a constant."""
    with torch.no_grad():
        parts = [
            agent.policy(params, {k: x[index] for k, x in batch.obs.items()}, temperature)
            for index in chunks(batch)
        ]
    rows = [key for key in parts[0] if key not in agent.dist.constants]
    return {key: torch.cat([part[key] for part in parts]) for key in rows}


def group_mean(x: Tensor, batch: Batch) -> Tensor:
    """Return the weighted mean per group, `[G]` in float64; rows of weight 0 are not read."""
    weight = batch.weight.double()
    product = torch.where(weight > 0, x.double(), 0.0) * weight
    if batch.group_axis is None:
        return (product.sum() / weight.sum().clamp(min=1e-300)).reshape(1)
    axes = [axis for axis in range(x.ndim) if axis != batch.group_axis]
    return product.sum(axes) / weight.sum(axes).clamp(min=1e-300)


def group_moments(x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return weighted mean and variance per group, `[G]` each."""
    mean = group_mean(x, batch)
    return mean, (group_mean(x.double() ** 2, batch) - mean**2).clamp(min=0.0)


def kl_metrics(measured: Measurement, batch: Batch) -> dict[str, float]:
    """Return tails, the other direction, and the estimators beside the exact value."""
    counted = measured.ratio.weight > 0
    kl = measured.kl[counted].double()
    raw = measured.ratio.raw_log_ratio[counted].double()
    exact = group_mean(measured.kl, batch).max().item()
    k1 = -raw.mean().item() if raw.numel() else 0.0
    return {
        "train/kl_reverse": group_mean(measured.kl_reverse, batch).max().item(),
        "train/kl_p99": torch.quantile(kl, 0.99).item() if kl.numel() else 0.0,
        "train/kl_max": kl.max().item() if kl.numel() else 0.0,
        "train/kl_approx": k1,
        "train/approx_kl": exp_minus_linear(raw).mean().item() if raw.numel() else 0.0,
        "train/kl_error": abs(k1 - exact),
        "train/kl_k1": k1,
    }


@torch.no_grad()
def _measure(agent: Agent, params: Tensor, part: Batch, temperature: float) -> Measurement:
    old, now = part.old_policy, agent.policy(params, part.obs, temperature)
    kl, reverse, log_prob, entropy = agent.dist.compare(old, now, part.action)
    return Measurement(kl, reverse, policy_ratio(log_prob, part.log_prob, part.weight), entropy)
