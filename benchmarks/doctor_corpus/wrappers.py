"""Faults of environments as Gymnasium wrappers, for every trainer alike.

Those in `INSIDE` are part of the environment, so that a log shows their rewards; those in `OUTSIDE`
stand between what counts returns and what learns, as a program's own preprocessing does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import gymnasium
import numpy as np

Env = gymnasium.Env[Any, Any]


class Rewards(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Replaces rewards by a function of reward, observation and end."""

    def __init__(self, env: Env, change: Callable[[float, bool], float]) -> None:
        super().__init__(env)
        self.change = change

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, self.change(float(reward), terminated), terminated, truncated, info


class Observations(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Replaces observations."""

    def __init__(self, env: Env, change: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__(env)
        self.change = change
        shape = env.observation_space.shape
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)

    def observation(self, observation: Any) -> Any:
        return self.change(np.asarray(observation, dtype=np.float32)).astype(np.float32)


class Ignored(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes a random action, whatever it is told."""

    def step(self, action: Any) -> Any:
        return self.env.step(self.env.action_space.sample())


class Merged(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Reports a time limit as if the episode had ended."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, bool(terminated or truncated), False, info


class Idle(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Begins every episode with a row of zero reward, as environments that reset a step late do."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self.first: Any = None

    def reset(self, **options: Any) -> Any:
        self.first, info = self.env.reset(**options)
        return self.first, info

    def step(self, action: Any) -> Any:
        if self.first is not None:
            obs, self.first = self.first, None
            return obs, 0.0, False, False, {}
        return self.env.step(action)


class Failing:
    """A reward that is now and then infinite."""

    def __init__(self, every: int) -> None:
        self.every, self.count = every, 0

    def __call__(self, reward: float, _: bool) -> float:
        self.count += 1
        return float("inf") if self.count % self.every == 0 else reward


def sparse(_: float, terminated: bool) -> float:
    """A reward for the goal alone; nothing else is ever earned."""
    return 1.0 if terminated else 0.0


def dead_dimensions(count: int) -> Callable[[np.ndarray], np.ndarray]:
    """Put the first dimensions of an observation to 0."""

    def change(obs: np.ndarray) -> np.ndarray:
        obs = obs.copy()
        obs[:count] = 0.0
        return obs

    return change


INSIDE: dict[str, Callable[[Env, Any], Env]] = {
    "reward_scale": lambda env, by: Rewards(env, lambda r, _: r * by),
    "reward_constant": lambda env, value: Rewards(env, lambda r, _: float(value)),
    "reward_never": lambda env, _: Rewards(env, lambda r, end: 0.0),
    "reward_sparse": lambda env, _: Rewards(env, sparse),
    "reward_infinite": lambda env, every: Rewards(env, Failing(int(every))),
    "reward_noise": lambda env, scale: Rewards(
        env, lambda r, _: float(env.np_random.normal(0.0, scale))
    ),
    "actions_ignored": lambda env, _: Ignored(env),
    "idle_rows": lambda env, _: Idle(env),
}
OUTSIDE: dict[str, Callable[[Env, Any], Env]] = {
    "reward_clip": lambda env, bound: Rewards(env, lambda r, _: float(np.clip(r, -bound, bound))),
    "reward_sign": lambda env, _: Rewards(env, lambda r, _: float(np.sign(r))),
    "reward_negated": lambda env, _: Rewards(env, lambda r, _: -r),
    "obs_scale": lambda env, by: Observations(env, lambda obs: obs * by),
    "obs_dead": lambda env, count: Observations(env, dead_dimensions(int(count))),
    "obs_shuffled": lambda env, _: Observations(env, lambda obs: env.np_random.permutation(obs)),
    "truncation_merged": lambda env, _: Merged(env),
}


def wrap(
    env: Env, inject: Iterable[tuple[str, Any]], table: dict[str, Callable[[Env, Any], Env]]
) -> Env:
    """Wrap an environment in the faults of one table.

    Args:
        env: What is wrapped.
        inject: Pairs of name and value; what the table does not know is left to others.
        table: `INSIDE` or `OUTSIDE`.
    """
    for name, value in inject:
        if name in table:
            env = table[name](env, value)
    return env
