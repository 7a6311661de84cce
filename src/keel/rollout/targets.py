"""From rewards and values to what the update learns: advantages and critic targets."""

from __future__ import annotations

import torch
from torch import Tensor

from keel.config import Advantage
from keel.functional import Advantages, gae, normalise
from keel.models.agent import Agent
from keel.types import Rollout


def compute_targets(
    agent: Agent,
    params: Tensor,
    rollout: Rollout,
    config: Advantage,
    value: Tensor | None = None,
) -> tuple[Advantages, dict[str, float]]:
    """Advantages and targets `[T·N, …]` with the critic at `params`, and their statistics.

    `value` `[T, N]` saves a pass where the values of the rollout are already known.
    """
    if value is None:
        value = agent.value(params, _flat(rollout.obs)).reshape(rollout.reward.shape)
    last = agent.value(params, rollout.last_obs).squeeze(-1)
    raw = gae(
        rollout.reward,
        value,
        last,
        rollout.terminated,
        rollout.truncated,
        _final_values(agent, params, rollout, value, last),
        gamma=config.gamma,
        lam=config.lam,
        weight=rollout.weight,
    )
    scaled = normalise(raw.advantage, config.normalise, weight=rollout.weight, clamp=config.clamp)
    statistics = _statistics(raw, scaled.advantage, rollout.weight, value)
    statistics["train/advantage_sign_flips"] = float(scaled.sign_flips)
    flat = Advantages(scaled.advantage.reshape(-1), raw.target.reshape(-1))
    return flat, statistics


def _flat(obs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: x.reshape(-1, *x.shape[2:]) for key, x in obs.items()}


def _final_values(
    agent: Agent, params: Tensor, rollout: Rollout, value: Tensor, last: Tensor
) -> Tensor:
    """V of the observation that follows each row, were its episode to go on.

    Under next-step autoreset the row after a truncation holds the final observation; under
    same-step autoreset it was kept apart.
    """
    following = torch.cat([value[1:], last[None]])
    if rollout.final_obs is None or rollout.final_index is None:
        return following
    final = agent.value(params, rollout.final_obs).squeeze(-1)
    return following.reshape(-1).index_copy(0, rollout.final_index, final).reshape(value.shape)


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
    return {
        f"{name}_min": x.min().item(),
        f"{name}_max": x.max().item(),
        f"{name}_mean": x.mean().item(),
        f"{name}_std": x.std().item() if x.numel() > 1 else 0.0,
    }
