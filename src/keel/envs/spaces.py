"""Layout of spaces as arrays.

| observation space            | in `Obs`                                                    |
|------------------------------|-------------------------------------------------------------|
| Box, rank 3, 7×7 or larger   | an image `[N, C, H, W]`: uint8, or float32 for other dtypes |
| Box, uint8, rank 3, smaller  | uint8 `[N, C, H, W]`; the network takes it as numbers       |
| Box, uint8, rank 2           | uint8 `[N, 1, H, W]`                                        |
| Box, rank 4, of images       | frames as channels: `[N, S·C, H, W]`                        |
| Box, any other               | float32 `[N, D]`, flattened                                 |
| Discrete, MultiDiscrete      | int64 `[N]`, `[N, K]`, counted from 0                       |
| MultiBinary                  | float32 `[N, K]`, a Box of 0 and 1                          |
| Dict, Tuple of those, nested | one entry for each part, `a/b` for b in a, `0/b` in a Tuple |
| `action_mask` key of a Dict  | bool `[N, A]`, left out of the space                        |

Text, Sequence, Graph and OneOf are refused. Of an image's first and last axis one is taken for its
channels (`has_channels_last`), and moved to the front.

| action space            | `step` takes                                                    |
|-------------------------|-----------------------------------------------------------------|
| Discrete, MultiDiscrete | integers `[N]`, `[N, K]`, counted from 0 (a start is added)     |
| MultiBinary             | 0 or 1 `[N, K]`                                                 |
| Box of floats           | floats `[N, D]`, unclipped; clipped to the bounds here          |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from keel.envs.faults import BadStepError, UnsupportedSpaceError
from keel.envs.protocol import Obs
from keel.types import GROUP, MASK, RESERVED, is_image_shape

METHOD = "action_masks"
"""Method by which an environment may say what is legal."""
GROUP_TWICE = f"info[{GROUP!r}]: the observation has a part of that name, too; rename one of them"

Path = tuple[str | int, ...]
"""Place of a part in nested Dicts and Tuples."""


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
    path: Path = ()
    """Place in the environment's observation; empty: it is all there is."""

    def checked(self, value: Any, lead: tuple[int, ...]) -> np.ndarray:
        """Return `value` as an array, if its shape and the kind of its dtype are as declared."""
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
        """Return `value` `[*lead, *raw_shape]` as `[*lead, *shape]`; copied to change the dtype."""
        array = self.checked(value, lead)
        if array.dtype != self.dtype:
            array = array.astype(self.dtype)
        if self.channels_last:
            array = np.moveaxis(array, -1, -3)
        if array.shape[len(lead) :] != self.shape:
            array = array.reshape(lead + self.shape)
        return array if self.start is None else array - self.start

    def store(self, out: np.ndarray, row: int, value: Any) -> None:
        """Write one environment's `value` `[*raw_shape]` into `out[row]` `[*shape]`."""
        array = self.checked(value, ())
        if self.start is not None:
            array = array - self.start
        if self.channels_last:
            array = np.moveaxis(array, -1, -3)
        out[row] = array if self.shape == array.shape else array.reshape(self.shape)


@dataclass(frozen=True, eq=False)
class ObsLayout:
    """Fields of an observation space; `plain` when it is neither Dict nor Tuple."""

    fields: tuple[Field, ...]
    plain: bool

    @property
    def space(self) -> Space[Any]:
        """The single space, as `Obs` lays it out, without the action mask."""
        parts = {field.key: field.space for field in self.fields if field.space is not None}
        return parts["obs"] if self.plain else spaces.Dict(parts)

    def has(self, key: str) -> bool:
        """Return whether the environment's observation has a part of this name."""
        return any(field.key == key for field in self.fields)

    def read(self, raw: Any, lead: tuple[int, ...]) -> Obs:
        """Return an observation of the environment, with leading axes `lead`, as `Obs`."""
        if self.plain:
            return {"obs": self.fields[0].read(raw, lead)}
        return {field.key: field.read(self.pick(raw, field), lead) for field in self.fields}

    def store(self, out: Obs, row: int, raw: Any) -> None:
        """Write one environment's observation into row `row` of `out`."""
        if self.plain:
            self.fields[0].store(out["obs"], row, raw)
            return
        for field in self.fields:
            field.store(out[field.key], row, self.pick(raw, field))

    def pick(self, raw: Any, field: Field) -> Any:
        """Return the part of an observation that a field describes."""
        part = raw
        try:
            for step in field.path:
                part = part[step]
        except (TypeError, LookupError):
            raise BadStepError(
                f"observation: expected parts {[f.key for f in self.fields]}, got {_parts_of(raw)}"
            ) from None
        return part


