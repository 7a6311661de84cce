"""How spaces become arrays.

| observation space            | in `Obs`                                              |
|------------------------------|-------------------------------------------------------|
| Box, uint8, rank 3           | uint8 `[N, C, H, W]`, channels moved to the front     |
| Box, uint8, rank 2           | uint8 `[N, 1, H, W]`                                  |
| Box, other dtype, rank 1, 3  | float32 `[N, *shape]`, kept                           |
| Box, any other rank          | float32 `[N, D]`, flattened                           |
| Discrete, MultiDiscrete      | int64 `[N]`, `[N, K]`, counted from 0                 |
| MultiBinary                  | float32 `[N, K]`, a Box of 0 and 1                    |
| Dict of those                | one entry per key; Dict inside Dict is refused        |
| `action_mask` key of a Dict  | bool `[N, A]`, left out of the space                  |

| action space            | `step` takes                                                    |
|-------------------------|-----------------------------------------------------------------|
| Discrete, MultiDiscrete | integers `[N]`, `[N, K]`, counted from 0 (a start is added)     |
| MultiBinary             | 0 or 1 `[N, K]`                                                 |
| Box of floats           | floats `[N, D]`, unclipped; clipped to the bounds here          |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from keel.envs.faults import BadStepError, UnsupportedSpaceError
from keel.envs.protocol import Obs
from keel.keys import MASK

MOST_CHANNELS = 16
"""Of a picture: four frames in colour are twelve."""


@dataclass(frozen=True, eq=False)
class Field:
    """One array of an observation: what the environment gives, and what `Obs` holds."""

    key: str
    raw_shape: tuple[int, ...]
    raw_dtype: np.dtype[Any]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    space: Space[Any] | None
    """As `Obs` lays it out; None for the action mask."""
    start: np.ndarray | None = None
    channels_last: bool = False
    """An image `[H, W, C]`, which `Obs` holds as `[C, H, W]`."""

    def checked(self, value: Any, lead: tuple[int, ...]) -> np.ndarray:
        """`value` as an array, if its shape and the kind of its dtype are what was declared."""
        array = value if type(value) is np.ndarray else np.asarray(value)
        if array.shape != lead + self.raw_shape:
            raise BadStepError(
                f"{self.key}: expected shape {[*lead, *self.raw_shape]}, got {list(array.shape)}"
            )
        if array.dtype != self.raw_dtype and not np.can_cast(
            array.dtype, self.raw_dtype, "same_kind"
        ):
            raise BadStepError(f"{self.key}: expected dtype {self.raw_dtype}, got {array.dtype}")
        return array

    def read(self, value: Any, lead: tuple[int, ...]) -> np.ndarray:
        """`value` `[*lead, *raw_shape]` as `[*lead, *shape]`; copies only to change the dtype."""
        array = self.checked(value, lead)
        if array.dtype != self.dtype:
            array = array.astype(self.dtype)
        if self.channels_last:
            array = np.moveaxis(array, -1, -3)
        elif self.shape != self.raw_shape:
            array = array.reshape(lead + self.shape)
        return array if self.start is None else array - self.start

    def store(self, out: np.ndarray, row: int, value: Any) -> None:
        """Write one environment's `value` `[*raw_shape]` into `out[row]` `[*shape]`."""
        array = self.checked(value, ())
        if self.start is not None:
            array = array - self.start
        if self.channels_last:
            array = np.moveaxis(array, -1, 0)
        out[row] = array if self.shape == array.shape else array.reshape(self.shape)


