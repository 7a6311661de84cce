"""Spaces as plain data, so that a policy can be opened without its environment."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from keel.envs.faults import UnsupportedSpaceError
from keel.envs.protocol import Envs
from keel.errors import InputError
from keel.types import ENCODING, FIRST_ENCODING

MOST_BOUNDS = 4096
"""Bounds that are kept one by one; of a larger space the outermost are kept for all."""


@dataclass(frozen=True)
class Interface:
    """Everything of an environment that the network of a policy depends on."""

    observation_space: Space[Any]
    action_space: Space[Any]
    agents: tuple[str, ...]
    """names; empty where there is one agent, without a name"""
    masked: bool
    """whether the environment says which actions are legal"""
    encoding: int = ENCODING
    """how observations become numbers (`keel.types.ENCODING`)"""
    declared: tuple[tuple[Space[Any], Space[Any]], ...] = ()
    """spaces of observations and actions as the environment itself declares them, of each agent;
    empty where the environment speaks Keel's layout by itself, and in older checkpoints"""

    @classmethod
    def of(cls, envs: Envs, *, masked: bool, encoding: int = ENCODING) -> Interface:
        """Return the interface of environments that are there."""
        agents, declared = tuple(envs.agents), getattr(envs, "declared_spaces", ())
        return cls(envs.observation_space, envs.action_space, agents, masked, encoding, declared)

    def to_data(self) -> dict[str, Any]:
        """Return it as numbers and texts, for a checkpoint."""
        return {
            "observation": space_to_data(self.observation_space),
            "action": space_to_data(self.action_space),
            "agents": list(self.agents),
            "masked": self.masked,
            "encoding": self.encoding,
            "declared": [[space_to_data(space) for space in pair] for pair in self.declared],
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Interface:
        """Return what `to_data` wrote; an `InputError` for anything else."""
        try:
            encoding = data.get("encoding", ENCODING)
            return cls(
                space_from_data(data["observation"]),
                space_from_data(data["action"]),
                tuple(map(str, data["agents"])),
                bool(data["masked"]),
                check_encoding(encoding),
                tuple(
                    (space_from_data(observation), space_from_data(action))
                    for observation, action in data.get("declared", ())
                ),
            )
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"spaces: expected what a checkpoint holds, got {data!r}") from error


def check_encoding(encoding: Any) -> int:
    """Return a number of an encoding that this version knows, or raise an `InputError`."""
    if encoding in (FIRST_ENCODING, ENCODING):
        return int(encoding)
    raise InputError(
        f"encoding of observations: expected {FIRST_ENCODING} or {ENCODING}, got {encoding!r}; "
        "upgrade Keel if a newer one wrote it"
    )


def describe_space(space: Space[Any]) -> str:
    """Return shapes and types; bounds may be long, and change nothing in what a network takes."""
    if isinstance(space, spaces.Dict):
        return ", ".join(f"{key}: {describe_space(part)}" for key, part in space.items())
    if isinstance(space, spaces.Box):
        return f"Box{list(space.shape)} {space.dtype}"
    return str(space)


def describe_spaces(envs: Envs | Interface) -> dict[str, str]:
    """Return the spaces of environments in words, as checkpoints hold them."""
    return {
        "observation": describe_space(envs.observation_space),
        "action": describe_space(envs.action_space),
    }


def space_to_data(space: Space[Any]) -> dict[str, Any]:
    """Return a space as numbers and texts.

    Args:
        space: a Box, Discrete, MultiDiscrete or MultiBinary, or a Dict or Tuple of those.
    """
    if isinstance(space, spaces.Dict):
        return {
            "kind": "Dict",
            "parts": {key: space_to_data(part) for key, part in space.items()},
        }
    if isinstance(space, spaces.Tuple):
        return {"kind": "Tuple", "parts": [space_to_data(part) for part in space.spaces]}
    if isinstance(space, spaces.Box):
        return {
            "kind": "Box",
            "shape": list(space.shape),
            "dtype": str(space.dtype),
            "low": _bounds(space.low, np.min),
            "high": _bounds(space.high, np.max),
        }
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n)} | _start(space)
    if isinstance(space, spaces.MultiDiscrete):
        dtype = {} if space.dtype == np.int64 else {"dtype": str(space.dtype)}
        return {"kind": "MultiDiscrete", "nvec": space.nvec.tolist()} | _start(space) | dtype
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "shape": list(space.shape)}
    raise UnsupportedSpaceError(f"{space} cannot be written as data")


def space_from_data(data: Mapping[str, Any]) -> Space[Any]:
    """Return the space that `space_to_data` wrote; an `InputError` for anything else."""
    try:
        return _from_data(data)
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise InputError(f"spaces: expected what a checkpoint holds, got {data!r}") from error


def _from_data(data: Mapping[str, Any]) -> Space[Any]:
    kind = data["kind"]
    if kind == "Dict":
        parts = ((str(key), _from_data(part)) for key, part in data["parts"].items())
        return spaces.Dict(OrderedDict(parts))  # a plain dict would be sorted
    if kind == "Tuple":
        return spaces.Tuple([_from_data(part) for part in data["parts"]])
    if kind == "Box":
        shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
        low, high = (_array(data[name], shape, dtype) for name in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(data["n"], start=data.get("start", 0))
    if kind == "MultiDiscrete":
        dtype = np.dtype(data.get("dtype", np.int64)).type
        return spaces.MultiDiscrete(data["nvec"], dtype, start=data.get("start"))
    if kind == "MultiBinary":
        return spaces.MultiBinary(data["shape"])
    raise ValueError(kind)


def _start(space: spaces.Discrete | spaces.MultiDiscrete) -> dict[str, Any]:
    """Return where a space counts from, unless that is 0."""
    return {"start": np.asarray(space.start).tolist()} if np.any(space.start) else {}


def _bounds(bound: np.ndarray, outermost: Any) -> float | int | list[Any]:
    """Return bounds as a list, or as one number where all are equal or too many."""
    if bound.size and ((bound == bound.flat[0]).all() or bound.size > MOST_BOUNDS):
        number: float | int = outermost(bound).item()
        return number
    flat: list[Any] = bound.reshape(-1).tolist()
    return flat


def _array(bound: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    if isinstance(bound, list):
        return np.array(bound, dtype).reshape(shape)
    return np.full(shape, bound, dtype)
