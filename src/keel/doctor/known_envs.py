"""Facts about environments that everybody trains on, for logs that name theirs and say no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ACTIONS = {
    "CartPole": 2,
    "Acrobot": 3,
    "MountainCar": 3,
    "LunarLander": 4,
    "MountainCarContinuous": 0,
    "LunarLanderContinuous": 0,
    "Pendulum": 0,
    "BipedalWalker": 0,
    "HalfCheetah": 0,
    "Hopper": 0,
    "Walker2d": 0,
    "Ant": 0,
    "Humanoid": 0,
    "Swimmer": 0,
    "Reacher": 0,
}
"""Number of discrete actions, 0 where they are continuous, by Gymnasium's name without version."""


def with_facts(settings: Mapping[str, Any], framework: str = "csv") -> Mapping[str, Any]:
    """Return settings with the number of actions, where the environment is a known one.

    Args:
        settings: By Keel's dotted names.
        framework: Whose log it is; runs of Keel say themselves how many there are.

    Examples:
        >>> with_facts({"env": "CartPole-v1"})["facts.actions"]
        2
    """
    name = str(settings.get("env", "")).rpartition("-v")[0]
    if framework == "keel" or name not in ACTIONS or "facts.actions" in settings:
        return settings
    return {**settings, "facts.actions": ACTIONS[name]}
