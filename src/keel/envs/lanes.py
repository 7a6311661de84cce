"""Environments stepped one after the other, writing into arrays that were given to them.

The sync backend runs all its lanes in this process; each worker of the async backend runs some, on
memory that it shares with the parent. Both therefore give the same trajectories.
"""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from keel.envs.faults import BadStepError, EnvError, EnvRaisedError, EnvWarning, describe
from keel.envs.protocol import Autoreset, Episodes, Obs, Step
from keel.envs.spaces import GROUP_TWICE, METHOD, ActionLayout, ObsLayout, open_mask
from keel.envs.watchdog import Place
from keel.resources import expect_memory
from keel.types import GROUP, MASK

Env = gymnasium.Env[Any, Any]
NUMBERS = (int, float, np.number, np.bool_, np.ndarray)


class Buffers(NamedTuple):
    """Arrays that lanes write, `[N, …]` each."""

    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    ignored: np.ndarray
    masked: np.ndarray
    """bool: this environment gave a mask in its info."""
    group: np.ndarray
    """int64: the group that it named there; −1 if it named none."""
    mask: np.ndarray
    final_mask: np.ndarray
    obs: Obs
    final: Obs

    def rows(self, first: int, last: int) -> Buffers:
        """Return views of the rows `first` to `last − 1`."""
        part: list[Any] = [array[first:last] for array in self[:9]]
        part += [{k: v[first:last] for k, v in tree.items()} for tree in self[9:]]
        return Buffers(*part)


