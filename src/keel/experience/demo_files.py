"""Demonstrations: whole episodes of recorded expert behavior, on disk as safetensors and JSON.

    DEMOS/demos.json          environment, lengths and returns of the episodes, who played
    DEMOS/demos.safetensors   obs/KEY, action, reward, terminated, truncated; one row a step

Observations and actions lie as `keel.envs` gives and takes them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from keel.errors import InputError
from keel.types import MASK

RECORD, TENSORS = "demos.json", "demos.safetensors"
VERSION = 1
OBS = "obs/"
PARTS = ("action", "reward", "terminated", "truncated")
"""Tensors beside the observations."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Demos:
    """Demonstrated steps: `n` of `E` episodes, one after the other."""

    env: str
    obs: Mapping[str, Array]
    """`[n, …]` each: before the step"""
    action: Array
    """`[n]` or `[n, D]`: as the environment takes it, Discrete from 0, Box flat"""
    reward: Array
    """`[n]` float32, raw"""
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    """`[n]`: both only on the last step of an episode"""
    lengths: tuple[int, ...]
    """`[E]`: steps of each episode"""
    source: str = ""
    """name of the player"""

    @property
    def steps(self) -> int:
        """Number of steps n."""
        return len(self.reward)

    @property
    def returns(self) -> list[float]:
        """Undiscounted returns of the episodes."""
        ends = np.cumsum(self.lengths)
        return [float(part.sum()) for part in np.split(self.reward.astype(np.float64), ends[:-1])]

    @property
    def arrays(self) -> dict[str, Array]:
        """All arrays by the names of the file, observations as `obs/KEY`."""
        obs = {f"{OBS}{key}": x for key, x in self.obs.items()}
        return obs | {name: getattr(self, name) for name in PARTS}

    @classmethod
    def of(
        cls, arrays: Mapping[str, Array], lengths: Iterable[int], *, env: str, source: str
    ) -> Demos:
        """Return demonstrations of arrays that are named as `arrays` names them."""
        obs = {k.removeprefix(OBS): x for k, x in arrays.items() if k.startswith(OBS)}
        parts = {name: arrays[name] for name in PARTS}
        return cls(env=env, obs=obs, lengths=tuple(lengths), source=source, **parts)

    @property
    def fingerprint(self) -> str:
        """Hash of all observations, actions and rewards."""
        digest = hashlib.sha256()
        for name, x in sorted(self.arrays.items()):
            digest.update(f"{name} {x.dtype} {x.shape}".encode())
            digest.update(np.ascontiguousarray(x).tobytes())
        return digest.hexdigest()[:16]


def only(demos: Demos, selected: Sequence[bool]) -> Demos | None:
    """Return some of the episodes; None if none is wanted."""
    if not any(selected):
        return None
    rows = np.repeat(np.asarray(selected, bool), demos.lengths)
    arrays = {name: x[rows] for name, x in demos.arrays.items()}
    lengths = (n for n, keep in zip(demos.lengths, selected, strict=True) if keep)
    return Demos.of(arrays, lengths, env=demos.env, source=demos.source)


def joined(parts: Sequence[Demos]) -> Demos:
    """Concatenate demonstrations."""
    tables = [part.arrays for part in parts]
    arrays = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    lengths = (n for part in parts for n in part.lengths)
    return Demos.of(arrays, lengths, env=parts[0].env, source=parts[0].source)


def save_demos(demos: Demos, path: Path) -> None:
    """Write demonstrations into a new folder: completely, or not at all.

    Args:
        demos: Demonstrations.
        path: Folder, which must not exist.
    """
    if path.exists():
        raise InputError(f"{path}: exists already; choose another --out")
    check_whole(demos, str(path))
    arrays = {name: np.ascontiguousarray(x) for name, x in demos.arrays.items()}
    record = {
        "version": VERSION,
        "env": demos.env,
        "lengths": list(demos.lengths),
        "returns": demos.returns,
        "source": demos.source,
    }
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.mkdir(parents=True)
        (draft / TENSORS).write_bytes(save(arrays))
        text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
        (draft / RECORD).write_text(text + "\n", encoding="utf-8")
        draft.rename(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def load_demos(path: Path) -> Demos:
    """Read a folder of demonstrations; what does not fit together is named.

    Args:
        path: Folder that `save_demos` wrote.
    """
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        arrays = load_file(path / TENSORS)
    except FileNotFoundError:
        raise InputError(f"{path}: no demonstrations here ({RECORD}, {TENSORS})") from None
    except Exception as error:  # safetensors has errors of its own
        raise InputError(f"{path}: cannot be read: {error}") from error
    try:
        if record["version"] != VERSION:
            raise InputError(
                f"{path}: version {record['version']}, this Keel reads version {VERSION}"
            )
        env, source = str(record["env"]), str(record.get("source", ""))
        demos = Demos.of(arrays, map(int, record["lengths"]), env=env, source=source)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{path}: not as `keel demos record` writes it: {error!r}") from error
    check_whole(demos, str(path))
    return demos


def check_whole(demos: Demos, where: str) -> None:
    """Raise unless there is something, all of one length, finite, in whole episodes.

    Args:
        demos: Demonstrations.
        where: Name of the demonstrations in an error.
    """
    if not demos.obs:
        raise InputError(f"{where}: no observations in it")
    arrays = demos.arrays
    for name, x in arrays.items():
        if x.ndim < 1 or (x.ndim > 1 and name in PARTS[1:]):
            raise InputError(f"{where}: {name} has shape {list(x.shape)}, expected one row a step")
        if name in PARTS[2:] and x.dtype != np.bool_:
            raise InputError(f"{where}: {name} is {x.dtype}, expected true or false")
    if not demos.steps or not demos.lengths:
        raise InputError(f"{where}: empty, no step in it")
    for name, x in arrays.items():
        if len(x) != demos.steps:
            raise InputError(f"{where}: {name} has {len(x)} rows, reward {demos.steps}")
        if x.dtype.kind != "f":
            continue
        bad = np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(1))
        if bad.size:
            raise InputError(f"{where}: {name} is not finite at step {int(bad[0])}")
    if min(demos.lengths) < 1 or sum(demos.lengths) != demos.steps:
        raise InputError(
            f"{where}: episodes of {sum(demos.lengths)} steps together, but {demos.steps} rows"
        )
    last = np.zeros(demos.steps, bool)
    last[np.cumsum(demos.lengths) - 1] = True
    if not np.array_equal(last, demos.terminated | demos.truncated):
        raise InputError(f"{where}: an episode must end, or be cut off, with its last step")


