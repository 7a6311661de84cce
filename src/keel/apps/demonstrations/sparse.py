"""A task whose reward says nothing until it is solved: what demonstrations are for.

`keel train keel.apps.demonstrations.sparse:MountainCarSparse-v0` imports this file, which registers
the environment with Gymnasium.
"""

from __future__ import annotations

from typing import Any

import gymnasium


class OnlyTheTop(gymnasium.Wrapper[Any, Any, Any, Any]):
    """MountainCar-v0 with 1 for reaching the top in place of −1 for every step on the way."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step; terminated is the top."""
        obs, _, terminated, truncated, info = self.env.step(action)
        return obs, float(terminated), terminated, truncated, info


def make(**options: Any) -> gymnasium.Env[Any, Any]:
    """Gymnasium's own, without its time limit: the registration below brings one."""
    return OnlyTheTop(gymnasium.make("MountainCar-v0", **options).unwrapped)


gymnasium.register(
    "MountainCarSparse-v0",
    entry_point="keel.apps.demonstrations.sparse:make",
    max_episode_steps=200,
    reward_threshold=0.99,
)
