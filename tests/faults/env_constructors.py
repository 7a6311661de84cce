"""Environments that cannot be made."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces


class BrokenConstructor(gymnasium.Env[Any, Any]):
    """Raise in the constructor."""

    observation_space = spaces.Box(-1.0, 1.0, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self, error: str = "runtime") -> None:
        raise {"runtime": RuntimeError, "key": KeyError}[error]("no display\nfound")


gymnasium.register("KeelBroken-v0", BrokenConstructor)
