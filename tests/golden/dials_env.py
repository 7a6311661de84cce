"""An environment whose observations are MultiDiscrete, for the runs of version 0.1."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Dials(gymnasium.Env[np.ndarray, int]):
    """Three dials of 5, 4 and 3 positions; the action that is the sum of all modulo 3 is rewarded.

    An episode takes ten steps.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.MultiDiscrete([5, 4, 3])
        self.action_space = spaces.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Turn every dial at random."""
        super().reset(seed=seed)
        self._steps = 0
        return self._turn(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Reward the right action, and turn the dials again."""
        reward = float(action == self._dials.sum() % 3)
        self._steps += 1
        return self._turn(), reward, self._steps == 10, False, {}

    def _turn(self) -> np.ndarray:
        self._dials = self.np_random.integers(0, [5, 4, 3])
        return self._dials


if "Dials-v0" not in gymnasium.registry:
    gymnasium.register("Dials-v0", f"{__name__}:Dials")
