"""Any Gymnasium `VectorEnv`, whatever its autoreset mode."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from keel.envs import snapshot
from keel.envs.faults import BadStepError, EnvWarning
from keel.envs.names import spec_for
from keel.envs.protocol import Autoreset, Episodes, Obs, Request, Saved, Step, env_seeds
from keel.envs.spaces import GROUP_TWICE, METHOD, action_layout, observation_layout, open_mask
from keel.envs.watchdog import Place, Watch, close_and_warn
from keel.errors import InputError
from keel.types import GROUP, MASK


class VectorEnvs:
    """A Gymnasium `VectorEnv` in any autoreset mode.

    NEXT_STEP and SAME_STEP stay as they are; DISABLED is reset here, which makes it same_step.
    """

    agents: tuple[str, ...] = ()

    def __init__(
        self,
        venv: VectorEnv[Any, Any, Any],
        backend: str = "gymnasium vector",
        timeout: float = 60.0,
    ) -> None:
        self._venv = venv
        self._mode = AutoresetMode(venv.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._layout = observation_layout(venv.single_observation_space)
        self._actions = action_layout(venv.single_action_space)
        self.declared_spaces = ((venv.single_observation_space, venv.single_action_space),)
        self.num_envs = venv.num_envs
        self.observation_space = self._layout.space
        self.action_space = self._actions.space
        self.backend = backend
        self.autoreset: Autoreset = (
            "next_step" if self._mode is AutoresetMode.NEXT_STEP else "same_step"
        )
        self._copy = getattr(venv.unwrapped, "copy", True) is False  # it reuses its own arrays
        self._none = np.zeros(self.num_envs, dtype=bool)
        self._pending = self._none
        self._masked = False
        self._group = np.full(self.num_envs, -1, dtype=np.int64)
        self._episodes = Episodes(self.num_envs)
        first = getattr(venv.unwrapped, "envs", [venv.unwrapped])[0]
        if hasattr(first, METHOD) or getattr(first, "has_wrapper_attr", lambda _: False)(METHOD):
            warnings.warn(
                f"{METHOD}() of a vector environment does not count; give the mask as "
                f"info[{MASK!r}], or use envs.backend sync",
                EnvWarning,
                stacklevel=2,
            )
        self._seed, self._steps = -1, 0
        self._watch = Watch(self._place, timeout)

    def reset(self, seed: int) -> Obs:
        seeds_each = isinstance(self._venv.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        seeds: Any = env_seeds(seed, self.num_envs)
        self._seed, self._steps = seed, 0
        with self._watch("reset"):
            raw, info = self._venv.reset(seed=seeds if seeds_each else seeds[0])
        self._pending = self._none
        self._episodes.clear()
        self._masked = MASK in info
        return self._read(raw, info, self._none)

    def step(self, action: np.ndarray) -> Step:
        encoded = self._actions.encode(action)
        self._steps += 1
        with self._watch("step"):
            raw, reward, terminated, truncated, info = self._venv.step(encoded)
        pending = self._pending
        terminated, truncated = np.asarray(terminated, bool), np.asarray(truncated, bool)
        reward = np.asarray(reward)
        ignored = pending if np.count_nonzero(pending) else None
        if ignored is not None:
            counts = ~pending
            terminated, truncated, reward = terminated & counts, truncated & counts, reward * counts
        done = terminated | truncated
        finished = self._episodes.update(reward, done, ignored)
        final = None
        if self.autoreset == "next_step":
            self._pending = done
        elif finished[0].size:
            index = finished[0]
            if self._mode is AutoresetMode.DISABLED:
                final = index, self._rows(raw, info, index)
                with self._watch("reset"):
                    raw, info = self._venv.reset(options={"reset_mask": done})
            else:
                final = index, self._final(info, index)
        obs = self._read(raw, info, done)
        ignored = self._none.copy() if ignored is None else ignored
        reward = reward.astype(np.float32, copy=False)
        return Step(obs, reward, terminated, truncated, ignored, final, *finished)

    def _read(self, raw: Any, info: dict[str, Any], done: np.ndarray) -> Obs:
        obs = self._layout.read(raw, (self.num_envs,))
        if self._copy:
            obs = {key: array.copy() for key, array in obs.items()}
        if self._masked or MASK in info:
            mask = np.ones((self.num_envs, self._actions.choices), dtype=bool)
            if MASK in info:
                rows = info.get(f"_{MASK}", slice(None))
                mask[rows] = np.asarray(info[MASK])[rows]
            obs[MASK] = mask
        if MASK in obs:
            open_mask(obs[MASK], done, self._actions)
        if GROUP in info:
            if self._layout.has(GROUP):
                raise BadStepError(GROUP_TWICE)
            rows = info.get(f"_{GROUP}", slice(None))
            self._group[rows] = np.asarray(info[GROUP])[rows]
        if (self._group >= 0).any():
            obs[GROUP] = self._group.copy()
        return obs

    def _rows(self, raw: Any, info: dict[str, Any], index: np.ndarray) -> Obs:
        obs = self._read(raw, info, np.ones(self.num_envs, dtype=bool))
        return {key: array[index] for key, array in obs.items()}

    def _final(self, info: dict[str, Any], index: np.ndarray) -> Obs:
        """Return the final observations of SAME_STEP, which come as one object per row."""
        final_obs = info["final_obs"]
        if isinstance(final_obs, np.ndarray) and final_obs.dtype != object:
            return self._layout.read(final_obs[index], (len(index),))
        rows = [self._layout.read(final_obs[i], ()) for i in index]
        obs = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
        if self._masked:
            mask = info.get("final_info", {}).get(MASK)
            every = np.ones((self.num_envs, self._actions.choices), dtype=bool)
            obs[MASK] = (every if mask is None else np.asarray(mask, dtype=bool))[index]
        if MASK in obs:
            open_mask(obs[MASK], np.ones(len(index), dtype=bool), self._actions)
        return obs

    def close(self) -> None:
        close_and_warn([self._venv], self._watch.timeout)

    def _place(self) -> Place:
        return Place(-1, self._seed, self._steps)

    def save(self) -> Saved | None:
        state = snapshot.save_vector(self._venv)
        if state is None:
            return None
        arrays, data = state
        arrays |= self._episodes.save() | {"pending": self._pending.copy()}
        return arrays, data

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
        snapshot.load_vector(self._venv, arrays, data)
        self._episodes.load(arrays)
        self._pending = np.array(arrays["pending"], dtype=bool)


def make_vector(request: Request) -> VectorEnvs:
    """Make environments by the vector entry point that Gymnasium has for them."""
    spec = spec_for(request)
    if spec is None or spec.vector_entry_point is None:
        raise InputError(f"backend: {request.env_id} has no vector entry point; use sync or async")
    venv = gymnasium.make_vec(
        spec, request.num_envs, vectorization_mode="vector_entry_point", **request.kwargs
    )
    if request.guard:
        # Every action is looked at already, in a tenth of the time that Gymnasium's own look takes.
        vars(venv.unwrapped.action_space)["contains"] = lambda action: True
    return VectorEnvs(venv, timeout=request.timeout)
