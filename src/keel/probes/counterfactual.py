"""Does the action matter? The same state, by seed and past, and then another action."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from keel.envs import Envs
from keel.envs.check import choice_sizes
from keel.envs.protocol import Obs
from keel.envs.spaces import action_layout
from keel.probes.rollouts import random_actions
from keel.types import MASK

AHEAD = 20
"""Steps of the same further actions behind the one that differs."""
PREFIXES = (0, 3, 11, 25)
"""Steps before it."""
MOST = 8
"""Actions that are tried at most."""


@dataclass(frozen=True)
class Effects:
    """What comes of each action from the same states."""

    labels: tuple[str, ...]
    """of the actions, for people"""
    changed: np.ndarray
    """bool `[A, A]`: whether two actions ever led to another observation or reward"""
    returns: np.ndarray
    """`[states, A]`: rewards of the action and the steps behind it"""
    states: int

    @property
    def matters(self) -> bool:
        """Whether any two actions differ."""
        return bool(self.changed.any())

    @property
    def twins(self) -> list[tuple[str, str]]:
        """Pairs of actions that never differed."""
        size = len(self.labels)
        return [
            (self.labels[i], self.labels[j])
            for i in range(size)
            for j in range(i + 1, size)
            if not self.changed[i, j]
        ]


def effects(envs: Envs, *, seed: int, seconds: float) -> Effects | None:
    """Return what each action does; None where no state was reached in time.

    Args:
        envs: One environment, whose trajectories depend on nothing but seed and actions.
        seed: Of environment and actions.
        seconds: Budget of time.
    """
    candidates = _candidates(envs)
    started = time.perf_counter()
    changed = np.zeros((len(candidates), len(candidates)), dtype=bool)
    returns = []
    for number, prefix in enumerate(PREFIXES):
        if time.perf_counter() - started > seconds:
            break
        traces = [_trace(envs, prefix, action, seed + number) for _, action in candidates]
        known = [trace for trace in traces if trace is not None]
        if len(known) < len(candidates):
            continue  # the episode ended before, or the action is illegal there
        returns.append([total for _, total in known])
        for i, (first, _) in enumerate(known):
            for j, (second, _) in enumerate(known):
                changed[i, j] |= _differ(first, second)
    if not returns:
        return None
    labels = tuple(label for label, _ in candidates)
    return Effects(labels, changed, np.array(returns), len(returns))


def greedy_return(envs: Envs, *, seed: int, seconds: float) -> float | None:
    """Return what the action with the largest next reward earns in one episode.

    Every action is tried from the same state, which the seed and the past lead to, so an episode of
    T steps costs about A·T²/2. None where the budget of time does not reach to its end.

    Args:
        envs: One environment, whose trajectories depend on nothing but seed and actions.
        seed: Of the environment.
        seconds: Budget of time.
    """
    started, past, total = time.perf_counter(), list[np.ndarray](), 0.0
    candidates = [action for _, action in _candidates(envs)]
    while time.perf_counter() - started < seconds:
        tried = [_reward_after(envs, past, action, seed) for action in candidates]
        best = max(range(len(tried)), key=lambda i: tried[i][0])
        reward, ended = tried[best]
        total += reward
        past.append(candidates[best])
        if ended:
            return total
    return None


def _reward_after(
    envs: Envs, past: list[np.ndarray], action: np.ndarray, seed: int
) -> tuple[float, bool]:
    """Return the reward of an action after some others, and whether it ends the episode."""
    obs = envs.reset(seed)
    for earlier in past:
        obs = envs.step(earlier).obs
    if not _legal(envs, obs, action):
        return -np.inf, False
    step = envs.step(action)
    return float(step.reward.sum()), bool((step.terminated | step.truncated).any())


def _candidates(envs: Envs) -> list[tuple[str, np.ndarray]]:
    """Return actions to try: all of a few, the ends of ranges, one choice after the other."""
    space: Any = envs.action_space
    if not action_layout(space).choices:
        if space.dtype is None or space.dtype.kind != "f":
            ones = np.ones(space.shape, space.dtype)
            return [("all 0", np.zeros_like(ones)[None]), ("all 1", ones[None])]
        low, high = (np.clip(bound, -10.0, 10.0) for bound in (space.low, space.high))
        middle = ((low + high) / 2).astype(np.float32)
        tried = [("the middle", middle[None])]
        for index in range(min(middle.size, MOST // 2)):
            for name, bound in (("lowest", low), ("highest", high)):
                action = middle.copy()
                action.flat[index] = bound.flat[index]
                tried.append((f"{name} in dimension {index}", action[None]))
        return tried
    if not space.shape:
        return [(f"{action}", np.array([action])) for action in range(min(int(space.n), MOST))]
    zeros = np.zeros(space.shape, np.int64)
    tried = [("all 0", zeros[None])]
    for index in range(min(zeros.size, MOST - 1)):
        action = zeros.copy()
        action[index] = 1
        tried.append((f"1 in choice {index}", action[None]))
    return tried


def _trace(
    envs: Envs, prefix: int, action: np.ndarray, seed: int
) -> tuple[list[np.ndarray], float] | None:
    """Return observations and rewards behind an action, and the sum of these rewards."""
    obs, choose = envs.reset(seed), random_actions(envs, seed)
    for _ in range(prefix):
        step = envs.step(choose(obs))
        obs = step.obs
        if (step.terminated | step.truncated).any():
            return None
    if not _legal(envs, obs, action):
        return None
    seen: list[np.ndarray] = []
    total = 0.0
    further = random_actions(envs, seed + 1)
    for _ in range(AHEAD):
        step = envs.step(action)
        total += float(step.reward.sum())
        seen += [step.reward.copy(), *(array.copy() for array in step.obs.values())]
        if (step.terminated | step.truncated).any():
            break
        action = further(step.obs)
    return seen, total


def _legal(envs: Envs, obs: Obs, action: np.ndarray) -> bool:
    if MASK not in obs:
        return True
    offsets = np.cumsum([0, *choice_sizes(envs.action_space)[:-1]])
    return bool(obs[MASK][0, offsets + action.reshape(-1)].all())


def _differ(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    if len(first) != len(second):
        return True
    return any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))
