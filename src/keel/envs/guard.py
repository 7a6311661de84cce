"""The gate between environments and storage: what is broken is refused before it is kept.

On by default. A healthy step costs one pass over each array; only a failed test looks for the row.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from keel.envs.faults import BadStepError, ClosedEnvError, EnvError, EnvWarning
from keel.envs.protocol import Autoreset, Envs, Obs, Saved, Step, lead
from keel.envs.spaces import action_layout
from keel.types import MASK

BOUNDS_EVERY = 64
"""Bounds only warn, so after the first steps they are looked at now and then."""
UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class Guarded:
    """`Envs` whose every observation, reward, mask and action is checked."""

    def __init__(self, envs: Envs) -> None:
        self.envs = envs
        self._fields = fields_of(envs.observation_space)
        self._bounds = {key: bounds_of(space) for key, space in self._fields.items()}
        self._largest = _largest(envs.action_space)
        self._actions = action_layout(envs.action_space)
        self._masked = False
        self._step = 0
        self._state = "made"
        self._lead = lead(envs)
        rows = math.prod(self._lead)
        self._action_shape = (*self._lead, *(envs.action_space.shape or ()))
        self._sound = [
            (key, (*self._lead, *(space.shape or ())), space.dtype, _zeros_like(rows, space))
            for key, space in self._fields.items()
        ]
        self._rewards = _zeros(rows)

    @property
    def num_envs(self) -> int:
        return self.envs.num_envs

    @property
    def agents(self) -> tuple[str, ...]:
        return self.envs.agents

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        return self.envs.observation_space

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        return self.envs.action_space

    @property
    def declared_spaces(self) -> tuple[tuple[gymnasium.Space[Any], gymnasium.Space[Any]], ...]:
        """Spaces as the environment itself declares them (`keel.envs.space_data.Interface`)."""
        return getattr(self.envs, "declared_spaces", ())

    @property
    def backend(self) -> str:
        return self.envs.backend

    @property
    def autoreset(self) -> Autoreset:
        return self.envs.autoreset

    @property
    def restarts(self) -> int:
        """Number of workers that were started again (async backend)."""
        return int(getattr(self.envs, "restarts", 0))

    def reset(self, seed: int) -> Obs:
        if self._state == "closed":
            raise ClosedEnvError("reset after close: make the environments again")
        self._step = 0
        obs: Obs = self._call(self.envs.reset, seed)
        with np.errstate(invalid="ignore"):
            self._check_obs(obs, self._lead, None)
        self._state, self._masked = "running", MASK in obs
        return obs

    def step(self, action: np.ndarray) -> Step:
        if self._state != "running":
            raise ClosedEnvError(
                "step after close: make the environments again"
                if self._state == "closed"
                else "step before reset: call reset(seed) first"
            )
        self._step += 1
        self._check_action(action)
        step: Step = self._call(self.envs.step, action)
        if (MASK in step.obs) is not self._masked:
            raise self._bad_step(
                f"{MASK} came with {'reset' if self._masked else 'step'} only; an environment that "
                "rules out actions says so in the info of both"
            )
        with np.errstate(invalid="ignore"):  # 0 · ∞, of which we shall speak ourselves
            if not self._is_sound(step):
                self._check_obs(step.obs, self._lead, None)
                self._check_finite("reward", step.reward, None)
            if step.final_obs is not None:
                index, final = step.final_obs
                self._check_obs(final, (len(index), *self._lead[1:]), index)
        return step

    def close(self) -> None:
        """Close the environments; a second call does nothing."""
        if self._state != "closed":
            self._state = "closed"
            self.envs.close()

    def save(self) -> Saved | None:
        saved = self.envs.save()
        guard_state = {"guard_step": self._step, "guard_masked": self._masked}
        return None if saved is None else (saved[0], saved[1] | guard_state)

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
        self.envs.load(arrays, data)
        self._step = int(data.get("guard_step", 0))
        self._state, self._masked = "running", bool(data.get("guard_masked", self._masked))

    def _is_sound(self, step: Step) -> bool:
        """Return whether a step is healthy, in one pass; if not, slower checks find out why."""
        if self._step < BOUNDS_EVERY or not self._step % BOUNDS_EVERY or MASK in step.obs:
            return False
        for key, shape, dtype, zeros in self._sound:
            array = step.obs[key]
            if array.shape != shape or array.dtype != dtype:
                return False
            if zeros is not None and array.ravel("K").dot(zeros) != 0.0:
                return False
        return bool(step.reward.ravel("K").dot(self._rewards) == 0.0)

    def _call(self, method: Any, argument: Any) -> Any:
        """Call a method of the environments, and close all of them if one fails."""
        try:
            return method(argument)
        except EnvError:
            self.close()
            raise

    def _check_obs(self, obs: Obs, lead: tuple[int, ...], index: np.ndarray | None) -> None:
        for key, space in self._fields.items():
            array = obs[key]
            shape = (*lead, *(space.shape or ()))
            if array.shape != shape:
                raise self._bad_step(
                    f"{key}: expected shape {list(shape)}, got {list(array.shape)}"
                )
            if array.dtype != space.dtype:
                raise self._bad_step(f"{key}: expected dtype {space.dtype}, got {array.dtype}")
            if array.dtype.kind == "f":
                self._check_finite(key, array, index)
            if self._bounds[key] is not None and (
                self._step < BOUNDS_EVERY or not self._step % BOUNDS_EVERY
            ):
                self._check_bounds(key, array)
        if MASK in obs:
            self._check_mask(obs[MASK], index)

    def _check_finite(self, name: str, array: np.ndarray, index: np.ndarray | None) -> None:
        # 0 · x is 0 unless x is NaN or ±∞: one pass that cannot overflow
        if array.ravel("K").dot(_zeros(array.size)) == 0.0:
            return
        non_finite = ~np.isfinite(array)
        position = np.argwhere(non_finite)[0]
        row = int(position[0]) if index is None else int(index[position[0]])
        at = f" at {position[1:].tolist()}" if position.size > 1 else ""
        raise self._bad_step(f"{name} is {array[tuple(position)]}{at}", row)

    def _check_bounds(self, key: str, array: np.ndarray) -> None:
        low, high = self._bounds[key] or (array, array)
        outside = (array < low) | (array > high)
        if not outside.any():
            return
        self._bounds[key] = None  # once is enough
        position = tuple(np.argwhere(outside)[0].tolist())
        warnings.warn(
            f"environment {position[0]}, step {self._step}: {key} at {list(position[1:])} is "
            f"{array[position]}, outside the bounds that its space declares; this is said once",
            EnvWarning,
            stacklevel=4,
        )

    def _check_mask(self, mask: np.ndarray, index: np.ndarray | None) -> None:
        shape = (mask.shape[0], *self._lead[1:], self._actions.choices)
        if mask.dtype != bool or mask.shape != shape:
            raise self._bad_step(
                f"{MASK}: expected bool {list(shape)}, got {mask.dtype} {list(mask.shape)}"
            )
        flat = mask.reshape(-1, mask.shape[-1])
        legal = self._actions.legal(flat)
        if np.count_nonzero(legal) < len(flat):
            worst = int(np.argmin(legal))
            row = worst // math.prod(self._lead[1:])
            forbidden = "every action" if not flat[worst].any() else "everything of one choice"
            raise self._bad_step(
                f"{MASK} forbids {forbidden}", row if index is None else int(index[row])
            )

    def _check_action(self, action: np.ndarray) -> None:
        shape = self._action_shape
        if not isinstance(action, np.ndarray) or action.shape != shape:
            actual = list(action.shape) if isinstance(action, np.ndarray) else type(action).__name__
            raise self._bad_step(f"action: expected an array of shape {list(shape)}, got {actual}")
        if self._largest is None:
            with np.errstate(invalid="ignore"):
                self._check_finite("action", action, None)
            return
        if action.dtype.kind not in "iub":
            raise self._bad_step(f"action: expected integers, got {action.dtype}")
        unsigned = action.view(UNSIGNED[action.itemsize])  # a negative number becomes a huge one
        if np.count_nonzero(unsigned > self._largest):
            wrong = np.argwhere((action < 0) | (action > self._largest))[0]
            raise self._bad_step(
                f"action is {action[tuple(wrong)]}, expected 0 to {self._largest}", int(wrong[0])
            )

    def _bad_step(self, problem: str, row: int | None = None) -> BadStepError:
        prefix = "" if row is None else f"environment {row}, "
        return BadStepError(f"{prefix}step {self._step}: {problem} ({self.backend})")


@lru_cache(maxsize=64)
def _zeros(size: int) -> np.ndarray:
    return np.zeros(size, dtype=np.float32)


def _zeros_like(rows: int, space: gymnasium.Space[Any]) -> np.ndarray | None:
    """Return zeros, one for each number in `rows` observations; None for integers."""
    dtype = space.dtype
    if dtype is None or dtype.kind != "f":
        return None
    return np.zeros(rows * math.prod(space.shape or ()), dtype=dtype)


def fields_of(space: gymnasium.Space[Any]) -> dict[str, gymnasium.Space[Any]]:
    """Return the single observation space by the keys of `Obs`."""
    return dict(space.items()) if isinstance(space, spaces.Dict) else {"obs": space}


def bounds_of(space: gymnasium.Space[Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the declared bounds with a margin for rounding; None where they forbid nothing."""
    if not isinstance(space, spaces.Box) or space.dtype == np.uint8:
        return None
    if not (np.isfinite(space.low).any() or np.isfinite(space.high).any()):
        return None
    below, above = (1e-5 * np.maximum(1.0, np.abs(bound)) for bound in (space.low, space.high))
    return (space.low - below).astype(space.dtype), (space.high + above).astype(space.dtype)


def _largest(space: gymnasium.Space[Any]) -> np.ndarray | int | None:
    """Return the largest legal action, `[]` or `[K]`; None where actions are real numbers."""
    if isinstance(space, spaces.Discrete):
        return int(space.n) - 1
    if isinstance(space, spaces.MultiDiscrete):
        return np.asarray(space.nvec - 1)
    return 1 if isinstance(space, spaces.MultiBinary) else None
