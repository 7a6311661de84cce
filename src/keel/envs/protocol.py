"""Protocol of environments for the rest of Keel: one step for N of them, numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import gymnasium
import numpy as np

Obs = dict[str, np.ndarray]
"""Observations by key, leading axis N.

A plain space has the single key `"obs"`, a Dict space keeps its keys. What an environment gives as
action mask (in its info, or as an observation key) is `"action_mask"`, bool `[N, A]`, and is not
part of `observation_space`. `keel.envs.spaces` says how each space is laid out.
"""

Autoreset = Literal["next_step", "same_step"]
Saved = tuple[dict[str, np.ndarray], dict[str, Any]]
"""The state of environments: named arrays, and data that JSON can hold."""


class Step(NamedTuple):
    """Result of one step of N environments; the arrays belong to the caller."""

    obs: Obs
    """What the policy sees next: float32, uint8 for pixels, int64 for Discrete."""
    reward: np.ndarray
    """`[N]` float32."""
    terminated: np.ndarray
    """`[N]` bool: the task ended, the future is worth 0."""
    truncated: np.ndarray
    """`[N]` bool: time ran out, the future is worth the value of the final observation."""
    ignored: np.ndarray
    """`[N]` bool: the action did nothing (an autoreset row); mask it out of everything.

    A row that is ignored *and* truncated was lost with its worker: the episode was cut before it,
    so the row before it is to be treated as truncated, with what the policy saw as final
    observation.
    """
    final_obs: tuple[np.ndarray, Obs] | None
    """same_step only: (indices `[K]`, their final observations). In next_step mode it is None, and
    `obs` of a done row *is* its final observation."""
    episode_index: np.ndarray
    """`[E]` int64: the environments whose episode ended in this step."""
    episode_return: np.ndarray
    """`[E]` float64: the sum of raw rewards (neither normalized nor clipped)."""
    episode_length: np.ndarray
    """`[E]` int64: in steps of the agent."""
    agent_return: np.ndarray | None = None
    """`[E, A]` float64: each agent's own; `episode_return` is their sum."""
    episode_measures: Mapping[str, np.ndarray] | None = None
    """`[E]` float64 each: what the environment itself has to say of these episodes."""


def lead(envs: Envs) -> tuple[int, ...]:
    """Return the leading axes of observations: `(N,)`, or `(N, A)` with several agents.

    Args:
        envs: the environments.
    """
    return (envs.num_envs, len(envs.agents)) if envs.agents else (envs.num_envs,)


class Envs(Protocol):
    """N environments stepped together.

    `reset(seed)` seeds environment i with entry i of `keel.envs.env_seeds(seed, N)`; a Gymnasium
    vector entry point has one generator for all and takes the first entry.
    """

    @property
    def num_envs(self) -> int: ...

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents in each environment; empty where there is one agent without a name.

        With names, everything that is `[N]` in `Step` and has N first in `Obs` and in actions is
        `[N, A]`. The fields of `Step` about episodes stay `[E]`: all agents share an episode.
        """

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        """Space of one environment, as `Obs` lays it out, without the action mask."""

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        """Space of one environment, as `step` expects it: Discrete starts at 0, Box is flat."""

    @property
    def backend(self) -> str: ...

    @property
    def autoreset(self) -> Autoreset: ...

    def reset(self, seed: int) -> Obs:
        """Begin new episodes in all environments.

        Args:
            seed: of all environments, from which each derives its own.
        """

    def step(self, action: np.ndarray) -> Step:
        """Step all environments.

        Args:
            action: Discrete `[N]`, MultiDiscrete and MultiBinary `[N, K]`, Box `[N, D]` (clipped
                here).
        """

    def close(self) -> None: ...

    def save(self) -> Saved | None:
        """Return the state for a bit-exact continuation, or None where it cannot be saved."""

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
        """Continue where `save` was called, in environments made in the same way.

        Args:
            arrays: named arrays that `save` returned.
            data: plain data that `save` returned.
        """
