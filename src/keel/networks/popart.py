"""Returns in units of the critic's own: as they are, minus a shift, over a scale.

Both stand behind the critic's parameters, in the same matrix and with no gradient: so they are
saved, restored and copied with them. When they move, the critic's last layer moves the other way
(van Hasselt et al. 2016, "PopArt"), and what it says in units of reward stays what it was; a
histogram cannot be moved so, and learns the little that its units drift in an update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keel.networks.agent import FRESH_UNITS, Agent

RATE = 0.02
"""Rate of the moving averages from 50 updates on; before, all updates count alike."""


def in_reward(params: Tensor, value: Tensor) -> Tensor:
    """Convert a value in the critic's units to units of reward.

    Args:
        params: `[G, P]`.
        value: `[*lead]`; with several agents the last axis is theirs.
    """
    shift, scale = _units(params, value)
    return value * scale + shift


def in_units(params: Tensor, value: Tensor) -> Tensor:
    """Convert a value in units of reward to the critic's units.

    Args:
        params: `[G, P]`.
        value: `[*lead]`; with several agents the last axis is theirs.
    """
    shift, scale = _units(params, value)
    return (value - shift) / scale


def _units(params: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return shift and scale of a single agent, or of each agent on the last axis of `value`."""
    shift, scale, _ = params.detach()[:, -len(FRESH_UNITS) :].unbind(1)
    return (shift[0], scale[0]) if len(params) == 1 else (shift, scale)


def rescale_critic(agent: Agent, params: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return parameters with moved units and a last layer that keeps the values (van Hasselt 2016).

    Args:
        agent: the agent.
        params: `[G, P]`.
        mean: `[A]`, of the targets of an update.
        variance: `[A]`, of the same targets.
    """
    mean, variance = _pooled(agent, mean, variance)
    shift, scale, updates = params[:, -len(FRESH_UNITS) :].unbind(1)
    rate = torch.clamp(1.0 / (updates + 1.0), min=RATE)
    new_shift = shift + rate * (mean.to(shift) - shift)
    second = (1.0 - rate) * (scale**2 + shift**2) + rate * (variance + mean**2).to(shift)
    spread = (second - new_shift**2).clamp(min=0.0).sqrt()
    # returns that do not vary have no scale of their own
    new_scale = torch.where(spread > 1e-4 * (1.0 + new_shift.abs()), spread, scale)
    moved = params.clone()
    count = agent.critic.affine
    if count:
        _move_last_layer(agent, moved, count, scale / new_scale, (shift - new_shift) / new_scale)
    moved[:, -len(FRESH_UNITS) :] = torch.stack([new_shift, new_scale, updates + 1.0], 1)
    return moved


def _pooled(agent: Agent, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return moments `[G]` of the targets of all agents that share a row."""
    rows = [[*agent.who(row)] for row in range(agent.groups)]
    if len(rows) == len(mean):
        return mean, variance
    means = torch.stack([mean[own].mean() for own in rows])
    apart = torch.stack([mean[own].var(correction=0) for own in rows])
    return means, torch.stack([variance[own].mean() for own in rows]) + apart


def _move_last_layer(
    agent: Agent, params: Tensor, count: int, factor: Tensor, offset: Tensor
) -> None:
    """Make the first `count` outputs x of the critic factor·x + offset, in place."""
    weight, bias, _ = agent.layout.names[-3:]
    assert weight.endswith("weight")
    assert bias.endswith("bias")
    width = agent.layout.shapes[-3][1]
    start = agent.layout.slice_of(weight).start
    params[:, start : start + count * width] *= factor[:, None]
    start = agent.layout.slice_of(bias).start
    params[:, start : start + count] *= factor[:, None]
    params[:, start : start + count] += offset[:, None]
