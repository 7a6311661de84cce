"""Two arms whose returns are known distributions: what a distributional critic has to find."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces


class TwoArms(gymnasium.Env[np.ndarray, int]):
    """First an arm is chosen, then it pays: N(1.5, 1), or N(−1, ½²) or N(4, ½²) by a fair coin.

    The observation is one-hot: nothing yet, the first arm, the second.
    """

    observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.arm = -1
        return seen(0), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.arm < 0:
            self.arm = int(action)
            return seen(1 + self.arm), 0.0, False, False, {}
        noise = self.np_random.standard_normal()
        if self.arm == 0:
            reward = 1.5 + noise
        else:
            reward = (-1.0 if self.np_random.random() < 0.5 else 4.0) + 0.5 * noise
        return seen(1 + self.arm), float(reward), True, False, {}


def seen(place: int) -> np.ndarray:
    return np.eye(3, dtype=np.float32)[place]


def true_quantiles(arm: int, levels: np.ndarray) -> np.ndarray:
    """By a fine table of the distribution function."""
    x = torch.linspace(-6.0, 9.0, 200_001, dtype=torch.float64)
    normal = torch.distributions.Normal(0.0, 1.0)
    if arm == 0:
        below = normal.cdf(x - 1.5)
    else:
        below = 0.5 * normal.cdf((x + 1.0) / 0.5) + 0.5 * normal.cdf((x - 4.0) / 0.5)
    return np.interp(levels, below.numpy(), x.numpy())


def draw(arm: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns of an arm."""
    noise = rng.standard_normal(count)
    if arm == 0:
        return 1.5 + noise
    return np.where(rng.random(count) < 0.5, -1.0, 4.0) + 0.5 * noise


gymnasium.register("TwoArms-v0", TwoArms)
