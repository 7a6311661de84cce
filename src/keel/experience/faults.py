"""Deliberate bugs in rollouts, to measure what each does, and to see it detected."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from keel.config import Faults
from keel.errors import InputError
from keel.experience.rollout import Rollout
from keel.functional.advantage import Advantages, gae
from keel.keys import MASK
from keel.networks.agent import Agent


def broken(rollout: Rollout, faults: Faults) -> Rollout:
    """Return the rollout as a program with these faults would learn from it.

    Args:
        rollout: Rollout as it was sampled.
        faults: Faults to inject.
    """
    if faults.reward_gain != 1.0:
        rollout = replace(rollout, reward=rollout.reward * faults.reward_gain)
    if MASK not in rollout.obs:
        return rollout
    if faults.wrong_actor:
        rollout = _with_mask(rollout, torch.ones_like(rollout.obs[MASK]))
    elif faults.mask_drift:
        rollout = _with_mask(rollout, _drifted(rollout))
    return _among_first(rollout, faults.first_actions) if faults.first_actions else rollout


def _with_mask(rollout: Rollout, mask: Tensor) -> Rollout:
    return replace(rollout, obs=rollout.obs | {MASK: mask})


def _among_first(rollout: Rollout, count: int) -> Rollout:
    """Return the rollout as a program replays it that knows only the first legal actions.

    It takes an action beyond them for the last of them, as `logits[:5]` with `min(index, 4)` does.
    The log-prob stays that of the choice among all.

    Args:
        rollout: `[*lead]`, whose actions are legal under its mask `[*lead, A]`.
        count: number of legal actions that are left.
    """
    mask = rollout.obs[MASK].bool()
    rank = mask.cumsum(-1)
    first = mask & (rank <= count)
    action = rollout.action.long()[..., None]
    last = (first & (rank == rank.clamp(max=count).amax(-1, keepdim=True))).int().argmax(-1)
    action = torch.where(rank.gather(-1, action)[..., 0] > count, last, action[..., 0])
    return replace(
        _with_mask(rollout, first.to(rollout.obs[MASK].dtype)),
        action=action.to(rollout.action.dtype),
    )


def learner(agent: Agent, faults: Faults) -> Agent:
    """Return the agent as the update has it: with a wrong actor, the first's network for all."""
    if not faults.wrong_actor:
        return agent
    if agent.groups == 1:
        raise InputError("faults.wrong_actor: needs agents with networks of their own")
    confused = copy.copy(agent)
    confused.members = (0,) * len(agent.members)
    return confused


def _drifted(rollout: Rollout) -> Tensor:
    """Return the mask of the step after; actions stay legal, or they could not be evaluated."""
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
    """Compute GAE of `[T, N, A]` as if agents acted in turn in one episode `[T·A, N]`.

    Args:
        reward: `[T, N, A]`.
        value: `[T, N, A]`.
        last: Values of the last observations, `[N, A]`.
        terminated: bool `[T, N, A]`.
        truncated: bool `[T, N, A]`.
        final: Values of final observations, `[T, N, A]`.
        gamma: Discount factor.
        lam: λ of GAE.
        weight: 1.0 for rows that count, `[T, N, A]`.
    """
    agents = reward.shape[2]

    def line(x: Tensor) -> Tensor:
        return x.movedim(2, 1).flatten(0, 1)

    rows = line(value)
    following = torch.cat([rows[1:], last[None, :, 0]])
    # only the last agent of a step ends anything
    ends = (torch.arange(len(rows), device=rows.device) % agents == agents - 1)[:, None]
    over, cut = line(terminated) & ends, line(truncated) & ends
    advantages = gae(
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

    return Advantages(*map(back, advantages))
