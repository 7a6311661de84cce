"""Demonstrations as an update takes them: sampled, normalized and weighted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keel.config import MINARI, Demonstrations
from keel.envs import Envs, Obs
from keel.errors import InputError
from keel.experience.batch import CHUNK, CHUNK_PIXELS, DemoBatch
from keel.experience.demo_files import Demos, check_fits, load_demos, only
from keel.experience.minari_data import from_minari
from keel.functional.advantage import gae
from keel.networks.agent import Agent
from keel.types import MASK

Array = NDArray[Any]


def open_demos(name: str, episodes: int | None = None) -> Demos:
    """Open the demonstrations of a folder, or of minari:ID; all of their episodes, or the first.

    Args:
        name: Folder, or `minari:ID`.
        episodes: Number of episodes to read, from the first on; None: all.
    """
    if name.startswith(MINARI):
        return from_minari(name.removeprefix(MINARI), episodes)
    demos = load_demos(Path(name))
    if episodes is None or episodes >= len(demos.lengths):
        return demos
    first = only(demos, [i < episodes for i in range(len(demos.lengths))])
    assert first is not None
    return first


@dataclass(frozen=True)
class DemoDataset:
    """Demonstrated steps, ready to be sampled from."""

    obs: Obs
    """`[n, …]` raw"""
    action: Tensor
    """`[n]` or `[n, D]`, as the distribution takes it"""
    reward: Array
    """`[n]` raw"""
    terminated: Tensor
    truncated: Tensor
    fingerprint: str
    """hash of the data: a resumed run must learn from the same"""

    @property
    def steps(self) -> int:
        """Number of steps n."""
        return len(self.reward)


def open_demo_dataset(config: Demonstrations, envs: Envs, agent: Agent, obs: Obs) -> DemoDataset:
    """Read demonstrations and hold them against what the policy can see and do.

    Args:
        config: settings of behavior cloning.
        envs: environments of the run.
        agent: the agent that learns.
        obs: observations of the run: those of its keys, a mask among them, are learned from.
    """
    demos = open_demos(config.path, config.episodes)
    check_fits(demos, envs.observation_space, envs.action_space, config.path)
    if agent.groups > 1:
        raise InputError("demos.path: several agents at once cannot learn from demonstrations")
    if MASK in obs and MASK not in demos.obs:
        raise InputError(f"{config.path}: no {MASK}, which the environment gives with every step")
    action = agent.dist.from_env(demos.action)
    if action.dtype.kind == "f":
        action = action.astype(np.float32)
    return DemoDataset(
        obs={key: np.asarray(x) for key, x in demos.obs.items() if key in obs},
        action=torch.from_numpy(np.ascontiguousarray(action)),
        reward=demos.reward,
        terminated=torch.from_numpy(demos.terminated),
        truncated=torch.from_numpy(demos.truncated),
        fingerprint=demos.fingerprint,
    )


def sample_demos(
    dataset: DemoDataset,
    agent: Agent,
    params: Tensor,
    count: int,
    rng: torch.Generator,
    config: Demonstrations,
    *,
    gamma: float,
    preprocess: Callable[[Obs], Obs],
    scale_reward: Callable[[Array], Array],
) -> tuple[DemoBatch, dict[str, float]]:
    """Draw demonstrated steps with their weights; return them and metrics about them.

    Args:
        dataset: all demonstrated steps.
        agent: a single agent.
        params: `[1, P]`, of the critic that values the steps.
        count: number of steps to draw.
        rng: source of the draws.
        config: settings of behavior cloning.
        gamma: discount factor γ.
        preprocess: maps raw observations to those that the network sees.
        scale_reward: maps raw rewards to those that the critic counts.
    """
    index = torch.randint(dataset.steps, (count,), generator=rng)
    device = params.device

    def obs_of(rows: Tensor) -> dict[str, Tensor]:
        obs = preprocess({key: x[rows.numpy()] for key, x in dataset.obs.items()})
        return {k: torch.from_numpy(np.ascontiguousarray(x)).to(device) for k, x in obs.items()}

    obs = obs_of(index)
    metrics: dict[str, float] = {}
    if config.loss == "plain":
        weight = torch.ones(count, device=device)
    else:
        earned = _returns(dataset, agent, params, gamma, obs_of, scale_reward)
        advantage = earned[index.to(device)] - _values(agent, params, obs)
        from keel.functional.cloning import cloning_weight

        weights = cloning_weight(
            advantage, config.loss, temperature=config.temperature, cap=config.cap
        )
        weight = weights.weight.float()
        metrics["train/bc_advantage_mean"] = advantage.mean().item()
        if config.loss == "filtered":
            metrics["train/bc_share_used"] = weights.used.item()
        else:
            metrics["train/bc_share_at_cap"] = weights.at_cap.item()
    action = dataset.action[index].to(device)
    return DemoBatch(obs, action, weight, torch.ones(count, device=device)), metrics


def _returns(
    dataset: DemoDataset,
    agent: Agent,
    params: Tensor,
    gamma: float,
    obs_of: Callable[[Tensor], dict[str, Tensor]],
    scale_reward: Callable[[Array], Array],
) -> Tensor:
    """Return the discounted return from every step on, `[n]`.

    An episode that was cut off ends with the critic's value of its last state: the one after it was
    not recorded.
    """
    device = params.device
    reward = torch.from_numpy(np.asarray(scale_reward(dataset.reward), np.float32)).to(device)
    terminated, truncated = dataset.terminated.to(device), dataset.truncated.to(device)
    final = torch.zeros_like(reward)
    cut = truncated.nonzero()[:, 0]
    if cut.numel():
        final[cut] = _values(agent, params, obs_of(cut.cpu()))
    nothing = torch.zeros_like(reward)
    return gae(
        reward, nothing, nothing[0], terminated, truncated, final, gamma=gamma, lam=1.0
    ).target


@torch.no_grad()
def _values(agent: Agent, params: Tensor, obs: dict[str, Tensor]) -> Tensor:
    count = next(iter(obs.values())).shape[0]
    size = CHUNK_PIXELS if any(x.ndim >= 4 for x in obs.values()) else CHUNK
    parts = [
        agent.value(params, {key: x[at : at + size] for key, x in obs.items()})
        for at in range(0, count, size)
    ]
    return torch.cat(parts)
