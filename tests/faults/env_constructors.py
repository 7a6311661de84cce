"""Environments that cannot be made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
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


class BusyPort(gymnasium.Env[Any, Any]):
    """Hold a file for as long as it is open; the second that is made at a time cannot be."""

    observation_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self, place: str, text: bool = False) -> None:
        if text:
            self.observation_space = spaces.Text(8)
        self.place = Path(place)
        with self.place.open("x"):
            pass

    def close(self) -> None:
        self.place.unlink()


def several_agents(place: str, text: bool = False) -> Any:
    """Make the same for PettingZoo, which asks for the space of every agent."""
    env = BusyPort(place, text)
    observation, action = env.observation_space, env.action_space
    return SimpleNamespace(
        possible_agents=["a"], close=env.close, observation_space=lambda _: observation,
        action_space=lambda _: action,
    )  # fmt: skip


gymnasium.register("KeelBusyPort-v0", BusyPort)
