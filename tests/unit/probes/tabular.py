"""A table of Q-values as somebody else's trainer, right or with one mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

GAMMA, RATE = 0.99, 0.2


def train(make_env: Callable[[], Any], total_steps: int, seed: int) -> Callable[[Any], int]:
    """Q-learning with random actions, as it should be."""
    return learn(make_env, total_steps, seed)


def learn(
    make_env: Callable[[], Any], total_steps: int, seed: int, mistake: str = ""
) -> Callable[[Any], int]:
    """Q-learning with random actions.

    Args:
        make_env: makes the environment.
        total_steps: how long.
        seed: of everything.
        mistake: one of `sign`, `pairs`, `myopic`, `merged`, `endless`, `maskless`.
    """
    env, rng = make_env(), np.random.default_rng([seed, 1])  # not the environment's own draws
    table: dict[bytes, np.ndarray] = {}
    obs, _ = env.reset(seed=seed)
    earlier = obs
    for _ in range(total_steps):
        action = int(rng.choice(np.flatnonzero(_legal(env, mistake))))
        after, reward, terminated, truncated, _ = env.step(action)
        first = env.reset()[0] if terminated or truncated else after
        goes_on = not terminated and not (truncated and mistake == "merged")
        future = _best(_row(table, after if goes_on else first, env.action_space.n))
        if not goes_on and mistake != "endless":
            future = 0.0
        target = (-reward if mistake == "sign" else reward) + (mistake != "myopic") * GAMMA * future
        row = _row(table, earlier if mistake == "pairs" else obs, env.action_space.n)
        known = 0.0 if np.isneginf(row[action]) else row[action]
        row[action] = known + RATE * (target - known)
        earlier, obs = obs, first
    return lambda obs: int(_row(table, obs, env.action_space.n).argmax())


def _legal(env: Any, mistake: str) -> np.ndarray:
    masks = getattr(env, "action_masks", None)
    if masks is None or mistake == "maskless":
        return np.ones(env.action_space.n, bool)
    return np.asarray(masks())


def _row(table: dict[bytes, np.ndarray], obs: Any, actions: int) -> np.ndarray:
    """Return the values of a state; −inf for actions that were never tried."""
    key = np.asarray(obs, np.float32).tobytes()
    return table.setdefault(key, np.full(actions, -np.inf))


def _best(row: np.ndarray) -> float:
    return 0.0 if np.isneginf(row).all() else float(row.max())
