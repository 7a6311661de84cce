"""Things that a name can point to: environments, functions that make them, and others."""

from __future__ import annotations

import subprocess
from functools import partial
from subprocess import getoutput
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from parallel_toys import Countdown

CALLS: list[str] = []


class Walk(gymnasium.Env[Any, Any]):
    """Ends after `length` steps."""

    observation_space = spaces.Box(0.0, 9.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 3) -> None:
        self.length, self.time = length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return np.full(2, self.time, np.float32), 1.0, self.time >= self.length, False, {}


def make_walk(length: int = 3) -> Walk:
    return Walk(length)


def make_untyped(length=3):  # type: ignore[no-untyped-def]
    return Walk(length)


def make_countdown() -> Countdown:
    return Countdown()


def make_anything() -> Any:
    return Walk()


make_short = partial(Walk, length=1)


def make_number(command: str = "") -> int:
    CALLS.append("make_number")
    return 3


def make_nothing(command: str = "") -> None:
    CALLS.append("make_nothing")


def make_words():  # type: ignore[no-untyped-def]
    return "no environment"


class Other:
    def __init__(self) -> None:
        CALLS.append("Other")


run_command = getoutput
Process = subprocess.Popen
number = 3