@dataclass(frozen=True, eq=False)
class ObsLayout:
    """The fields of an observation space; `plain` when it is not a Dict."""

    fields: tuple[Field, ...]
    plain: bool

    @property
    def space(self) -> Space[Any]:
        """The single space, as `Obs` lays it out, without the action mask."""
        shown = {field.key: field.space for field in self.fields if field.space is not None}
        return shown["obs"] if self.plain else spaces.Dict(shown)

    def read(self, raw: Any, lead: tuple[int, ...]) -> Obs:
        """An observation of the environment, with leading axes `lead`, as `Obs`."""
        if self.plain:
            return {"obs": self.fields[0].read(raw, lead)}
        self._expect_keys(raw)
        return {field.key: field.read(raw[field.key], lead) for field in self.fields}

    def store(self, out: Obs, row: int, raw: Any) -> None:
        """Write one environment's observation into row `row` of `out`."""
        if self.plain:
            self.fields[0].store(out["obs"], row, raw)
            return
        self._expect_keys(raw)
        for field in self.fields:
            field.store(out[field.key], row, raw[field.key])

    def _expect_keys(self, raw: Any) -> None:
        if not isinstance(raw, dict) or any(field.key not in raw for field in self.fields):
            got = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
            raise BadStepError(
                f"observation: expected a dict with {[f.key for f in self.fields]}, got {got}"
            )


def observation_layout(space: Space[Any], *, matrices: bool = False) -> ObsLayout:
    """The layout of a single observation space, or an `UnsupportedSpaceError` that names it.

    With `matrices`, Boxes of rank 2 are not flattened.
    """
    if not isinstance(space, spaces.Dict):
        return ObsLayout((_field("obs", space, matrices),), plain=True)
    fields = tuple(_field(key, inner, matrices) for key, inner in space.items())
    return ObsLayout(fields, plain=False)