def _parts_of(raw: Any) -> Any:
    """Describe what an observation holds instead, for an error."""
    if isinstance(raw, dict):
        return sorted(map(str, raw))
    return f"a tuple of {len(raw)}" if isinstance(raw, tuple) else type(raw).__name__


def observation_layout(space: Space[Any], *, matrices: bool = False) -> ObsLayout:
    """Return the layout of a single observation space, or raise an `UnsupportedSpaceError`.

    With `matrices`, Boxes of rank 2 are not flattened.
    """
    plain = not isinstance(space, spaces.Dict | spaces.Tuple)
    parts = [("obs", (), space)] if plain else list(_leaves(space, (), ""))
    fields = tuple(replace(_field(key, inner, matrices), path=path) for key, path, inner in parts)
    keys = [field.key for field in fields]
    if len(set(keys)) < len(keys):
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise UnsupportedSpaceError(f"observation space: two parts are called {duplicate!r}")
    if reserved := set(RESERVED) & set(keys):
        raise UnsupportedSpaceError(reserved_key(min(reserved)))
    return ObsLayout(fields, plain)


def reserved_key(key: str) -> str:
    """Return the error for a part of an observation that has the name of something of Keel's."""
    return f"observation {key!r}: Keel has a key of that name for itself; rename it"


def _leaves(space: Space[Any], path: Path, name: str) -> Iterator[tuple[str, Path, Space[Any]]]:
    """Yield name, place and space of every part of nested Dicts and Tuples."""
    inner: Iterable[tuple[str | int, Space[Any]]]
    if isinstance(space, spaces.Dict):
        inner = space.items()
    elif isinstance(space, spaces.Tuple):
        inner = enumerate(space.spaces)
    else:
        yield name, path, space
        return
    for step, part in inner:
        yield from _leaves(part, (*path, step), f"{name}/{step}" if name else str(step))


def _field(key: str, space: Space[Any], matrices: bool) -> Field:
    if key == MASK:
        if not isinstance(space, spaces.Box | spaces.MultiBinary):
            raise UnsupportedSpaceError(
                f"observation {key!r}: is read as the mask of legal actions, a MultiBinary or Box "
                f"with a number for each; rename it, since it is {_describe_space(space)}"
            )
        shape, dtype = space.shape, np.dtype(space.dtype)
        return Field(key, shape, dtype, (math.prod(shape),), np.dtype(bool), None)
    if isinstance(space, spaces.Discrete):
        discrete = spaces.Discrete(int(space.n))
        return Field(key, (), space.dtype, (), np.dtype(np.int64), discrete, _start(space.start))
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
        return _box_field(key, space, matrices)
    raise UnsupportedSpaceError(
        f"observation space {key!r}: {_describe_space(space)} is not supported; Keel takes Box, "
        "Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of those: leave it out by a "
        "wrapper (gymnasium.wrappers.FilterObservation), and register the wrapped environment"
    )


def _describe_space(space: Space[Any]) -> str:
    """Return a space as it writes itself, or its class where that is long or has addresses."""
    text = str(space)
    return text if len(text) < 80 and " at 0x" not in text else type(space).__name__


