"""Scripted experts, and one to be distrusted: functions from one observation to an action.

They go where a policy is asked for: `keel demos record MountainCar-v0 --policy
keel.apps.demonstrations.experts:swing --out demos/car`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LEFT, RIGHT = 0, 2


def swing(obs: NDArray[Any]) -> int:
    """MountainCar-v0: push the way the car already goes. It gets there, not by the quickest way."""
    return RIGHT if obs[1] >= 0.0 else LEFT


def swing_force(obs: NDArray[Any]) -> NDArray[np.float32]:
    """The same for MountainCarContinuous-v0."""
    return np.array([1.0 if obs[1] >= 0.0 else -1.0], np.float32)


def lean_away(obs: NDArray[Any]) -> int:
    """CartPole-v1, and wrong: push the cart away from where the pole falls, so that it falls."""
    return 0 if obs[2] >= 0.0 else 1
