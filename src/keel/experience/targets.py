"""Advantages and critic targets of an update, from rewards and values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from keel.config import Advantage
from keel.config.common import ADVANTAGES, GROUPS
from keel.errors import InputError
from keel.experience.batch import Targets
from keel.experience.rollout import Rollout
from keel.functional.advantage import Advantages, gae, normalize
from keel.networks.actor_critic import Scalar
from keel.networks.agent import Agent
from keel.registry import as_function
from keel.types import CRITIC_HIDDEN_STATE, EPISODE_STARTS, GROUP


def compute_targets(
    agent: Agent,
    params: Tensor,
    rollout: Rollout,
    config: Advantage,
    value: Tensor | None = None,
    rng: torch.Generator | None = None,
) -> tuple[Targets, dict[str, float]]:
    """Compute advantages and targets, as rows, and their statistics.

    Args:
        agent: the agent.
        params: `[G, P]`, those of the critic.
        rollout: `[T, N, …]`.
        config: how advantages are computed and normalized.
        value: `[T, N]`, saves a pass where the values of the rollout are already known.
        rng: a distributional critic learns samples of the return; without, its λ-returns.
    """
    outputs = _outputs(agent, params, rollout, value)
    values = outputs.map(lambda raw: agent.value_of(params, raw))
    if config.estimator == "gae":
        raw = _gae(rollout, values, config.gamma, config.lam)
    else:
        raw = _estimate(rollout, values, config)
    group = group_of(rollout, config)
    scaled = normalize(
        raw.advantage,
        config.normalize,
        weight=rollout.weight,
        group=group,
        groups=1 if group is None else int(group.max()) + 1,
        clamp=config.clamp,
    )
    statistics = _statistics(raw, scaled.advantage, rollout.weight, values.rows)
    statistics["train/advantage_sign_flips"] = float(scaled.sign_flips)
    for a, name in enumerate(rollout.agents):
        own = [x[:, :, a] for x in (raw.target, rollout.weight, values.rows)]
        statistics[f"train/explained_variance/{name}"] = _explained(*own)
    target = raw.target
    if not isinstance(agent.critic, Scalar):
        from keel.networks.critics import calibration

        if rng is not None:
            target = _sampled(agent, params, rollout, outputs, config, rng)
        counted = rollout.weight > 0
        aim = agent.target_of(params, target)
        statistics |= calibration(agent.critic, outputs.rows[counted], aim[counted])
    tree = {"advantage": scaled.advantage, "target": target, "raw": outputs.rows}
    return Targets(**rollout.as_rows(tree)), statistics


def group_function(config: Advantage) -> Callable[..., Any] | None:
    """Import the function that `advantage.group` names; None where no function is used.

    Raises:
        InputError: in one line, where it cannot be imported or called with observations.
    """
    if not config.group or config.normalize not in ("group", "robust"):
        return None
    function = GROUPS.get(config.group)
    try:
        return as_function(function, config.group, takes=["the observations"])
    except InputError as error:
        raise InputError(f"advantage.group: {error}") from error


def check_groups(config: Advantage, keys: Collection[str], many: bool) -> None:
    """Raise unless groups are known where advantages are normalized within them.

    Args:
        config: how advantages are normalized.
        keys: of the observations; the group that an environment's info names is among them.
        many: whether there are several agents, each of which is a group where no other is named.
    """
    if config.normalize == "group" and not (config.group or many or GROUP in keys):
        raise InputError(
            "advantage.normalize group: the environment names no group; give info['group'] "
            "with every reset and step, or a function: --advantage.group module:function"
        )


def group_of(rollout: Rollout, config: Advantage) -> Tensor | None:
    """Return the group of every row `[T, N]`, where advantages are normalized within groups."""
    if config.normalize != "group" and not (config.normalize == "robust" and config.group):
        return None
    function = group_function(config)
    if function is None:
        check_groups(config, rollout.obs, rollout.group_axis is not None)
        if GROUP not in rollout.obs and rollout.group_axis is not None:
            agents = torch.arange(rollout.weight.shape[rollout.group_axis])
            return agents.to(rollout.weight.device).expand(rollout.weight.shape)
        return rollout.obs[GROUP].long()
    observations = {key: x.cpu().numpy() for key, x in rollout.obs.items()}
    groups = np.asarray(function(observations))
    shape = tuple(rollout.weight.shape)
    if groups.shape != shape or not np.issubdtype(groups.dtype, np.integer) or groups.min() < 0:
        raise InputError(
            f"{config.group}: expected whole numbers from 0, {list(shape)}, "
            f"got {groups.dtype} {list(groups.shape)}"
        )
    return torch.from_numpy(groups.astype(np.int64)).to(rollout.weight.device)


class _CriticOutputs(NamedTuple):
    """Outputs of the critic: raw, with an axis Q at the end, or values."""

    rows: Tensor
    """`[T, N]`"""
    last: Tensor
    """`[N]`: after the last row"""
    final: Tensor
    """`[T, N]`: of what follows each row, were its episode to go on"""

    def map(self, function: Callable[[Tensor], Tensor]) -> _CriticOutputs:
        return _CriticOutputs(*map(function, self))


def _gae(rollout: Rollout, values: _CriticOutputs, gamma: float, lam: float | Tensor) -> Advantages:
    return gae(
        rollout.reward,
        values.rows,
        values.last,
        rollout.terminated,
        rollout.truncated,
        values.final,
        gamma=gamma,
        lam=lam,
        weight=rollout.weight,
    )


def _estimate(rollout: Rollout, values: _CriticOutputs, config: Advantage) -> Advantages:
    """Call an estimator of the user's own, with those of these arguments that it names.

    `reward`, `value`, `terminated`, `truncated`, `weight` (0 for rows that do not count) and
    `final_value` (of what follows each row, were its episode to go on) are `[T, N]`, of several
    agents `[T, N, A]`; `last_value`, after the last row, is `[N]`; `gamma` and `lam` are numbers.
    It returns advantages and value targets, `[T, N]` each; rows of weight 0 may hold anything.
    """
    function: Callable[..., Any] = ADVANTAGES.get(config.estimator)
    given = {
        "reward": rollout.reward,
        "value": values.rows,
        "last_value": values.last,
        "terminated": rollout.terminated,
        "truncated": rollout.truncated,
        "final_value": values.final,
        "weight": rollout.weight,
        "gamma": config.gamma,
        "lam": config.lam,
    }
    names = inspect.signature(function).parameters.values()
    if not any(name.kind is name.VAR_KEYWORD for name in names):
        given = {name.name: given[name.name] for name in names if name.name in given}
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        raise InputError(f"advantage.estimator {config.estimator}: {error}") from error
    result = function(**given)
    shape = rollout.reward.shape
    if (
        not isinstance(result, tuple)
        or len(result) != 2
        or not all(isinstance(x, Tensor) and x.shape == shape for x in result)
    ):
        raise InputError(
            f"advantage.estimator {config.estimator}: expected (advantage, target), two tensors "
            f"{list(shape)}"
        )
    counts = rollout.weight > 0
    return Advantages(*(torch.where(counts, x, 0.0) for x in result))


def _sampled(
    agent: Agent,
    params: Tensor,
    rollout: Rollout,
    outputs: _CriticOutputs,
    config: Advantage,
    rng: torch.Generator,
) -> Tensor:
    """Draw a sample of each row's return (SR(λ), Nam et al. 2021).

    Rewards are followed for a number of steps that λ draws, and from there on it is a sample of the
    critic's distribution.
    """
    critic = agent.critic
    assert not isinstance(critic, Scalar)
    from keel.networks.critics import draw

    def sample(raw: Tensor) -> Tensor:
        return agent.in_reward(params, draw(critic, raw, rng))

    rows, last = sample(outputs.rows), sample(outputs.last)
    # what follows a row is the next row: one sample for both, but for truncated episodes
    following = torch.cat([rows[1:], last[None]])
    final = torch.where(rollout.truncated, sample(outputs.final), following)
    followed = torch.rand(rows.shape, generator=rng).to(rows.device) < config.lam
    return _gae(
        rollout, _CriticOutputs(rows, last, final), config.gamma, followed.to(rows.dtype)
    ).target


def _outputs(
    agent: Agent, params: Tensor, rollout: Rollout, value: Tensor | None
) -> _CriticOutputs:
    """Return raw outputs.

    Under next-step autoreset the row after a truncation holds the final observation; under
    same-step autoreset it is `Rollout.final_obs`.
    """
    hidden_state: Tensor | None = None
    if agent.recurrent:
        rows, last, hidden_state = _sequence_outputs(agent, params, rollout)
    else:
        if value is not None and isinstance(agent.critic, Scalar):
            # a scalar critic's value is its raw output, but for the units
            rows = agent.target_of(params, value)[..., None]
        else:
            flat = {key: x.reshape(-1, *x.shape[2:]) for key, x in rollout.obs.items()}
            rows = agent.raw_value(params, flat).reshape(*rollout.reward.shape, -1)
        last = agent.raw_value(params, rollout.last_obs)
    following = torch.cat([rows[1:], last[None]])
    if rollout.final_obs is None or rollout.final_index is None:
        return _CriticOutputs(rows, last, following)
    obs = rollout.final_obs
    if agent.recurrent:
        obs = {key: x[:, None] for key, x in obs.items()}
        obs[EPISODE_STARTS] = torch.zeros(len(rollout.final_index), 1, device=rows.device)
        if hidden_state is not None:  # each goes on from the state after its row
            obs[CRITIC_HIDDEN_STATE] = hidden_state.flatten(0, 1)[rollout.final_index]
    single = rows.shape[2:]  # of one environment: `[Q]`, or `[A, Q]`
    final = agent.raw_value(params, obs).reshape(-1, *single)
    mended = following.reshape(-1, *single).index_copy(0, rollout.final_index, final)
    return _CriticOutputs(rows, last, mended.reshape(rows.shape))


def _sequence_outputs(
    agent: Agent, params: Tensor, rollout: Rollout
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run over every sequence and the observation after it: raw outputs `[T, N, Q]` and `[N, Q]`,
    and hidden states `[T, N, H]`."""
    longer = {key: torch.cat([x, rollout.last_obs[key][None]]) for key, x in rollout.obs.items()}
    outputs = agent.outputs(params, rollout.obs_rows(longer), "critic")
    assert outputs.value is not None
    assert outputs.hidden_state is not None
    raw = outputs.value.transpose(0, 1)
    hidden_state = outputs.hidden_state.get(CRITIC_HIDDEN_STATE)
    return raw[:-1], raw[-1], None if hidden_state is None else hidden_state.transpose(0, 1)[:-1]


def _statistics(raw: Advantages, scaled: Tensor, weight: Tensor, value: Tensor) -> dict[str, float]:
    counted = weight > 0
    before, after = raw.advantage[counted], scaled[counted]
    target, predicted = raw.target[counted], value[counted]
    return {
        **_describe("train/advantage_raw", before),
        **_describe("train/advantage", after),
        "train/target_mean": target.mean().item(),
        "train/target_std": target.std().item(),
        "train/value_mean": predicted.mean().item(),
        "train/explained_variance": _explained(raw.target, weight, value),
    }


def _explained(target: Tensor, weight: Tensor, value: Tensor) -> float:
    counted = weight > 0
    target, value = target[counted], value[counted]
    spread = target.var()
    return 1.0 - ((target - value).var() / spread).item() if spread > 0 else math.nan


def _describe(name: str, x: Tensor) -> dict[str, float]:
    if not x.numel():
        x = x.new_full((1,), torch.nan)
    return {
        f"{name}_min": x.min().item(),
        f"{name}_max": x.max().item(),
        f"{name}_mean": x.mean().item(),
        f"{name}_std": x.std().item() if x.numel() > 1 else 0.0,
    }
