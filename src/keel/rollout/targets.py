"""From rewards and values to what the update learns: advantages and critic targets."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keel.config import Advantage
from keel.functional import Advantages, gae, normalise
from keel.models.agent import Agent
from keel.models.critics import Histogram, Quantile, Scalar, calibration
from keel.models.memory import CRITIC, STARTS
from keel.rollout.batch import Learned, as_rows, obs_rows
from keel.types import Rollout


def compute_targets(
    agent: Agent,
    params: Tensor,
    rollout: Rollout,
    config: Advantage,
    value: Tensor | None = None,
) -> tuple[Learned, dict[str, float]]:
    """Advantages and targets with the critic at `params`, as `rows_of` orders them; statistics.

    `value` `[T, N]` saves a pass where the values of the rollout are already known.
    """
    values = _values(agent, params, rollout, value)
    raw = gae(
        rollout.reward,
        values.value,
        values.last,
        rollout.terminated,
        rollout.truncated,
        values.final,
        gamma=config.gamma,
        lam=config.lam,
        weight=rollout.weight,
    )
    scaled = normalise(raw.advantage, config.normalise, weight=rollout.weight, clamp=config.clamp)
    statistics = _statistics(raw, scaled.advantage, rollout.weight, values.value)
    statistics["train/advantage_sign_flips"] = float(scaled.sign_flips)
    if values.raw is not None and isinstance(agent.critic, Quantile | Histogram):
        counted = rollout.weight > 0
        aim = agent.target_of(params, raw.target)
        statistics |= calibration(agent.critic, values.raw[counted], aim[counted])
    said = values.raw
    if said is None:  # a scalar critic's value is its raw output, but for the units
        said = agent.target_of(params, values.value)[..., None]
    learned = {"advantage": scaled.advantage, "target": raw.target, "raw": said}
    return Learned(**as_rows(learned, rollout)), statistics


class _Values(NamedTuple):
    value: Tensor
    """`[T, N]`"""
    last: Tensor
    """`[N]`: after the last row"""
    final: Tensor
    """`[T, N]`: of what follows each row, were its episode to go on"""
    raw: Tensor | None
    """`[T, N, Q]`: the critic's raw outputs, where they were asked for"""


def _values(agent: Agent, params: Tensor, rollout: Rollout, known: Tensor | None) -> _Values:
    """Under next-step autoreset the row after a truncation holds the final observation; under
    same-step autoreset it was kept apart."""
    memory: Tensor | None = None
    raw: Tensor | None = None
    if agent.memory:
        raw, last, memory = _sequence_values(agent, params, rollout)
        value = agent.value_of(params, raw)
    elif known is not None and isinstance(agent.critic, Scalar):
        value = known
        last = agent.value(params, rollout.last_obs)
    else:
        rows = {key: x.reshape(-1, *x.shape[2:]) for key, x in rollout.obs.items()}
        raw = agent.raw_value(params, rows).reshape(*rollout.reward.shape, -1)
        value = agent.value_of(params, raw)
        last = agent.value(params, rollout.last_obs)
    following = torch.cat([value[1:], last[None]])
    if rollout.final_obs is None or rollout.final_index is None:
        return _Values(value, last, following, raw)
    obs = rollout.final_obs
    if agent.memory:
        obs = {key: x[:, None] for key, x in obs.items()}
        obs[STARTS] = torch.zeros(len(rollout.final_index), 1, device=value.device)
        if memory is not None:  # each goes on from the state after its row
            obs[CRITIC] = memory.flatten(0, 1)[rollout.final_index]
    final = agent.value(params, obs).reshape(-1)
    mended = following.reshape(-1).index_copy(0, rollout.final_index, final)
    return _Values(value, last, mended.reshape(value.shape), raw)


def _sequence_values(
    agent: Agent, params: Tensor, rollout: Rollout
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One pass over every sequence and the observation after it: raw outputs `[T, N, Q]`, the last
    value `[N]`, and the states `[T, N, H]`."""
    longer = {key: torch.cat([x, rollout.last_obs[key][None]]) for key, x in rollout.obs.items()}
    outputs = agent.outputs(params, obs_rows(longer, rollout), "critic")
    assert outputs.value is not None
    assert outputs.memory is not None
    raw = outputs.value.transpose(0, 1)
    memory = outputs.memory.get(CRITIC)
    last = agent.value_of(params, raw[-1])
    return raw[:-1], last, None if memory is None else memory.transpose(0, 1)[:-1]


def _statistics(raw: Advantages, scaled: Tensor, weight: Tensor, value: Tensor) -> dict[str, float]:
    counted = weight > 0
    before, after = raw.advantage[counted], scaled[counted]
    target, predicted = raw.target[counted], value[counted]
    spread = target.var()
    unexplained = (target - predicted).var() / spread if spread > 0 else torch.tensor(torch.nan)
    return {
        **_describe("train/advantage_raw", before),
        **_describe("train/advantage", after),
        "train/target_mean": target.mean().item(),
        "train/target_std": target.std().item(),
        "train/value_mean": predicted.mean().item(),
        "train/explained_variance": 1.0 - unexplained.item(),
    }


def _describe(name: str, x: Tensor) -> dict[str, float]:
    if not x.numel():
        x = x.new_full((1,), torch.nan)
    return {
        f"{name}_min": x.min().item(),
        f"{name}_max": x.max().item(),
        f"{name}_mean": x.mean().item(),
        f"{name}_std": x.std().item() if x.numel() > 1 else 0.0,
    }