@dataclass(frozen=True, eq=False)
class Plan:
    """The shapes of `Buffers` for N environments; the same in the parent and in its workers."""

    layout: ObsLayout
    actions: ActionLayout
    num_envs: int

    def _arrays(self) -> Iterator[tuple[tuple[int, ...], np.dtype[Any]]]:
        flag, choices = np.dtype(bool), self.actions.choices
        yield self.actions.raw_shape, self.actions.dtype
        yield (), np.dtype(np.float64)
        for _ in range(4):
            yield (), flag
        yield (), np.dtype(np.int64)
        for _ in range(2):
            yield (choices,), flag
        for _ in range(2):
            for field in self.layout.fields:
                yield field.shape, field.dtype

    @property
    def nbytes(self) -> int:
        return sum(_aligned(self._size(shape, dtype)) for shape, dtype in self._arrays())

    def _size(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        return self.num_envs * math.prod(shape) * dtype.itemsize

    def buffers(self, memory: Any) -> Buffers:
        """Lay `Buffers` over `memory`, any writable buffer of `nbytes` bytes."""
        arrays: list[Any] = []
        offset = 0
        for shape, dtype in self._arrays():
            full = (self.num_envs, *shape)
            arrays.append(np.ndarray(full, dtype, buffer=memory, offset=offset))
            offset += _aligned(self._size(shape, dtype))
        keys = [field.key for field in self.layout.fields]
        trees = arrays[9 : 9 + len(keys)], arrays[9 + len(keys) :]
        return Buffers(*arrays[:9], *(dict(zip(keys, tree, strict=True)) for tree in trees))

    def expect_memory(self) -> None:
        """Refuse, before anything is allocated, what this machine cannot hold."""
        expect_memory(
            f"num_envs: {self.num_envs} environments", self.nbytes, "use fewer environments"
        )


def _aligned(size: int) -> int:
    return -(-size // 64) * 64  # no two arrays share a cache line


class Lanes:
    """Environments `first … first + K − 1`, on their rows of the buffers.

    `progress` `[1]` holds the index of the environment at work: what a parent needs to know when a
    worker hangs or dies.
    """

    def __init__(
        self,
        envs: Sequence[Env],
        layout: ObsLayout,
        buffers: Buffers,
        autoreset: Autoreset,
        first: int = 0,
        progress: np.ndarray | None = None,
    ) -> None:
        self.envs, self.first = list(envs), first
        self.seeds = [-1] * len(self.envs)
        self.steps = 0
        self.pending = [False] * len(self.envs)
        self.progress = np.full(1, first) if progress is None else progress
        self._layout, self._out = layout, buffers
        self._masks = [mask_method(env, layout, buffers.mask.shape[1]) for env in self.envs]
        self._same_step = autoreset == "same_step"
        buffers.mask[:] = True
        buffers.final_mask[:] = True
        buffers.group[:] = -1

    def reset(self, seeds: Sequence[int]) -> None:
        self.seeds, self.steps = list(seeds), 0
        self.pending = [False] * len(self.envs)
        for row, seed in enumerate(self.seeds):
            self.progress[0] = self.first + row
            try:
                self._reset(row, seed)
            except (Exception, SystemExit) as error:
                raise self._fault(row, error) from error

    def step(self) -> None:
        """Take the actions in the buffers; rows that are done reset now, or on the next step."""
        self.steps += 1
        out = self._out
        out.ignored[:] = self.pending
        actions = out.action.copy()  # an environment may keep the action it was given
        rewards: list[Any] = []
        flags: list[tuple[bool, bool]] = []
        for row in range(len(self.envs)):
            self.progress[0] = self.first + row
            try:
                reward, terminated, truncated = self._step(row, actions[row])
            except (Exception, SystemExit) as error:
                raise self._fault(row, error) from error
            rewards.append(reward)
            flags.append((terminated, truncated))
        out.reward[:] = rewards
        out.terminated[:], out.truncated[:] = zip(*flags, strict=True)

    def place(self) -> Place:
        """Return which environment is at work, for a watchdog."""
        index = int(self.progress[0])
        return Place(index, self.seeds[index - self.first], self.steps)

    def _fault(self, row: int, error: BaseException) -> EnvError:
        index = self.first + row
        if isinstance(error, BadStepError):
            return BadStepError(f"environment {index}, step {self.steps}: {error}")
        doing = "step" if self.steps else "reset"
        what = describe(error, doing) if isinstance(error, SystemExit) else f"raised in {doing}"
        trace = "".join(traceback.format_exception(error))
        return EnvRaisedError(what, index, self.seeds[row], self.steps, trace)

    def _reset(self, row: int, seed: int | None) -> None:
        result = self.envs[row].reset(seed=seed)
        if type(result) is not tuple or len(result) != 2 or not isinstance(result[1], dict):
            raise BadStepError(
                f"reset must return (observation, info), got {_describe_value(result)}"
            )
        self._layout.store(self._out.obs, row, result[0])
        self._store_mask(self._out.mask, row, result[1], ended=False)
        self._store_group(row, result[1])

    def _step(self, row: int, action: Any) -> tuple[Any, bool, bool]:
        out = self._out
        if self.pending[row]:
            self._reset(row, None)
            self.pending[row] = False
            return 0.0, False, False
        result = self.envs[row].step(action)
        if type(result) is not tuple or len(result) != 5:
            raise BadStepError(
                "step must return (observation, reward, terminated, truncated, info), "
                f"got {_describe_value(result)}"
            )
        obs, terminated, truncated, info = result[0], *result[2:]
        reward: Any = result[1]
        if type(reward) is not float and (np.ndim(reward) or not isinstance(reward, NUMBERS)):
            raise BadStepError(f"reward: expected a number, got {_describe_value(reward)}")
        done = bool(terminated or truncated)
        if done and self._same_step:
            self._layout.store(out.final, row, obs)
            self._store_mask(out.final_mask, row, info, ended=bool(terminated))
            self._reset(row, None)
        else:
            self.pending[row] = done
            self._layout.store(out.obs, row, obs)
            self._store_mask(out.mask, row, info, ended=bool(terminated))
            self._store_group(row, info)
        return reward, terminated, truncated

    def _store_mask(self, mask: np.ndarray, row: int, info: dict[str, Any], ended: bool) -> None:
        """Store the mask of the info, else that of `action_masks()` unless the episode ended."""
        method = self._masks[row]
        if MASK not in info and (method is None or ended):
            mask[row] = True
            return
        raw_mask = info[MASK] if method is None or MASK in info else method()
        flat = np.asarray(raw_mask).reshape(-1)
        if flat.shape != mask.shape[1:]:
            raise BadStepError(
                f"{MASK}: expected {mask.shape[1]} entries, one per action, got {flat.shape[0]}"
            )
        mask[row] = flat
        self._out.masked[row] = True

    def _store_group(self, row: int, info: dict[str, Any]) -> None:
        if GROUP not in info:
            return
        if self._layout.has(GROUP):
            raise BadStepError(GROUP_TWICE)
        group = info[GROUP]
        if isinstance(group, bool) or not isinstance(group, int | np.integer) or group < 0:
            raise BadStepError(f"info[{GROUP!r}]: expected a whole number from 0, got {group!r}")
        self._out.group[row] = group


def mask_method(env: Env, layout: ObsLayout, choices: int) -> Callable[[], Any] | None:
    """Return the `action_masks` of an environment or of a wrapper of it (sb3-contrib's convention).

    None where there is none, where the observation holds a mask already, and where actions are not
    counted.
    """
    method = env.get_wrapper_attr(METHOD) if env.has_wrapper_attr(METHOD) else None
    return method if callable(method) and choices and not layout.has(MASK) else None


def warn_of_masks(env: Env, choices: int) -> None:
    """Say that an environment has masks which cannot be kept: its actions are not counted."""
    if not choices and env.has_wrapper_attr(METHOD):
        warnings.warn(
            f"{METHOD}() does not count: masks are for Discrete and MultiDiscrete actions, "
            f"this environment's are {env.action_space}",
            EnvWarning,
            stacklevel=3,
        )


def _describe_value(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {list(value.shape)}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__


def read_obs(buffers: Buffers, done: np.ndarray, actions: ActionLayout) -> Obs:
    """Copy the observations, with the mask where the environments gave one."""
    obs = {key: array.copy() for key, array in buffers.obs.items()}
    if np.count_nonzero(buffers.masked):
        obs[MASK] = buffers.mask.copy()
    if MASK in obs:
        open_mask(obs[MASK], done, actions)
    if np.count_nonzero(buffers.group >= 0):
        obs[GROUP] = buffers.group.copy()
    return obs


def read_step(
    buffers: Buffers, episodes: Episodes, autoreset: Autoreset, actions: ActionLayout
) -> Step:
    """Copy what the lanes wrote into a `Step`; rows both ignored and truncated were lost."""
    terminated, truncated = buffers.terminated.copy(), buffers.truncated.copy()
    ignored = buffers.ignored.copy()
    done = terminated | truncated
    finished = episodes.update(buffers.reward, done & ~ignored, ignored)
    final = None
    if autoreset == "same_step" and finished[0].size:
        index = finished[0]
        rows = {key: array[index] for key, array in buffers.final.items()}
        if buffers.masked.any():
            rows[MASK] = buffers.final_mask[index]
        if MASK in rows:
            open_mask(rows[MASK], np.ones(len(index), dtype=bool), actions)
        final = index, rows
    obs = read_obs(buffers, done, actions)
    reward = buffers.reward.astype(np.float32)
    return Step(obs, reward, terminated, truncated, ignored, final, *finished)
