"""What went wrong in note 000, on purpose: to measure what each fault does, and to see it found."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from keel.config import Faults
from keel.errors import InputError
from keel.functional import Advantages, gae
from keel.keys import MASK
from keel.models.agent import Agent
from keel.types import Rollout


def broken(rollout: Rollout, faults: Faults) -> Rollout:
    """The rollout as a program with these faults would learn from it."""
    if MASK not in rollout.obs:
        return rollout
    if faults.wrong_actor:
        return replace(rollout, obs=rollout.obs | {MASK: torch.ones_like(rollout.obs[MASK])})
    if faults.mask_drift:
        return replace(rollout, obs=rollout.obs | {MASK: _drifted(rollout)})
    return rollout


def learner(agent: Agent, faults: Faults) -> Agent:
    """The agent as the update has it: with a fault of note 000, the first's network for all."""
    if not faults.wrong_actor:
        return agent
    if agent.groups == 1:
        raise InputError("faults.wrong_actor: needs agents with networks of their own")
    confused = copy.copy(agent)
    confused.members = (0,) * len(agent.members)
    return confused


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