def _box_field(key: str, space: spaces.Box, matrices: bool) -> Field:
    shape, dtype, last = _box_layout(space)
    if matrices and len(space.shape) == 2 and dtype == np.float32:
        shape = space.shape
    bounds = [np.moveaxis(x, -1, -3) if last else x for x in (space.low, space.high)]
    low, high = (bound.reshape(shape).astype(dtype) for bound in bounds)
    box = spaces.Box(low, high, shape, dtype.type)
    return Field(key, space.shape, space.dtype, shape, dtype, box, channels_last=last)


def _start(start: Any) -> np.ndarray | None:
    """Return the first value of a counted space, flat (0-d for Discrete); None for 0."""
    array = np.asarray(start, dtype=np.int64)
    return (array.reshape(-1) if array.ndim else array) if np.any(array) else None


def _box_layout(space: spaces.Box) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    """Return shape and dtype in `Obs`, and whether the last axis holds an image's channels."""
    shape, rank = space.shape, len(space.shape)
    dtype = np.dtype(np.uint8 if space.dtype == np.uint8 else np.float32)
    if dtype == np.uint8 and rank == 2:
        return (1, *shape), dtype, False
    if rank in (3, 4):
        last = has_channels_last(shape[-3:])
        channels, height, width = (shape[-1], *shape[-3:-1]) if last else shape[-3:]
        if is_image_shape((channels, height, width)) or (dtype == np.uint8 and rank == 3):
            return (math.prod(shape[:-3]) * channels, height, width), dtype, last
    return (shape if rank == 1 else (math.prod(shape),)), np.dtype(np.float32), False


def has_channels_last(shape: tuple[int, ...]) -> bool:
    """Return whether an image `shape` has its channels behind height and width.

    Two equal axes are height and width; else the channels are the smaller of the first and the
    last axis, and in doubt the first.
    """
    first, middle, last = shape
    if (first == middle) != (middle == last):
        return first == middle
    return last < first


def is_image(space: Space[Any]) -> bool:
    """Return whether a part of `Obs` is an image that a CNN can take."""
    return isinstance(space, spaces.Box) and is_image_shape(space.shape)


@dataclass(frozen=True, eq=False)
class ActionLayout:
    """Layout of the actions that `step` takes, and their conversion for the environment."""

    space: Space[Any]
    """The single space, as `step` expects it."""
    raw_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: np.ndarray | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None

    @property
    def choices(self) -> int:
        """Width A of an action mask; 0 where actions are not counted."""
        if isinstance(self.space, spaces.Discrete):
            return int(self.space.n)
        if isinstance(self.space, spaces.MultiDiscrete):
            return int(self.space.nvec.sum())
        return 0

    @cached_property
    def _parts(self) -> np.ndarray:
        """First column of each choice in a mask."""
        counts = self.space.nvec if isinstance(self.space, spaces.MultiDiscrete) else np.ones(1)
        return np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)

    @property
    def first_choices(self) -> np.ndarray:
        """Columns of a mask that stand for 0 in every choice."""
        return self._parts

    def legal(self, mask: np.ndarray) -> np.ndarray:
        """Return whether `mask` `[*lead, A]` leaves something of every choice, `[*lead]` bool."""
        if self._parts.size == 1:
            return np.asarray(mask.any(-1))
        return np.asarray(np.logical_or.reduceat(mask, self._parts, axis=-1).all(-1))

    def encode(self, action: np.ndarray) -> np.ndarray:
        """Convert actions `[N, *]` of the policy to `[N, *raw_shape]` of the environment."""
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
    """Return the layout of a single action space; `dtype` overrides that of the environment."""
    if isinstance(space, spaces.Discrete):
        discrete = spaces.Discrete(int(space.n))
        return ActionLayout(discrete, (), dtype or np.dtype(np.int64), _start(space.start))
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
    """Allow all actions in finished rows `[N]` without a legal one, so that sampling works."""
    if np.count_nonzero(done):
        mask[done & ~actions.legal(mask)] = True
    return mask
