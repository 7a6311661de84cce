"""`check_env`: is this environment one that can be learned in? The answer names what is broken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keel.envs.faults import EnvError
from keel.envs.guard import bounds_of, fields_of
from keel.envs.make import make_envs
from keel.envs.protocol import Envs, Obs, Step, lead
from keel.envs.spaces import action_layout
from keel.types import MASK


def check_env(
    envs: Envs | str,
    *,
    steps: int = 200,
    seed: int = 0,
    env_kwargs: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return what is wrong with `envs`, one sentence each; an empty list is a clean bill.

    Two runs of random legal actions from one seed check shapes, dtypes, finite values, declared
    bounds, masks, flags, what `reset` and `step` return, and whether the same seed gives the same
    trajectory.

    Args:
        envs: environments, or a name, of which two are made in this process.
        steps: length of each of the two runs.
        seed: seed of the environments and of the actions.
        env_kwargs: options of the constructor, where `envs` is a name.

    Examples:
        >>> check_env("CartPole-v1", steps=50)
        []
    """
    if isinstance(envs, str):
        vector_envs: Envs | None = None
        try:
            vector_envs = make_envs(
                envs, 2, backend="sync", seed=seed, env_kwargs=env_kwargs, guard=False
            )
            return check_env(vector_envs, steps=steps, seed=seed)
        finally:
            if vector_envs is not None:
                vector_envs.close()
    problems: dict[str, str] = {}
    try:
        first = _run(envs, steps, seed, problems)
        second = _run(envs, steps, seed, {})
    except EnvError as error:
        return [*problems.values(), str(error)]
    difference = _first_difference(first, second)
    if difference is not None:
        problems["seed"] = (
            f"two runs with seed {seed} and the same actions differ in {difference}: the "
            "environment must draw all its randomness from self.np_random, seeded by reset(seed=…)"
        )
    return list(problems.values())


def _run(envs: Envs, steps: int, seed: int, problems: dict[str, str]) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    obs = envs.reset(seed)
    _check_obs(envs, obs, 0, problems)
    trace: list[dict[str, Any]] = [dict(obs)]
    for number in range(1, steps + 1):
        step = envs.step(random_action(envs, obs, rng))
        obs = step.obs
        _check_obs(envs, obs, number, problems)
        _check_step(envs, step, number, problems)
        trace.append(
            {
                **obs,
                "reward": step.reward,
                "terminated": step.terminated,
                "truncated": step.truncated,
            }
        )
    return trace


def random_action(envs: Envs, obs: Obs, rng: np.random.Generator) -> np.ndarray:
    """Draw random legal actions, `[N]` or `[N, *shape]`; with agents `[N, A]` or `[N, A, *shape]`.

    Args:
        envs: the environments.
        obs: what they show, with the mask of legal actions if there is one.
        rng: draws.
    """
    space: Any = envs.action_space
    count = lead(envs)
    if space.dtype is not None and space.dtype.kind == "f":
        low, high = (np.clip(bound, -10.0, 10.0) for bound in (space.low, space.high))
        return rng.uniform(low, high, (*count, *space.shape)).astype(np.float32)
    if not action_layout(space).choices:
        return rng.integers(0, 2, (*count, *space.shape))
    sizes = choice_sizes(space)
    mask = obs.get(MASK, np.ones((*count, sizes.sum()), dtype=bool))
    parts = np.split(mask, np.cumsum(sizes)[:-1], axis=-1)
    chosen = [np.argmax(rng.random(part.shape) * part, axis=-1) for part in parts]
    return np.stack(chosen, axis=-1) if space.shape else chosen[0]


def choice_sizes(space: Any) -> np.ndarray:
    """Return how many options each choice of a Discrete or MultiDiscrete space has."""
    return np.atleast_1d(getattr(space, "nvec", getattr(space, "n", 0)))


def _check_obs(envs: Envs, obs: Obs, number: int, problems: dict[str, str]) -> None:
    def note(topic: str, message: str) -> None:
        problems.setdefault(topic, f"step {number}: {message}" if number else f"reset: {message}")

    for key, space in fields_of(envs.observation_space).items():
        if key not in obs:
            note(f"{key} missing", f"the observation has no key {key!r}")
            continue
        array, shape = obs[key], (*lead(envs), *(space.shape or ()))
        if array.shape != shape:
            note(f"{key} shape", f"{key}: expected shape {list(shape)}, got {list(array.shape)}")
            continue
        if array.dtype != space.dtype:
            note(f"{key} dtype", f"{key}: expected dtype {space.dtype}, got {array.dtype}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            row = int(np.argwhere(~np.isfinite(array))[0][0])
            note(f"{key} finite", f"{key}: environment {row} gave a value that is not finite")
        bounds = bounds_of(space)
        if bounds is not None and ((array < bounds[0]) | (array > bounds[1])).any():
            row = int(np.argwhere((array < bounds[0]) | (array > bounds[1]))[0][0])
            note(f"{key} bounds", f"{key}: environment {row} left the bounds of its space")
    if MASK in obs:
        _check_mask(envs, obs[MASK], note)


def _check_mask(envs: Envs, mask: np.ndarray, note: Any) -> None:
    actions = action_layout(envs.action_space)
    expected = (*lead(envs), actions.choices)
    if mask.shape != expected or mask.dtype != bool:
        note("mask", f"{MASK}: expected bool {list(expected)}, got {mask.dtype} {list(mask.shape)}")
    elif not actions.legal(mask).all():
        row = int(np.argwhere(~actions.legal(mask))[0][0])
        note("mask", f"{MASK}: environment {row} leaves nothing of a choice")


def _check_step(envs: Envs, step: Step, number: int, problems: dict[str, str]) -> None:
    flags = {"terminated": bool, "truncated": bool, "ignored": bool, "reward": np.float32}
    for name, dtype in flags.items():
        array = getattr(step, name)
        if array.shape != lead(envs) or array.dtype != dtype:
            problems.setdefault(
                name,
                f"step {number}: {name}: expected {np.dtype(dtype)} {list(lead(envs))}, got "
                f"{array.dtype} {list(array.shape)}",
            )
    if not np.isfinite(step.reward).all():
        place = tuple(np.argwhere(~np.isfinite(step.reward))[0])
        problems.setdefault(
            "reward finite",
            f"step {number}: reward: environment {place[0]} gave {step.reward[place]}",
        )


def _first_difference(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> str | None:
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        for key in a:
            if a[key].shape != b[key].shape or not np.array_equal(
                a[key], b[key], equal_nan=a[key].dtype.kind == "f"
            ):
                return f"{key} at step {number}" if number else f"{key} of reset"
    return None
