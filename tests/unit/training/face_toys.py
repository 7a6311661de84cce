"""Environments and wrappers that tests of the public names pass as objects."""

from __future__ import annotations

import threading
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Five(gymnasium.Env[Any, Any]):
    """Five steps that pay 1 each; `pay` changes that."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, pay: float = 1.0) -> None:
        self.pay, self.time, self.resets, self.closed = pay, 0, 0, False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time, self.resets = 0, self.resets + 1
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return np.full(2, self.time / 5, np.float32), self.pay, self.time == 5, False, {}

    def close(self) -> None:
        self.closed = True


class Locked(Five):
    """One that cannot be copied: it holds a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def make_five() -> Five:
    return Five()


class Double(gymnasium.RewardWrapper[Any, Any]):
    """Pays twice as much."""

    def reward(self, reward: Any) -> float:
        return 2.0 * float(reward)


def add_ten(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    return gymnasium.wrappers.TransformReward(env, lambda reward: float(reward) + 10.0)