def check_fits(
    demos: Demos, observation: spaces.Space[Any], action: spaces.Space[Any], where: str
) -> None:
    """Raise unless a policy of these spaces could have made these observations and actions.

    Args:
        demos: Demonstrations.
        observation: Observation space of the policy.
        action: Action space of the policy.
        where: Name of the demonstrations in an error.
    """
    parts = observation.spaces if isinstance(observation, spaces.Dict) else {"obs": observation}
    for key, space in parts.items():
        if key not in demos.obs:
            raise InputError(f"{where}: no observation {key!r}, which the environment gives")
        if demos.obs[key].shape[1:] != space.shape:
            raise InputError(
                f"{where}: observation {key!r} has shape {list(demos.obs[key].shape[1:])}, the "
                f"environment's {list(space.shape or ())}"
            )
    if demos.action.shape[1:] != action.shape:
        raise InputError(
            f"{where}: actions have shape {list(demos.action.shape[1:])}, the environment's "
            f"{list(action.shape or ())}"
        )
    counted = not isinstance(action, spaces.Box)
    if counted and demos.action.dtype.kind not in "iu":
        raise InputError(f"{where}: actions are {demos.action.dtype}, {action} takes whole numbers")
    low, high = _bounds(action)
    outside = ((demos.action < low) | (demos.action > high)).reshape(demos.steps, -1).any(1)
    if outside.any():
        step = int(np.flatnonzero(outside)[0])
        raise InputError(
            f"{where}: {int(outside.sum())} of {demos.steps} actions are outside of {action}; "
            f"the first is {demos.action[step]} at step {step}"
        )
    if MASK in demos.obs:
        _check_legal(demos, action, where)


def _check_legal(demos: Demos, action: spaces.Space[Any], where: str) -> None:
    """Raise if a mask ruled out what was done: no policy that sees the mask can imitate it."""
    mask, chosen = demos.obs[MASK].astype(bool), demos.action
    if isinstance(action, spaces.MultiDiscrete):
        width = int(action.nvec.sum())
        chosen = chosen + np.append(0, np.cumsum(action.nvec)[:-1])
    else:
        width = int(getattr(action, "n", 0))
    if mask.shape != (demos.steps, width):
        raise InputError(
            f"{where}: action_mask has shape {list(mask.shape)}, {action} needs "
            f"{[demos.steps, width]}"
        )
    if isinstance(action, spaces.MultiBinary):
        legal = ~(chosen.astype(bool) & ~mask).any(1)
    else:
        legal = np.take_along_axis(mask, chosen.reshape(demos.steps, -1), 1).all(1)
    illegal = np.flatnonzero(~legal)
    if illegal.size:
        raise InputError(
            f"{where}: {illegal.size} of {demos.steps} actions are ruled out by their action_mask; "
            f"the first is {demos.action[illegal[0]]} at step {int(illegal[0])}"
        )


def _bounds(action: spaces.Space[Any]) -> tuple[Array, Array]:
    if isinstance(action, spaces.Box):
        return action.low - np.float32(1e-5), action.high + np.float32(1e-5)
    if isinstance(action, spaces.Discrete):
        return np.asarray(0), np.asarray(int(action.n) - 1)
    if isinstance(action, spaces.MultiDiscrete):
        return np.zeros_like(action.nvec), action.nvec - 1
    assert isinstance(action, spaces.MultiBinary)
    return np.asarray(0), np.asarray(1)
