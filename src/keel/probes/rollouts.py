"""Rollouts without a policy: what an environment shows and pays, within a budget of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keel.envs import Envs
from keel.envs.check import choice_sizes, random_action
from keel.envs.protocol import Obs, lead
from keel.envs.spaces import action_layout
from keel.types import MASK

Choose = Callable[[Obs], np.ndarray]
"""From observations of N environments to their actions."""
ROWS = 20_000
"""Rows of observations that are kept at most."""


@dataclass
class Played:
    """What came of some steps."""

    rewards: list[np.ndarray] = field(default_factory=list)
    """of steps that count"""
    returns: list[float] = field(default_factory=list)
    """of whole episodes; several agents: their sum"""
    lengths: list[int] = field(default_factory=list)
    terminated: int = 0
    truncated: int = 0
    steps: int = 0
    seconds: float = 0.0
    obs: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """`[rows, …]` by key"""

    @property
    def reward(self) -> np.ndarray:
        """All rewards, `[steps]`."""
        return np.concatenate(self.rewards) if self.rewards else np.zeros(0)

    @property
    def is_bandit(self) -> bool:
        """Whether every episode is one step."""
        return bool(self.lengths) and max(self.lengths) == 1

    def rows(self, key: str, width: int) -> np.ndarray:
        """Return the observations of one key, `[rows, width]`."""
        return np.concatenate(self.obs[key]).reshape(-1, width).astype(np.float64)


def play(
    envs: Envs, choose: Choose, *, seed: int, steps: int, seconds: float, episodes: int = 0
) -> Played:
    """Play until one of the budgets is spent.

    Args:
        envs: The environments.
        choose: Chooses actions.
        seed: Of the environments.
        steps: Budget of steps of all environments together.
        seconds: Budget of time.
        episodes: Stop as soon as so many have ended; 0: never for that reason.
    """
    played, started = Played(), time.perf_counter()
    obs = envs.reset(seed)
    _keep(played, obs)
    while played.steps < steps and time.perf_counter() - started < seconds:
        step = envs.step(choose(obs))
        obs = step.obs
        counts = ~step.ignored
        played.steps += int(counts.sum())
        played.rewards.append(step.reward[counts])
        played.terminated += int(_ends(step.terminated, counts).sum())
        played.truncated += int(_ends(step.truncated & ~step.terminated, counts).sum())
        played.returns += step.episode_return.tolist()
        played.lengths += step.episode_length.tolist()
        _keep(played, obs)
        if episodes and len(played.returns) >= episodes:
            break
    played.seconds = time.perf_counter() - started
    return played


def _ends(flags: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return which environments ended, `[N]`; several agents share an episode."""
    ended = flags & counts
    return np.asarray(ended.any(axis=1) if ended.ndim == 2 else ended)


def _keep(played: Played, obs: Obs) -> None:
    for key, array in obs.items():
        parts = played.obs.setdefault(key, [])
        if key != MASK and sum(map(len, parts)) < ROWS:
            parts.append(array.copy())


def random_actions(envs: Envs, seed: int) -> Choose:
    """Return a chooser of random legal actions.

    Args:
        envs: The environments.
        seed: Of the actions.
    """
    rng = np.random.default_rng(seed)
    return lambda obs: random_action(envs, obs, rng)


def idle_actions(envs: Envs) -> Choose:
    """Return a chooser of the action that does least: 0, or the first legal one.

    Args:
        envs: The environments.
    """
    space: Any = envs.action_space
    count = lead(envs)

    def choose(obs: Obs) -> np.ndarray:
        if not action_layout(space).choices:
            return np.zeros((*count, *space.shape), space.dtype)
        sizes = choice_sizes(space)
        mask = obs.get(MASK, np.ones((*count, sizes.sum()), dtype=bool))
        parts = np.split(mask, np.cumsum(sizes)[:-1], axis=-1)
        first = [np.argmax(part, axis=-1) for part in parts]
        return np.stack(first, axis=-1) if space.shape else first[0]

    return choose
