"""`make_envs`: a name in, environments on the fastest backend that fits out.

Backends are entries of a registry (`keel.config.common.BACKENDS`), imported when they are used.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keel.config.common import BACKENDS, Backend
from keel.envs.faults import EnvError, EnvWarning, constructor_of
from keel.envs.guard import Guarded
from keel.envs.names import (
    POOL,
    also_offered,
    atari_game,
    find_spec,
    named_maker,
    native,
    spec_for,
    unknown,
)
from keel.envs.protocol import Autoreset, Envs, Request
from keel.errors import InputError, check_choice
from keel.resources import expect_memory

if TYPE_CHECKING:
    import gymnasium

    from keel.envs.atari import AtariOptions

__all__ = ["Backend", "make_envs", "make_on", "time_limit"]

SMALLEST_ENV = 1024
"""Bytes that any environment takes at the very least."""


def make_envs(
    env_id: str,
    num_envs: int,
    *,
    backend: Backend = "auto",
    seed: int,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]] = (),
    autoreset: Autoreset = "next_step",
    guard: bool = True,
    threads: int | None = None,
    timeout: float = 60.0,
    restart_workers: int = 0,
    atari: AtariOptions | None = None,
) -> Envs:
    """`num_envs` environments called `env_id`; call `reset(seed)` before the first step.

    `backend="auto"` takes, in this order: the ALE's vector for Atari (EnvPool if only that is
    installed), Gymnasium's vector entry point, EnvPool for MuJoCo and for names that only EnvPool
    knows, worker processes where one step takes longer than a millisecond (`keel.envs.step_time`),
    and one process otherwise. `envs.backend` says which it became; an `EnvWarning` tells a detour,
    and from which of several packages an id was taken.

    Args:
        env_id: a Gymnasium id, `module:Name-v0`, an Atari alias (`Breakout`), an EnvPool task
            (`envpool:Name-v0` where others have that name), or
            `module:attribute`, a class or a function that makes a Gymnasium or a PettingZoo
            environment.
        seed: for backends that are seeded when they are made; otherwise `reset` decides.
        env_kwargs: for the environment, `max_episode_steps` included.
        wrappers: Gymnasium wrappers for each environment; sync and async only.
        autoreset: `same_step` is offered by sync and async.
        guard: refuse broken observations, rewards, masks and actions (`keel.envs.Guarded`).
        threads: threads of EnvPool and ALE, processes of async; default one per core, and one
            thread for EnvPool's classics.
        timeout: seconds that a worker, or an environment in this process, may take for one step.
        restart_workers: how many dead or hung workers may be replaced before it is an error.
        atari: how Atari games are shown; with `wrappers` of your own they are as Gymnasium makes
            them.

    Examples:
        >>> envs = make_envs("CartPole-v1", 2, seed=0)
        >>> envs.backend, envs.reset(0)["obs"].shape
        ('gymnasium vector', (2, 4))
    """
    check_choice("backend", backend, BACKENDS.names())
    request = Request(
        env_id, num_envs, seed, dict(env_kwargs or {}), tuple(wrappers), autoreset, threads,
        timeout, restart_workers, atari, guard,
    )  # fmt: skip
    _check(request)
    envs = _make(backend, request)
    return Guarded(envs) if guard else envs


def time_limit(
    env_id: str, env_kwargs: Mapping[str, Any] | None = None, atari: AtariOptions | None = None
) -> int | None:
    """Return the steps after which the environment itself ends an episode; None if it never says.

    Args:
        env_id: as for `make_envs`.
        env_kwargs: what the environment is made with; `max_episode_steps` counts.
        atari: how Atari games are shown.
    """
    max_steps = dict(env_kwargs or {}).get("max_episode_steps")
    if max_steps is not None:
        return int(max_steps)
    if atari_game(env_id) is not None:
        from keel.envs.atari import AtariOptions

        settings = atari or AtariOptions()
        return settings.max_frames // settings.frame_skip
    if native(env_id) is not None or named_maker(env_id, env_kwargs or {}) is not None:
        return None
    spec = find_spec(env_id)
    if spec is not None:
        return spec.max_episode_steps
    if _on_envpool(env_id):
        from keel.envs.pool import import_envpool

        return int(import_envpool("").make_spec(env_id).config.max_episode_steps)
    return None


def _check(request: Request) -> None:
    """Raise an `InputError` for what no environment can be asked for."""
    check_choice("autoreset", request.autoreset, ("next_step", "same_step"))
    num = request.num_envs
    if num < 1:
        raise InputError(f"num_envs: expected at least 1, got {num}")
    expect_memory(f"num_envs: {num} environments", num * SMALLEST_ENV, "use fewer environments")
    if request.threads is not None and request.threads < 1:
        raise InputError(f"threads: expected at least 1, got {request.threads}")


def _make(backend: str, request: Request) -> Envs:
    """Make environments from a name of any kind."""
    env_id = request.env_id
    if env_id.startswith(POOL):
        check_choice(f"backend of {env_id}", backend, ("auto", "envpool"))
        env_id, backend = env_id.removeprefix(POOL), "envpool"
        request = replace(request, env_id=env_id)
    native_maker, maker = native(env_id), named_maker(env_id, request.kwargs)
    if native_maker is not None:
        return _native(native_maker, backend, request)
    if maker is not None:
        from keel.envs.makers import make_named

        envs = make_named(maker, backend, request)
        if envs is not None:
            return envs
        request = replace(request, maker=maker)
    return _auto(request) if backend == "auto" else make_on(backend, request)


def make_on(backend: str, request: Request) -> Envs:
    """Make environments of Gymnasium, EnvPool or the ALE on a backend.

    Args:
        backend: a name of the registry.
        request: the environments.
    """
    if backend not in ("sync", "async"):
        if request.wrappers:
            raise InputError(f"wrappers: need backend sync or async, not {backend}")
        if request.autoreset == "same_step":
            raise InputError(f"autoreset: same_step needs backend sync or async, not {backend}")
    make = BACKENDS.get(backend)
    with constructor_of(request.env_id):
        envs: Envs = make(request)
        return envs


def _native(make: Callable[..., Envs], backend: str, request: Request) -> Envs:
    """Make all copies in one object."""
    check_choice("backend", backend, ("auto", "vector"))
    if request.wrappers:
        raise InputError(f"wrappers: are Gymnasium's; {request.env_id} is not made of its parts")
    with constructor_of(request.env_id):
        return make(request.num_envs, **request.kwargs)


def _auto(request: Request) -> Envs:
    own_process = bool(request.wrappers) or request.autoreset == "same_step"
    if atari_game(request.env_id) is not None and not own_process:
        return make_on(
            "ale" if _installed("ale_py") or not _installed("envpool") else "envpool", request
        )
    spec = spec_for(request)
    if spec is None:
        if _on_envpool(request.env_id):
            _warn(request, also_offered(request.env_id, None))
            return make_on("envpool", request)
        raise unknown(request.env_id)
    if spec.vector_entry_point is not None and not own_process:
        try:
            return make_on("vector", request)
        except Exception as error:
            _warn(request, f"its vector entry point failed ({error}); stepping one by one")
    elif str(spec.entry_point).startswith("gymnasium.envs.mujoco") and not own_process:
        envs = _mujoco(request)
        if envs is not None:
            _warn(request, also_offered(request.env_id, spec))
            return envs
    return make_on("async" if _is_slow(request) else "sync", request)


def _mujoco(request: Request) -> Envs | None:
    if not _installed("envpool"):
        _warn(request, 'three times as fast with pip install "keel-rl[envpool]"')
        return None
    if not _on_envpool(request.env_id):
        return None
    try:
        return make_on("envpool", request)
    except (InputError, EnvError) as error:
        _warn(request, f"EnvPool cannot take it as asked ({error}); using Gymnasium")
        return None


def _is_slow(request: Request) -> bool:
    """Return whether steps are slow enough for worker processes; a warning says so."""
    if min(request.num_envs, request.thread_count) < 2:
        return False
    from keel.envs.factory import factory_for
    from keel.envs.step_time import step_time

    with constructor_of(request.env_id):
        factory = factory_for(request)
        step = step_time(
            request.env_id, factory.spec.entry_point, request.kwargs, factory, request.timeout
        )
    if step.is_slow:
        _warn(request, f"{step.reason}: worker processes step it; envs.backend decides otherwise")
    return step.is_slow


def _on_envpool(env_id: str) -> bool:
    """Return whether EnvPool is installed and has this environment."""
    if not _installed("envpool"):
        return False
    from keel.envs.pool import import_envpool

    return env_id in import_envpool("").list_all_envs()


def _warn(request: Request, message: str) -> None:
    warnings.warn(f"{request.env_id}: {message}", EnvWarning, stacklevel=6)


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
