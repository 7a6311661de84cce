"""What went wrong in note 000, on purpose: to measure what each fault does, and to see it found."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from keel.config import Faults
from keel.functional import Advantages, gae
from keel.keys import MASK
from keel.models.agent import Agent
from keel.types import Rollout


def broken(rollout: Rollout, agent: Agent, params: Tensor, faults: Faults) -> Rollout:
    """The rollout as a program with these faults would have stored it."""
    if faults.wrong_actor:
        rollout = _by_the_first(rollout, agent, params)
    if faults.mask_drift and MASK in rollout.obs:
        rollout = replace(rollout, obs=rollout.obs | {MASK: _drifted(rollout)})
    return rollout


def _by_the_first(rollout: Rollout, agent: Agent, params: Tensor) -> Rollout:
    """Everybody's old distribution by the first agent's actor."""
    same = params[:1].expand_as(params)
    with torch.no_grad():
        flat = {key: x.flatten(0, 1) for key, x in rollout.obs.items()}
        found = agent.policy(same, flat, rollout.temperature)
        behaviour = {
            key: x.reshape(*rollout.log_prob.shape, *x.shape[2:]) for key, x in found.items()
        }
    log_prob = agent.dist.log_prob(behaviour, rollout.action)
    return replace(rollout, behaviour=behaviour, log_prob=log_prob)


def _drifted(rollout: Rollout) -> Tensor:
    """The mask of the step after; what was done stays legal, or it could not be evaluated."""
    last = rollout.last_obs[MASK]
    mask = torch.cat([rollout.obs[MASK][1:], last[None]]).clone()
    return mask.scatter(-1, rollout.action.long()[..., None], True)


def interleaved(
    reward: Tensor,
    value: Tensor,
    last: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    weight: Tensor,
) -> Advantages:
    """GAE of `[T, N, A]` as if agents acted one after the other in one episode `[T·A, N]`."""
    agents = reward.shape[2]

    def line(x: Tensor) -> Tensor:
        return x.movedim(2, 1).flatten(0, 1)

    rows = line(value)
    following = torch.cat([rows[1:], last[None, :, 0]])
    # only the last agent of a step ends anything
    ends = (torch.arange(len(rows), device=rows.device) % agents == agents - 1)[:, None]
    over, cut = line(terminated) & ends, line(truncated) & ends
    found = gae(
        line(reward),
        rows,
        last[:, 0],
        over,
        cut,
        torch.where(over | cut, line(final), following),
        gamma=gamma,
        lam=line(lam) if isinstance(lam, Tensor) else lam,
        weight=line(weight),
    )

    def back(x: Tensor) -> Tensor:
        return x.reshape(-1, agents, x.shape[1]).movedim(1, 2)

    return Advantages(*map(back, found))
