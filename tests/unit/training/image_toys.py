"""Environments that show images, small enough to be learned in seconds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from keel.envs import Obs, Step
from keel.envs.protocol import Episodes

LENGTH = 8


class Signs:
    """`num_envs` copies at once: the bright half of an image says which of two actions is right.

    Beside it are a vector of noise and a number that mean nothing. A reward is 1 for every right
    action, an episode has 8 steps, and the state can be saved.
    """

    autoreset = "next_step"
    backend = "signs"
    agents: tuple[str, ...] = ()
    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (3, 8, 8), np.uint8),
            "noise": spaces.Box(-np.inf, np.inf, (2,), np.float32),
            "inner/kind": spaces.Discrete(3),
        }
    )
    action_space = spaces.Discrete(2)

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self._episodes = Episodes(num_envs)
        self._time = np.zeros(num_envs, np.int64)
        self._side = np.zeros(num_envs, np.int64)
        self._pending = np.zeros(num_envs, bool)

    def reset(self, seed: int) -> Obs:
        self._rng = np.random.default_rng(seed)
        self._episodes.clear()
        self._time[:], self._pending[:] = 0, False
        return self._draw()

    def step(self, action: np.ndarray) -> Step:
        ignored = self._pending
        reward = ((action == self._side) & ~ignored).astype(np.float32)
        self._time = np.where(ignored, 0, self._time + 1)
        over = self._pending = self._time >= LENGTH
        finished = self._episodes.update(reward, over, ignored)
        obs, no = self._draw(), np.zeros(self.num_envs, bool)
        return Step(obs, reward, no, over.copy(), ignored.copy(), None, *finished)

    def close(self) -> None:
        pass

    def save(self) -> Any:
        state = self._rng.bit_generator.state
        words = {name: str(value) for name, value in state["state"].items()}
        arrays = {"time": self._time, "side": self._side, "pending": self._pending}
        return {**arrays, **self._episodes.save()}, {"words": words}

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
        self._rng = np.random.default_rng(0)
        state = self._rng.bit_generator.state
        state["state"] = {name: int(value) for name, value in data["words"].items()}
        state["has_uint32"] = state["uinteger"] = 0
        self._rng.bit_generator.state = state
        self._time, self._side = np.array(arrays["time"]), np.array(arrays["side"])
        self._pending = np.array(arrays["pending"])
        self._episodes.load(arrays)

    def _draw(self) -> Obs:
        count = self.num_envs
        self._side = (self._rng.random(count) < 0.5).astype(np.int64)
        image = (self._rng.random((count, 3, 8, 8)) * 60).astype(np.uint8)
        for row, side in enumerate(self._side):
            image[row, :, :, 4 * side : 4 * side + 4] += 150
        return {
            "image": image,
            "noise": self._rng.normal(size=(count, 2)).astype(np.float32),
            "inner/kind": (self._rng.random(count) * 3).astype(np.int64),
        }


LAYOUTS: dict[str, spaces.Space[Any]] = {
    "7×7×3 bytes": spaces.Box(0, 255, (7, 7, 3), np.uint8),
    "2×9×12 floats": spaces.Box(0.0, 1.0, (2, 9, 12), np.float32),
    "20×30×3 unbounded": spaces.Box(-np.inf, np.inf, (20, 30, 3), np.float32),
    "nested": spaces.Dict(
        {
            "image": spaces.Box(0, 255, (8, 8, 1), np.uint8),
            "inner": spaces.Dict(
                {"counts": spaces.MultiDiscrete([2, 4]), "bits": spaces.MultiBinary(3)}
            ),
            "speed": spaces.Box(-1.0, 1.0, (2,), np.float32),
        }
    ),
    "tuple of two images and a board": spaces.Tuple(
        (
            spaces.Box(0, 255, (7, 9, 3), np.uint8),
            spaces.Box(-1.0, 1.0, (2, 7, 7), np.float32),
            spaces.Box(0, 9, (3, 3, 2), np.uint8),
        )
    ),
}


class Drawn(gymnasium.Env[Any, Any]):
    """Observations drawn from a space; the reward is the action."""

    action_space = spaces.Discrete(2)

    def __init__(self, layout: str) -> None:
        self.observation_space = copy.deepcopy(LAYOUTS[layout])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return self.observation_space.sample(), float(action), self.time >= 5, False, {}


if "keel/Drawn-v0" not in gymnasium.registry:
    gymnasium.register("keel/Drawn-v0", Drawn)  # type: ignore[arg-type]


class Pair(ParallelEnv):  # type: ignore[type-arg]
    """Two agents that see an image each, a vector, and with `stated` an image of everything."""

    metadata = {"name": "pair"}  # noqa: RUF012
    possible_agents = ["left", "right"]  # noqa: RUF012

    def __init__(self, stated: bool = False) -> None:
        self.stated, self.agents = stated, []
        self._space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (8, 7, 3), np.uint8),
                "speed": spaces.Box(-1.0, 1.0, (2,), np.float32),
            }
        )

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._space

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._space.seed(seed)
        self.agents, self.time = list(self.possible_agents), 0
        return self._see(), {name: {} for name in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self.time += 1
        names = list(self.agents)
        over = dict.fromkeys(names, self.time >= 4)
        if self.time >= 4:
            self.agents = []
        rewards = {name: float(actions[name]) for name in names}
        return self._see(names), rewards, over, dict.fromkeys(names, False), {n: {} for n in names}

    def state(self) -> np.ndarray:
        if not self.stated:
            raise NotImplementedError
        return np.full((9, 9, 3), self.time, np.uint8)

    def _see(self, names: list[str] | None = None) -> dict[str, Any]:
        return {name: self._space.sample() for name in names or self.agents}


def signs_env(num_envs: int) -> Signs:
    """Make environments as `keel.envs.names.NATIVE` asks for."""
    return Signs(num_envs)
