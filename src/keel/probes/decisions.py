"""Tiny decision processes, whose best actions and values are known exactly.

After Andy Jones, "Debugging RL, without the agonizing pain": an environment so small that what goes
wrong in it can only have one cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

END = -1
"""In place of a next state: the episode ends, and the future is worth 0."""
FAR = 1e-6
"""Actions whose values differ by less are equally good."""


@dataclass(frozen=True)
class Decisions:
    """States, and what every action in them pays and leads to."""

    seen: tuple[tuple[float, ...], ...]
    """observation of each state, `[S][D]`"""
    reward: tuple[tuple[float, ...], ...]
    """`[S][A]`"""
    then: tuple[tuple[int, ...], ...]
    """next state, or `END`, `[S][A]`"""
    starts: tuple[int, ...] = (0,)
    """states in which episodes begin, equally often"""
    time_limit: int | None = None
    """steps after which an episode is truncated"""
    legal: tuple[tuple[bool, ...], ...] | None = None
    """legal actions, `[S][A]`; None: all"""

    @property
    def actions(self) -> int:
        """Number of actions."""
        return len(self.reward[0])

    def values(self, gamma: float) -> np.ndarray:
        """Return the value of every action in every state under the best policy, `[S, A]`.

        Value iteration; time limits do not count, because time does not belong to the state.

        Args:
            gamma: The discount.

        Examples:
            >>> seen, reward = ((0.0,), (1.0,)), ((0.0,), (1.0,))
            >>> wait = Decisions(seen, reward, then=((1,), (END,)))
            >>> wait.values(gamma=0.5).tolist()
            [[0.5], [1.0]]
        """
        reward, then = np.array(self.reward), np.array(self.then)
        legal = np.ones_like(then, bool) if self.legal is None else np.array(self.legal)
        values = np.zeros(reward.shape)
        for _ in range(10_000):
            best = np.where(legal, values, -np.inf).max(axis=1)
            newer = reward + gamma * np.where(then == END, 0.0, best[then])
            if np.abs(newer - values).max() < 1e-12:
                break
            values = newer
        return np.where(legal, values, -np.inf)

    def best(self, gamma: float) -> np.ndarray:
        """Return which actions are best in every state, bool `[S, A]`."""
        values = self.values(gamma)
        return np.asarray(values >= values.max(axis=1, keepdims=True) - FAR)


class DecisionEnv(gymnasium.Env[np.ndarray, int]):
    """A decision process as an environment of Gymnasium.

    Args:
        decisions: The process, or its name in `keel.probes.catalogue.DECISIONS`.
    """

    def __init__(self, decisions: Decisions | str) -> None:
        if isinstance(decisions, str):
            from keel.probes.catalogue import DECISIONS

            decisions = DECISIONS[decisions]
        self.decisions = decisions
        width = len(decisions.seen[0])
        self.observation_space = spaces.Box(-1.0, 1.0, (width,), np.float32)
        self.action_space = spaces.Discrete(decisions.actions)  # type: ignore[assignment]
        self._state, self._time = 0, 0
        if decisions.legal is not None:
            self.action_masks = self._legal_actions  # sb3-contrib's convention

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._state, self._time = int(self.np_random.choice(self.decisions.starts)), 0
        return self._observation(), self._info()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take one action."""
        state, action = self._state, int(action)
        if not self._legal_actions()[action]:
            raise ValueError(f"action {action} is illegal in state {state}: a mask was not used")
        reward, then = self.decisions.reward[state][action], self.decisions.then[state][action]
        self._time += 1
        terminated = then == END
        if not terminated:
            self._state = then
        limit = self.decisions.time_limit
        truncated = not terminated and limit is not None and self._time >= limit
        return self._observation(), reward, terminated, truncated, self._info()

    def _observation(self) -> np.ndarray:
        return np.array(self.decisions.seen[self._state], np.float32)

    def _info(self) -> dict[str, Any]:
        return {} if self.decisions.legal is None else {"action_mask": self._legal_actions()}

    def _legal_actions(self) -> np.ndarray:
        legal = self.decisions.legal
        return (
            np.ones(self.decisions.actions, bool) if legal is None else np.array(legal[self._state])
        )
