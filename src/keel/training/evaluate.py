"""Evaluation: whole episodes with a frozen policy, in environments of their own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from torch import Tensor

from keel.envs import Envs, ObsNormaliser, lead
from keel.keys import MASK
from keel.models.acting import blank_memory, make_actor
from keel.models.agent import Agent
from keel.models.memory import STARTS
from keel.models.sampling import draw_noise, mode, sample, to_env

MAX_EPISODE = 1_000_000
"""Steps after which an episode that does not end is given up."""


class Score(NamedTuple):
    """Raw returns and lengths of the episodes, in the order of environments."""

    returns: list[float]
    lengths: list[int]
    agents: Mapping[str, list[float]] = MappingProxyType({})
    """returns of each of several agents, whose sum is the episode's"""

    def metrics(self) -> dict[str, float]:
        """As the registry names them."""
        return {
            **{f"eval/return_mean/{who}": float(np.mean(x)) for who, x in self.agents.items()},
            "eval/return_mean": float(np.mean(self.returns)),
            "eval/return_std": float(np.std(self.returns)),
            "eval/length_mean": float(np.mean(self.lengths)),
            "eval/episodes": float(len(self.returns)),
        }


def evaluate(
    agent: Agent,
    params: Tensor,
    envs: Envs,
    normaliser: ObsNormaliser | None,
    *,
    episodes: int,
    deterministic: bool,
    seed: int,
) -> Score:
    """`episodes` whole episodes, equally many from every environment: short ones are not favoured.

    The environments are reset first, so that the result depends on the policy and the seed alone.
    """
    quota = -(-episodes // envs.num_envs)
    rng = np.random.default_rng(seed)
    act = make_actor(agent, params)
    obs = envs.reset(seed)
    rows = lead(envs)
    output = np.zeros((*rows, agent.dist.outputs), np.float32)
    memory, starts = blank_memory(agent, envs.num_envs), np.ones(envs.num_envs, bool)
    returns: list[list[float]] = [[] for _ in range(envs.num_envs)]
    lengths: list[list[int]] = [[] for _ in range(envs.num_envs)]
    each: list[list[np.ndarray]] = [[] for _ in range(envs.num_envs)]
    for _ in range(MAX_EPISODE):
        seen = obs if normaliser is None else normaliser.apply(obs)
        mask = seen.get(MASK)
        if memory:
            seen = {**seen, **memory, STARTS: starts}
        memory = act(seen, output).memory or {}
        if deterministic:
            action = mode(agent.dist, output, mask)
        else:
            noise = draw_noise(agent.dist, rows, rng)
            action = sample(agent.dist, output, mask, 1.0, noise)
        step = envs.step(to_env(agent.dist, action))
        obs, starts = step.obs, step.ignored
        if envs.autoreset == "same_step":
            starts = starts | step.terminated | step.truncated
        ended = zip(step.episode_index, step.episode_return, step.episode_length, strict=True)
        for index, total, length in ended:
            returns[index].append(float(total))
            lengths[index].append(int(length))
        if step.agent_return is not None:
            for index, own in zip(step.episode_index, step.agent_return, strict=True):
                each[index].append(own)
        if step.episode_index.size and min(map(len, returns)) >= quota:
            break
    flat_returns = [x for row in returns for x in row[:quota]][:episodes]
    flat_lengths = [x for row in lengths for x in row[:quota]][:episodes]
    flat_each = [x for row in each for x in row[:quota]][:episodes]
    agents = {who: [float(x[a]) for x in flat_each] for a, who in enumerate(envs.agents)}
    return Score(flat_returns, flat_lengths, agents)