def _field(key: str, space: Space[Any], matrices: bool) -> Field:
    if key == MASK and isinstance(space, spaces.Box | spaces.MultiBinary):
        shape, dtype = space.shape, np.dtype(space.dtype)
        return Field(key, shape, dtype, (math.prod(shape),), np.dtype(bool), None)
    if isinstance(space, spaces.Discrete):
        shown = spaces.Discrete(int(space.n))
        return Field(key, (), space.dtype, (), np.dtype(np.int64), shown, _start(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        counts = spaces.MultiDiscrete(space.nvec.reshape(-1))
        shape = (space.nvec.size,)
        start = _start(space.start)
        return Field(key, space.shape, space.dtype, shape, np.dtype(np.int64), counts, start)
    if isinstance(space, spaces.MultiBinary):
        flat = (math.prod(space.shape),)
        box = spaces.Box(0.0, 1.0, flat, np.float32)
        return Field(key, space.shape, np.dtype(space.dtype), flat, np.dtype(np.float32), box)
    if isinstance(space, spaces.Box) and space.dtype.kind in "fiub":
        shape, dtype = _box_shape(space)
        if matrices and len(space.shape) == 2 and dtype == np.float32:
            shape = space.shape
        last = _has_channels_last(space)
        bounds = [np.moveaxis(x, -1, 0) if last else x for x in (space.low, space.high)]
        low, high = (bound.reshape(shape).astype(dtype) for bound in bounds)
        shown_box = spaces.Box(low, high, shape, dtype.type)
        return Field(key, space.shape, space.dtype, shape, dtype, shown_box, channels_last=last)
    raise UnsupportedSpaceError(
        f"observation space {key!r}: {space} is not supported; Keel takes Box, Discrete, "
        "MultiDiscrete, MultiBinary and one Dict of those (flatten it with a gymnasium wrapper)"
    )


def _start(start: Any) -> np.ndarray | None:
    """Where a counted space begins, flat (0-d for Discrete); None for 0, which costs nothing."""
    array = np.asarray(start, dtype=np.int64)
    return (array.reshape(-1) if array.ndim else array) if np.any(array) else None


def _box_shape(space: spaces.Box) -> tuple[tuple[int, ...], np.dtype[Any]]:
    shape, rank = space.shape, len(space.shape)
    if space.dtype == np.uint8 and rank == 3:
        last = _has_channels_last(space)
        return (shape[2], *shape[:2]) if last else shape, np.dtype(np.uint8)
    if space.dtype == np.uint8 and rank == 2:
        return (1, *shape), np.dtype(np.uint8)
    return (shape if rank in (1, 3) else (math.prod(shape),)), np.dtype(np.float32)


def _has_channels_last(space: spaces.Box) -> bool:
    """Pictures as most environments draw them: few channels, behind height and width."""
    if space.dtype != np.uint8 or len(space.shape) != 3:
        return False
    height, width, channels = space.shape
    return channels <= MOST_CHANNELS and channels < min(height, width)


@dataclass(frozen=True, eq=False)
class ActionLayout:
    """What `step` takes, and how it becomes what the environment takes."""

    space: Space[Any]
    """The single space, as `step` expects it."""
    raw_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: np.ndarray | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None

    @property
    def choices(self) -> int:
        """A: the width of an action mask; 0 where actions are not counted."""
        if isinstance(self.space, spaces.Discrete):
            return int(self.space.n)
        if isinstance(self.space, spaces.MultiDiscrete):
            return int(self.space.nvec.sum())
        return 0

    @cached_property
    def _parts(self) -> np.ndarray:
        """Where each choice begins in a mask."""
        counts = self.space.nvec if isinstance(self.space, spaces.MultiDiscrete) else np.ones(1)
        return np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)

    def legal(self, mask: np.ndarray) -> np.ndarray:
        """`[N]` bool: whether `mask` `[N, A]` leaves something of every choice."""
        if self._parts.size == 1:
            return np.asarray(mask.any(1))
        return np.asarray(np.logical_or.reduceat(mask, self._parts, axis=1).all(1))

    def encode(self, action: np.ndarray) -> np.ndarray:
        """Actions `[N, *]` of the policy as `[N, *raw_shape]` of the environment."""
        if action.shape[1:] != self.space.shape:
            raise BadStepError(
                f"action: expected shape [N{''.join(f', {n}' for n in self.space.shape or ())}], "
                f"got {list(action.shape)}"
            )
        if self.low is not None and self.high is not None:
            action = np.minimum(np.maximum(action, self.low), self.high)
        elif self.start is not None:
            action = action + self.start
        if action.dtype != self.dtype:
            action = action.astype(self.dtype)
        if action.shape[1:] != self.raw_shape:
            action = action.reshape(-1, *self.raw_shape)
        return action


def action_layout(space: Space[Any], dtype: np.dtype[Any] | None = None) -> ActionLayout:
    """The layout of a single action space; `dtype` overrides what the environment is given."""
    if isinstance(space, spaces.Discrete):
        counted = spaces.Discrete(int(space.n))
        return ActionLayout(counted, (), dtype or np.dtype(np.int64), _start(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        counts = spaces.MultiDiscrete(space.nvec.reshape(-1))
        return ActionLayout(counts, space.shape, dtype or space.dtype, _start(space.start))
    if isinstance(space, spaces.MultiBinary):
        flat = spaces.MultiBinary(math.prod(space.shape))
        return ActionLayout(flat, space.shape, dtype or np.dtype(np.int8))
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        size = (math.prod(space.shape),)
        low, high = (bound.reshape(size).astype(np.float32) for bound in (space.low, space.high))
        box = spaces.Box(low, high, size, np.float32)
        return ActionLayout(box, space.shape, dtype or space.dtype, None, low, high)
    raise UnsupportedSpaceError(
        f"action space: {space} is not supported; Keel takes Discrete, MultiDiscrete, "
        "MultiBinary and Box of floats"
    )


def open_mask(mask: np.ndarray, done: np.ndarray, actions: ActionLayout) -> np.ndarray:
    """A finished row `[N]` needs no legal action: allow all, so that sampling stays possible."""
    if np.count_nonzero(done):
        mask[done & ~actions.legal(mask)] = True
    return mask
