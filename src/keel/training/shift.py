"""Changes of the policy beside its parameters: new observation statistics, another temperature.

They are made before the update, each within a share of the bound. So the update begins at the
policy as it will act next, its objective can answer for them, and the certificate compares what
acted with what acts next, nothing left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from keel.experience.batch import Sampled
from keel.experience.rollout import Rollout
from keel.functional.walk_back import walk_back
from keel.networks.agent import Agent
from keel.trust_region.measure import Bounded, exact_kl

if TYPE_CHECKING:
    from keel.envs import ObsNormalizer

STATISTICS_SHARE = 0.25
"""Largest share of the bound for new observation statistics."""
TEMPERATURE_SHARE = 0.5
"""Largest share of the bound for new statistics and another temperature together."""


class Shift(NamedTuple):
    """The policy before an update, as far as it is not its parameters."""

    rollout: Rollout
    """with observations as they will be normalized"""
    normalizer: ObsNormalizer | None
    temperature: float
    changed: bool
    """False: the policy is still the one that sampled"""
    metrics: dict[str, float]


def shift(
    agent: Agent,
    params: Tensor,
    rollout: Rollout,
    normalizer: ObsNormalizer | None,
    target: float,
    bound: float,
) -> Shift:
    """Move statistics and temperature as far as their shares of the bound allow.

    Args:
        agent: whose policy it is.
        params: `[G, P]`, those that sampled.
        rollout: as it was sampled.
        normalizer: of observations, as it was while sampling.
        target: temperature to go to, from that of the rollout.
        bound: on the KL of an update; infinite where nothing is enforced.
    """
    temperature = rollout.temperature
    kl_normaliser = kl_temperature = heat = share = 0.0
    if normalizer is not None and rollout.raw_obs is not None:
        normalizer = normalizer.absorb(rollout.raw_obs.rows, rollout.weight.numpy())
        share, kl_normaliser = _statistics(agent, params, rollout, normalizer, bound)
        normalizer = normalizer.settle(share)
        rollout = rollout.normalized_by(normalizer)
    if target != temperature:
        heat, kl_temperature = _temperature(agent, params, rollout, target, bound)
        temperature = _between(temperature, target, heat)
    metrics = {"train/kl_normaliser": kl_normaliser, "train/kl_temperature": kl_temperature}
    return Shift(rollout, normalizer, temperature, share > 0.0 or heat > 0.0, metrics)


def _statistics(
    agent: Agent, params: Tensor, rollout: Rollout, normalizer: ObsNormalizer, bound: float
) -> tuple[float, float]:
    """Return the share of the way to the statistics of all that was seen, and its KL."""
    temperature = rollout.temperature
    batch = rollout.to(params.device).batch()
    sampled = Sampled(batch.obs, temperature)

    def kl_of(share: float) -> Tensor:
        renormalized = rollout.normalized_by(normalizer.settle(share)).to(params.device)
        moved = batch._replace(obs=renormalized.obs_rows(renormalized.obs), sampled=sampled)
        return Bounded(agent, params, moved, temperature).kl(params)

    return _largest_share(kl_of, STATISTICS_SHARE * bound)


def _temperature(
    agent: Agent, params: Tensor, rollout: Rollout, target: float, bound: float
) -> tuple[float, float]:
    """Return the share of the way to the temperature wanted, and the KL of all that has moved."""
    batch = rollout.to(params.device).batch()

    def kl_of(share: float) -> Tensor:
        return exact_kl(agent, params, batch, _between(rollout.temperature, target, share))

    return _largest_share(kl_of, TEMPERATURE_SHARE * bound)


def _between(start: float, end: float, share: float) -> float:
    """Return a temperature between two, by the logarithm; exactly `end` at 1."""
    return end if share == 1.0 else start * (end / start) ** share


def _largest_share(kl_of: Callable[[float], Tensor], bound: float) -> tuple[float, float]:
    """Return the share of a change, of all agents together, whose KL is inside a bound; its KL."""

    def kl_at(share: Tensor) -> Tensor:
        return kl_of(share.item()).max().cpu().reshape(1)

    if bound == torch.inf:
        return 1.0, kl_at(torch.ones(1)).item()
    result = walk_back(kl_at, bound)
    return result.fraction.item(), result.kl.item()
