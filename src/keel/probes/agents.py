"""Environment of two agents and task of two tokens, for probes."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

AGENTS = ("same", "opposite")


class SameOpposite:
    """Each agent sees a bit of its own; `same` is paid for doing it, `opposite` for the other.

    A parallel environment by PettingZoo's protocol, without its base class, which is an extra.
    """

    metadata = {"name": "same_opposite"}  # noqa: RUF012
    possible_agents = list(AGENTS)  # noqa: RUF012

    def __init__(self) -> None:
        self.agents: list[str] = []
        self._bits: dict[str, int] = {}
        self._rng = np.random.default_rng()

    def observation_space(self, agent: str) -> spaces.Box:
        """Return the space of one bit, as −1 or 1."""
        return spaces.Box(-1.0, 1.0, (1,), np.float32)

    def action_space(self, agent: str) -> spaces.Discrete:
        """Return the space of one bit."""
        return spaces.Discrete(2)

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
        """Draw both bits."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.agents = list(AGENTS)
        self._bits = {agent: int(self._rng.integers(2)) for agent in AGENTS}
        return self._observations(), {agent: {} for agent in AGENTS}

    def step(self, actions: dict[str, int]) -> tuple[Any, ...]:
        """Pay both agents, and end the episode."""
        reward = {
            agent: 1.0 if (int(actions[agent]) == self._bits[agent]) == (agent == "same") else -1.0
            for agent in AGENTS
        }
        self.agents = []
        ended, cut = dict.fromkeys(AGENTS, True), dict.fromkeys(AGENTS, False)
        return self._observations(), reward, ended, cut, {agent: {} for agent in AGENTS}

    def state(self) -> np.ndarray:
        """Return both bits, for a central critic."""
        return np.concatenate(list(self._observations().values()))

    def close(self) -> None:
        """Hold nothing that is to be closed."""

    def _observations(self) -> dict[str, np.ndarray]:
        return {agent: np.array([2.0 * bit - 1.0], np.float32) for agent, bit in self._bits.items()}


class TwoTokens:
    """After a prompt with `a` the token `x` is right, after one with `b` the token `y`."""

    name, max_new_tokens, stop = "two-tokens", 1, None

    def example(self, rng: np.random.Generator) -> Any:
        """Draw a letter, behind a number that does not matter."""
        from keel.apps.language import Example

        letter, answer = (("a", "x"), ("b", "y"))[int(rng.integers(2))]
        return Example(f"{rng.integers(1000):03d}{letter}", answer, {})

    def verify(self, example: Any, completion: str) -> float:
        """Return 1 for the right token, 0 for any other."""
        return float(completion == example.answer)
