"""Small environments whose every number can be checked by hand."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from keel.envs import Envs


class Walk(gymnasium.Env[Any, Any]):
    """A walk on the integers from a random start: over at ±4, reward is the new position."""

    observation_space = spaces.Box(-5.0, 5.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.time = int(self.np_random.integers(-2, 3)), 0
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place += 2 * int(action) - 1
        self.time += 1
        return self.seen(), float(self.place), abs(self.place) >= 4, False, {}

    def seen(self) -> np.ndarray:
        return np.array([self.place, self.time % 5], dtype=np.float32)


class Masked(Walk):
    """One step to the left is forbidden at place 0; nothing is allowed once it is over."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, _ = super().reset(seed=seed)
        return obs, {"action_mask": self.mask()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.mask()[action], "an illegal action reached the environment"
        *result, _ = super().step(action)
        return *result, {"action_mask": self.mask()}

    def mask(self) -> np.ndarray:
        alive = abs(self.place) < 4
        return np.array([alive and self.place != 0, alive], dtype=np.int8)


class MaskedInObservation(Masked):
    """The same, PettingZoo's way: the mask is part of the observation."""

    observation_space = spaces.Dict(
        {"observation": Walk.observation_space, "action_mask": spaces.MultiBinary(2)}
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed)
        return {"observation": obs, **info}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, *result, info = super().step(action)
        return {"observation": obs, **info}, *result, {}


class MaskedByMethod(Masked):
    """The same, sb3-contrib's way: a method is asked, which has no answer once it is over."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=seed)[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *result, _ = super().step(action)
        return *result, {}

    def action_masks(self) -> np.ndarray:
        if abs(self.place) >= 4:
            raise RuntimeError("the game is over")
        return self.mask().astype(bool)


class Everything(gymnasium.Env[Any, Any]):
    """A Dict of every kind of observation."""

    observation_space = spaces.Dict(
        {
            "vector": spaces.Box(-np.inf, np.inf, (3,), np.float64),
            "matrix": spaces.Box(-1.0, 1.0, (2, 2), np.float32),
            "number": spaces.Box(0.0, 9.0, (), np.float32),
            "pixels": spaces.Box(0, 255, (2, 4, 4), np.uint8),
            "gray": spaces.Box(0, 255, (4, 4), np.uint8),
            "bytes": spaces.Box(0, 255, (6,), np.uint8),
            "choice": spaces.Discrete(4, start=1),
            "choices": spaces.MultiDiscrete([2, 3]),
            "bits": spaces.MultiBinary(3),
        }
    )
    action_space = spaces.Discrete(3, start=-1)

    def __init__(self) -> None:
        self.observation_space = deepcopy(self.observation_space)  # it is what draws

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.last = self.observation_space.sample()
        return self.last, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.last = self.observation_space.sample()
        return self.last, float(action), False, False, {}


class Echo(gymnasium.Env[Any, Any]):
    """Shows the action it got."""

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        self.action_space = action_space
        shape = action_space.shape or ()
        self.observation_space = spaces.Box(-100.0, 100.0, (int(np.prod(shape)),), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        return np.asarray(action, np.float32).reshape(-1), 0.0, False, False, {}


class Louder(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Doubles the reward."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, 2.0 * float(reward), terminated, truncated, info


TIME_LIMIT = 6
TOYS: dict[str, Any] = {
    "keel/Walk-v0": Walk,
    "keel/Masked-v0": Masked,
    "keel/MaskedInObservation-v0": MaskedInObservation,
    "keel/MaskedByMethod-v0": MaskedByMethod,
    "keel/Everything-v0": Everything,
    "keel/Echo-v0": Echo,
}


def register_toys() -> None:
    for name, entry_point in TOYS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point, max_episode_steps=TIME_LIMIT)


Transition = tuple[Any, ...]


def left_or_right(index: int, count: int) -> int:
    """The policy of all comparisons: depends on the environment and its own valid steps only."""
    return (index * 7 + count * count) % 5 % 2


def transitions(envs: Envs, seed: int, rows: int) -> list[list[Transition]]:
    """(obs, action, reward, terminated, truncated, next or final obs) of each environment."""
    obs = envs.reset(seed)["obs"]
    found: list[list[Transition]] = [[] for _ in range(envs.num_envs)]
    for _ in range(rows):
        action = np.array([left_or_right(i, len(found[i])) for i in range(envs.num_envs)])
        step = envs.step(action)
        following = step.obs["obs"].copy()
        if step.final_obs is not None:
            index, final = step.final_obs
            following[index] = final["obs"]
        for i in np.flatnonzero(~step.ignored):
            ends = bool(step.terminated[i]), bool(step.truncated[i])
            row = obs[i].tolist(), int(action[i]), float(step.reward[i]), *ends
            found[i].append((*row, following[i].tolist()))
        obs = step.obs["obs"]
    return found


def naive(make: Callable[[], Any], seeds: list[int], rows: int) -> list[list[Transition]]:
    """The same by the plainest loop over single environments."""
    found: list[list[Transition]] = []
    for index, seed in enumerate(seeds):
        env, own = make(), []
        obs, _ = env.reset(seed=seed)
        for count in range(rows):
            action = left_or_right(index, count)
            following, reward, terminated, truncated, _ = env.step(action)
            row = np.asarray(obs, np.float32).tolist(), action, float(np.float32(reward))
            ends = bool(terminated), bool(truncated)
            own.append((*row, *ends, np.asarray(following, np.float32).tolist()))
            obs = env.reset()[0] if terminated or truncated else following
        found.append(own)
    return found
