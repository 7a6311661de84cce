"""Scripted experts, one of them bad: functions from one observation to an action.

They can be given as a policy: `keel demos record MountainCar-v0 --policy
keel.apps.demonstrations.experts:swing --out demos/car`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LEFT, RIGHT = 0, 2


def swing(obs: NDArray[Any]) -> int:
    """Push the car of MountainCar-v0 the way it already goes: solves the task, not optimally."""
    return RIGHT if obs[1] >= 0.0 else LEFT


def swing_force(obs: NDArray[Any]) -> NDArray[np.float32]:
    """Push the car of MountainCarContinuous-v0 the way it already goes."""
    return np.array([1.0 if obs[1] >= 0.0 else -1.0], np.float32)


def lean_away(obs: NDArray[Any]) -> int:
    """Push the cart of CartPole-v1 away from where the pole falls: a bad expert."""
    return 0 if obs[2] >= 0.0 else 1
