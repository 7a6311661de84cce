"""Time that a step of an environment takes: known, or measured once and stored.

`auto` sends slow environments to worker processes. A time that is measured anew by every command
could choose otherwise in every command, so the first one stays: a file for each environment, its
options and this machine, below `$KEEL_CACHE_DIR` (`~/.cache/keel` unless that is set).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from keel.envs.faults import EnvHungError
from keel.envs.lanes import Env
from keel.envs.watchdog import Spot, Watch, close_and_warn
from keel.registry import is_object

SLOW_STEP = 1e-3
"""Seconds: if even the shortest step takes longer, the way to another process (0.1 ms) pays."""
FAST = (
    "gymnasium.envs.classic_control",
    "gymnasium.envs.toy_text",
    "gymnasium.envs.mujoco",
    "gymnasium.envs.box2d.bipedal_walker",
    "gymnasium.envs.box2d.lunar_lander",
)
"""Modules of environments whose steps are short on any machine; nothing is measured there."""
SLOW = ("gymnasium.envs.box2d.car_racing",)
"""Modules of environments that draw an image in every step."""


class StepTime(NamedTuple):
    """Verdict on steps, slow or not, and how it is known."""

    is_slow: bool
    reason: str
    """in words"""


def step_time(
    env_id: str,
    entry_point: Any,
    kwargs: Mapping[str, Any],
    make: Callable[[], Env],
    timeout: float = 60.0,
) -> StepTime:
    """Return whether steps are slow: known, stored from before, or measured now and stored.

    Args:
        env_id: name of the environment.
        entry_point: what its specification names as its constructor.
        kwargs: options of the constructor.
        make: makes one, to measure it.
        timeout: seconds after which it counts as hung.
    """
    if str(entry_point).startswith(FAST):
        return StepTime(False, "its steps are fast on any machine")
    if str(entry_point).startswith(SLOW):
        return StepTime(True, "it draws an image in every step")
    if is_object(env_id):  # its name will never come again
        seconds = measure(make, timeout)
        return StepTime((seconds or 0.0) > SLOW_STEP, "measured now")
    path = _path(env_id, entry_point, kwargs)
    seconds, source = _read(path), f"measured once, and kept in {path}"
    if seconds is None:
        measured = measure(make, timeout)
        if measured is None:  # the real environments will say what is wrong, and where
            return StepTime(False, "its steps could not be timed")
        seconds = _store(path, {"env": env_id, "seconds": measured})
        if seconds is None:
            seconds, source = measured, f"measured now, since {path} cannot be written"
    return StepTime(seconds > SLOW_STEP, f"a step takes {1e3 * seconds:.1f} ms ({source})")


def measure(make: Callable[[], Env], timeout: float = 60.0) -> float | None:
    """Return the shortest of a few random steps, timed for at most a fraction of a second.

    None if the environment raises; one that hangs for `timeout` seconds is an `EnvHungError`.
    """
    env = make()
    idle_place = Spot()
    try:
        with Watch(idle_place.place, timeout)("its first steps"):
            return _shortest_step(env)
    except EnvHungError:
        raise
    except Exception:
        return None
    finally:
        close_and_warn([env], timeout)


def _shortest_step(env: Env) -> float:
    shortest = float("inf")
    env.reset(seed=0)
    env.action_space.seed(0)
    stop = time.perf_counter() + 0.2
    while shortest > SLOW_STEP and (begin := time.perf_counter()) < stop:
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        shortest = min(shortest, time.perf_counter() - begin)
        if terminated or truncated:
            break
    return shortest


def _path(env_id: str, entry_point: Any, kwargs: Mapping[str, Any]) -> Path:
    """Return the file for one environment with its options on this machine."""
    cache = os.environ.get("KEEL_CACHE_DIR") or Path("~/.cache/keel").expanduser()
    name = entry_point if isinstance(entry_point, str) else getattr(entry_point, "__name__", "")
    options = json.dumps(dict(kwargs), sort_keys=True, default=lambda x: type(x).__name__)
    identity = "\n".join([env_id, str(name), options, platform.node()])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return Path(cache) / "step-times" / f"{digest}.json"


def _read(path: Path) -> float | None:
    """Return the seconds that are kept, or None where there is nothing that can be used."""
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["seconds"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _store(path: Path, data: Mapping[str, Any]) -> float | None:
    """Write a measurement and return its seconds, or those of a process that was first.

    None if nothing can be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and _read(path) is None:  # damaged
            path.unlink()
        handle, draft = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(dict(data)))
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            Path(draft).unlink()
    except OSError:
        return None
    return _read(path)
