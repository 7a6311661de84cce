"""Tasks with sparse rewards, which demonstrations help with.

`keel train keel.apps.demonstrations.sparse:HalfCheetahFar-v0` imports this file, which registers
them with Gymnasium.
"""

from __future__ import annotations

from typing import Any

import gymnasium

Step = tuple[Any, float, bool, bool, dict[str, Any]]
FAR = 10.0
"""Metres: a policy that only twitches does not get there in an episode."""


class OnlyTheTop(gymnasium.Wrapper[Any, Any, Any, Any]):
    """MountainCar-v0 with 1 for reaching the top in place of −1 for every step on the way."""

    def step(self, action: Any) -> Step:
        """Take one step; the reward is 1 at the top."""
        obs, _, terminated, truncated, info = self.env.step(action)
        return obs, float(terminated), terminated, truncated, info


class OnlyFar(gymnasium.Wrapper[Any, Any, Any, Any]):
    """HalfCheetah-v5 with 1 for every step beyond 10 m, in place of its speed."""

    def step(self, action: Any) -> Step:
        """Take one step; the reward is 1 beyond `FAR`."""
        obs, _, terminated, truncated, info = self.env.step(action)
        return obs, float(info["x_position"] > FAR), terminated, truncated, info


def mountain_car(**options: Any) -> gymnasium.Env[Any, Any]:
    """Make MountainCar-v0 with a sparse reward; the registration below sets the time limit."""
    return OnlyTheTop(gymnasium.make("MountainCar-v0", **options).unwrapped)


def half_cheetah(**options: Any) -> gymnasium.Env[Any, Any]:
    """Make HalfCheetah-v5 with a sparse reward; the registration below sets the time limit."""
    return OnlyFar(gymnasium.make("HalfCheetah-v5", **options).unwrapped)


gymnasium.register(
    "MountainCarSparse-v0",
    entry_point="keel.apps.demonstrations.sparse:mountain_car",
    max_episode_steps=200,
    reward_threshold=0.99,
)
gymnasium.register(
    "HalfCheetahFar-v0",
    entry_point="keel.apps.demonstrations.sparse:half_cheetah",
    max_episode_steps=1000,
    reward_threshold=800.0,
)
