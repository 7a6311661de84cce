"""Demonstrations as an update takes them: sampled, normalised and weighted."""

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
from keel.functional import cloning_weight, gae
from keel.keys import MASK
from keel.models.agent import Agent
from keel.models.sampling import from_env
from keel.rollout.batch import DemoBatch
from keel.rollout.demos import Demos, check_fits, load_demos, only
from keel.rollout.minari_data import from_minari

Array = NDArray[Any]
CHUNK, CHUNK_PIXELS = 4096, 512
"""Steps that the critic looks at in one go."""


def open_demos(name: str, episodes: int | None = None) -> Demos:
    """The demonstrations of a folder, or of minari:ID; all of their episodes, or the first."""
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
    """All that was shown, ready to be sampled from."""

    obs: Obs
    """`[n, …]` raw"""
    action: Tensor
    """`[n]` or `[n, D]`, as the distribution takes it"""
    reward: Array
    """`[n]` raw"""
    terminated: Tensor
    truncated: Tensor
    fingerprint: str
    """of the data: a resumed run must learn from the same"""

    @property
    def steps(self) -> int:
        """How many there are."""
        return len(self.reward)


def open_demo_dataset(config: Demonstrations, envs: Envs, agent: Agent, seen: Obs) -> DemoDataset:
    """Read demonstrations and hold them against what the policy can see and do.

    `seen` are observations of the run: those of its keys, a mask among them, are learned from.
    """
    demos = open_demos(config.path, config.episodes)
    check_fits(demos, envs.observation_space, envs.action_space, config.path)
    if agent.groups > 1:
        raise InputError("demos.path: several agents at once cannot learn from demonstrations")
    if MASK in seen and MASK not in demos.obs:
        raise InputError(f"{config.path}: no {MASK}, which the environment gives with every step")
    action = from_env(agent.dist, demos.action)
    if action.dtype.kind == "f":
        action = action.astype(np.float32)
    return DemoDataset(
        obs={key: np.asarray(x) for key, x in demos.obs.items() if key in seen},
        action=torch.from_numpy(np.ascontiguousarray(action)),
        reward=demos.reward,
        terminated=torch.from_numpy(demos.terminated),
        truncated=torch.from_numpy(demos.truncated),
        fingerprint=demos.fingerprint,
    )


def sample_demos(
    lessons: DemoDataset,
    agent: Agent,
    params: Tensor,
    count: int,
    rng: torch.Generator,
    config: Demonstrations,
    *,
    gamma: float,
    see: Callable[[Obs], Obs],
    worth: Callable[[Array], Array],
) -> tuple[DemoBatch, dict[str, float]]:
    """`count` steps, drawn anew, with their weights; and what there is to say about them.

    Args:
        see: observations as the network sees them.
        worth: rewards as the critic counts them.
    """
    index = torch.randint(lessons.steps, (count,), generator=rng)
    device = params.device

    def seen(rows: Tensor) -> dict[str, Tensor]:
        found = see({key: x[rows.numpy()] for key, x in lessons.obs.items()})
        return {k: torch.from_numpy(np.ascontiguousarray(x)).to(device) for k, x in found.items()}

    obs = seen(index)
    metrics: dict[str, float] = {}
    if config.loss == "plain":
        weight = torch.ones(count, device=device)
    else:
        earned = _returns(lessons, agent, params, gamma, seen, worth)
        advantage = earned[index.to(device)] - _values(agent, params, obs)
        found = cloning_weight(
            advantage, config.loss, temperature=config.temperature, cap=config.cap
        )
        weight = found.weight.float()
        metrics["train/bc_advantage_mean"] = advantage.mean().item()
        if config.loss == "filtered":
            metrics["train/bc_share_used"] = found.used.item()
        else:
            metrics["train/bc_share_at_cap"] = found.at_cap.item()
    action = lessons.action[index].to(device)
    return DemoBatch(obs, action, weight, torch.ones(count, device=device)), metrics


def _returns(
    lessons: DemoDataset,
    agent: Agent,
    params: Tensor,
    gamma: float,
    seen: Callable[[Tensor], dict[str, Tensor]],
    worth: Callable[[Array], Array],
) -> Tensor:
    """`[n]`: the discounted return from every step on. What was cut off is worth what the critic
    says of the last state that was seen: the one after it was not recorded."""
    device = params.device
    reward = torch.from_numpy(np.asarray(worth(lessons.reward), np.float32)).to(device)
    terminated, truncated = lessons.terminated.to(device), lessons.truncated.to(device)
    final = torch.zeros_like(reward)
    cut = truncated.nonzero()[:, 0]
    if cut.numel():
        final[cut] = _values(agent, params, seen(cut.cpu()))
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
