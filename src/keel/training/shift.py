"""Changes of the policy beside its parameters: new observation statistics, another temperature.

They are made before the update, each within a share of the bound. So the update begins at the
policy as it will act next, its objective can answer for them, and the certificate compares what
acted with what acts next, nothing left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from keel.envs import ObsNormaliser
from keel.functional import walk_back
from keel.models.agent import Agent
from keel.regions.measure import Bounded, exact_kl
from keel.rollout.batch import Rows, Sampled, obs_rows, rows_of
from keel.rollout.collect import Collected
from keel.types import Rollout

STATISTICS_SHARE = 0.25
"""Largest share of the bound for new observation statistics."""
TEMPERATURE_SHARE = 0.5
"""Largest share of the bound for new statistics and another temperature together."""


class Shift(NamedTuple):
    """The policy before an update, as far as it is not its parameters."""

    rollout: Rollout
    """with observations as they will be normalised"""
    normaliser: ObsNormaliser | None
    temperature: float
    changed: bool
    """False: the policy is still the one that sampled"""
    metrics: dict[str, float]


def shift(
    agent: Agent,
    params: Tensor,
    collected: Collected,
    normaliser: ObsNormaliser | None,
    wanted: float,
    bound: float,
) -> Shift:
    """Move statistics and temperature as far as their shares of the bound allow.

    Args:
        agent: whose policy it is.
        params: `[G, P]`, those that sampled.
        collected: the rollout.
        normaliser: of observations, as it was while sampling.
        wanted: temperature to go to, from that of the rollout.
        bound: on the KL of an update; infinite where nothing is enforced.
    """
    device, rollout, temperature = params.device, collected.rollout, collected.rollout.temperature
    rows = rows_of(rollout.to(device))
    kl_normaliser = kl_temperature = 0.0
    changed = False
    if normaliser is not None and collected.raw is not None:
        seen = normaliser.absorb(collected.raw.rows, rollout.weight.numpy())

        def shown(share: float) -> Rows:
            anew = collected.normalised_by(seen.settle(share)).to(device)
            return replace(rows, obs=obs_rows(anew.obs, anew))

        sampled = Sampled(rows.obs, temperature)

        def kl_of(share: float) -> Tensor:
            moved = replace(shown(share), sampled=sampled)
            return Bounded(agent, params, moved, temperature).kl(params)

        share, kl_normaliser = _largest_share(kl_of, STATISTICS_SHARE * bound)
        normaliser, changed = seen.settle(share), share > 0.0
        rollout, rows = collected.normalised_by(normaliser), shown(share)
    if wanted != temperature:
        start = temperature

        def heated(share: float) -> float:
            return wanted if share == 1.0 else start * (wanted / start) ** share

        share, kl = _largest_share(
            lambda share: exact_kl(agent, params, rows, heated(share)), TEMPERATURE_SHARE * bound
        )
        temperature, changed, kl_temperature = heated(share), changed or share > 0.0, kl
    metrics = {"train/kl_normaliser": kl_normaliser, "train/kl_temperature": kl_temperature}
    return Shift(rollout, normaliser, temperature, changed, metrics)


def _largest_share(kl_of: Callable[[float], Tensor], bound: float) -> tuple[float, float]:
    """Return the share of a change, of all agents together, whose KL is inside a bound; its KL."""

    def kl_at(share: Tensor) -> Tensor:
        return kl_of(share.item()).max().cpu().reshape(1)

    if bound == torch.inf:
        return 1.0, kl_at(torch.ones(1)).item()
    result = walk_back(kl_at, bound)
    return result.fraction.item(), result.kl.item()
