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
from keel.keys import MASK

BOUNDS_EVERY = 64
"""Bounds only warn, so after the first steps they are looked at now and then."""
UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class Guarded:
    """`Envs` whose every observation, reward, mask and action was looked at."""

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
    def backend(self) -> str:
        return self.envs.backend

    @property
    def autoreset(self) -> Autoreset:
        return self.envs.autoreset

    @property
    def restarts(self) -> int:
        """How many workers were started again (async backend)."""
        return int(getattr(self.envs, "restarts", 0))

    def reset(self, seed: int) -> Obs:
        if self._state == "closed":
            raise ClosedEnvError("reset after close: make the environments again")
        self._step = 0
        obs: Obs = self._watched(self.envs.reset, seed)
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
        step: Step = self._watched(self.envs.step, action)
        if (MASK in step.obs) is not self._masked:
            raise self._bad(
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
        """Closing twice is harmless."""
        if self._state != "closed":
            self._state = "closed"
            self.envs.close()

    def save(self) -> Saved | None:
        saved = self.envs.save()
        own = {"guard_step": self._step, "guard_masked": self._masked}
        return None if saved is None else (saved[0], saved[1] | own)

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
        self.envs.load(arrays, data)
        self._step = int(data.get("guard_step", 0))
        self._state, self._masked = "running", bool(data.get("guard_masked", self._masked))

    def _is_sound(self, step: Step) -> bool:
        """The usual case in one look; what is unusual goes through the checks that can speak."""
        if self._step < BOUNDS_EVERY or not self._step % BOUNDS_EVERY or MASK in step.obs:
            return False
        for key, shape, dtype, zeros in self._sound:
            array = step.obs[key]
            if array.shape != shape or array.dtype != dtype:
                return False
            if zeros is not None and array.ravel("K").dot(zeros) != 0.0:
                return False
        return bool(step.reward.ravel("K").dot(self._rewards) == 0.0)

    def _watched(self, call: Any, argument: Any) -> Any:
        """A failed environment is of no use any more: close it, and what is beside it."""
        try:
            return call(argument)
        except EnvError:
            self.close()
            raise

    def _check_obs(self, obs: Obs, lead: tuple[int, ...], index: np.ndarray | None) -> None:
        for key, space in self._fields.items():
            array = obs[key]
            shape = (*lead, *(space.shape or ()))
            if array.shape != shape:
                raise self._bad(f"{key}: expected shape {list(shape)}, got {list(array.shape)}")
            if array.dtype != space.dtype:
                raise self._bad(f"{key}: expected dtype {space.dtype}, got {array.dtype}")
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
        broken = ~np.isfinite(array)
        where = np.argwhere(broken)[0]
        row = int(where[0]) if index is None else int(index[where[0]])
        at = f" at {where[1:].tolist()}" if where.size > 1 else ""
        raise self._bad(f"{name} is {array[tuple(where)]}{at}", row)

    def _check_bounds(self, key: str, array: np.ndarray) -> None:
        low, high = self._bounds[key] or (array, array)
        outside = (array < low) | (array > high)
        if not outside.any():
            return
        self._bounds[key] = None  # once is enough
        where = tuple(np.argwhere(outside)[0].tolist())
        warnings.warn(
            f"environment {where[0]}, step {self._step}: {key} at {list(where[1:])} is "
            f"{array[where]}, outside the bounds that its space declares; this is said once",
            EnvWarning,
            stacklevel=4,
        )

    def _check_mask(self, mask: np.ndarray, index: np.ndarray | None) -> None:
        shape = (mask.shape[0], *self._lead[1:], self._actions.choices)
        if mask.dtype != bool or mask.shape != shape:
            raise self._bad(
                f"{MASK}: expected bool {list(shape)}, got {mask.dtype} {list(mask.shape)}"
            )
        flat = mask.reshape(-1, mask.shape[-1])
        legal = self._actions.legal(flat)
        if np.count_nonzero(legal) < len(flat):
            worst = int(np.argmin(legal))
            row = worst // math.prod(self._lead[1:])
            what = "every action" if not flat[worst].any() else "everything of one choice"
            raise self._bad(f"{MASK} forbids {what}", row if index is None else int(index[row]))

    def _check_action(self, action: np.ndarray) -> None:
        shape = self._action_shape
        if not isinstance(action, np.ndarray) or action.shape != shape:
            got = list(action.shape) if isinstance(action, np.ndarray) else type(action).__name__
            raise self._bad(f"action: expected an array of shape {list(shape)}, got {got}")
        if self._largest is None:
            with np.errstate(invalid="ignore"):
                self._check_finite("action", action, None)
            return
        if action.dtype.kind not in "iub":
            raise self._bad(f"action: expected integers, got {action.dtype}")
        unsigned = action.view(UNSIGNED[action.itemsize])  # a negative number becomes a huge one
        if np.count_nonzero(unsigned > self._largest):
            wrong = np.argwhere((action < 0) | (action > self._largest))[0]
            raise self._bad(
                f"action is {action[tuple(wrong)]}, expected 0 to {self._largest}", int(wrong[0])
            )

    def _bad(self, what: str, row: int | None = None) -> BadStepError:
        where = "" if row is None else f"environment {row}, "
        return BadStepError(f"{where}step {self._step}: {what} ({self.backend})")


@lru_cache(maxsize=64)
def _zeros(size: int) -> np.ndarray:
    return np.zeros(size, dtype=np.float32)


def _zeros_like(rows: int, space: gymnasium.Space[Any]) -> np.ndarray | None:
    """As many zeros as `rows` observations have numbers, in their type; None for integers."""
    dtype = space.dtype
    if dtype is None or dtype.kind != "f":
        return None
    return np.zeros(rows * math.prod(space.shape or ()), dtype=dtype)


def fields_of(space: gymnasium.Space[Any]) -> dict[str, gymnasium.Space[Any]]:
    """The single observation space by the keys of `Obs`."""
    return dict(space.items()) if isinstance(space, spaces.Dict) else {"obs": space}


def bounds_of(space: gymnasium.Space[Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Declared bounds with room for rounding; None where they forbid nothing."""
    if not isinstance(space, spaces.Box) or space.dtype == np.uint8:
        return None
    if not (np.isfinite(space.low).any() or np.isfinite(space.high).any()):
        return None
    room = [1e-5 * np.maximum(1.0, np.abs(bound)) for bound in (space.low, space.high)]
    return (space.low - room[0]).astype(space.dtype), (space.high + room[1]).astype(space.dtype)


def _largest(space: gymnasium.Space[Any]) -> np.ndarray | int | None:
    """The largest legal action, `[]` or `[K]`; None where actions are real numbers."""
    if isinstance(space, spaces.Discrete):
        return int(space.n) - 1
    if isinstance(space, spaces.MultiDiscrete):
        return np.asarray(space.nvec - 1)
    return 1 if isinstance(space, spaces.MultiBinary) else None
