"""`make_envs`: a name in, environments on the fastest backend that fits out."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import gymnasium
from gymnasium.envs.registration import EnvSpec

from keel.envs.atari import AtariEnvs, AtariOptions
from keel.envs.atari_wrappers import PreprocessAtari
from keel.envs.faults import EnvError, EnvWarning, constructor_of
from keel.envs.guard import Guarded
from keel.envs.lanes import Env
from keel.envs.makers import Maker, check_made, kind_of, spec_of
from keel.envs.mujoco import hear_mujoco
from keel.envs.multi import ParallelEnvs
from keel.envs.names import atari_game, find_spec, named_maker, native, unknown
from keel.envs.pool import PoolEnvs, import_envpool
from keel.envs.protocol import Autoreset, Envs
from keel.envs.registered import POOL, also_offered
from keel.envs.spawning import at_hand
from keel.envs.step_time import step_time
from keel.envs.sync import SyncEnvs
from keel.envs.vector import VectorEnvs
from keel.envs.workers import AsyncEnvs
from keel.errors import InputError, check_choice
from keel.resources import cores, expect_memory

Backend = Literal["auto", "vector", "sync", "async", "envpool", "ale"]
BACKENDS = ("auto", "vector", "sync", "async", "envpool", "ale")
ATARI_KWARGS = "env_kwargs: the ALE takes its options as atari=AtariOptions(…)"
SMALLEST_ENV = 1024
"""Bytes that any environment takes at the very least."""
LIGHT = ("gymnasium.envs.classic_control", "gymnasium.envs.toy_text")
"""Steps of a microsecond: handing them to a second thread of EnvPool costs more than it saves."""


@dataclass(frozen=True)
class EnvFactory:
    """Makes one environment; can be sent to another process."""

    spec: EnvSpec
    kwargs: Mapping[str, Any]
    wrappers: tuple[Callable[[Env], Env], ...] = ()

    def __call__(self) -> Env:
        if str(self.spec.entry_point).startswith("gymnasium.envs.mujoco"):
            hear_mujoco()
        # the guard and the lanes check what Gymnasium's passive checker would, in every step
        env: Env = gymnasium.make(self.spec, disable_env_checker=True, **self.kwargs)
        for wrapper in self.wrappers:
            env = wrapper(env)
        return env


@dataclass(frozen=True)
class _Request:
    """The arguments of `make_envs`, as the backends need them."""

    env_id: str
    num_envs: int
    seed: int
    kwargs: Mapping[str, Any]
    wrappers: tuple[Callable[[Env], Env], ...]
    autoreset: Autoreset
    threads: int
    threads_given: bool
    timeout: float
    restart_workers: int
    atari: AtariOptions
    guard: bool
    maker: Maker | None = None
    """of Gymnasium environments, where the name is `module:attribute`"""


def make_envs(
    env_id: str,
    num_envs: int,
    *,
    backend: Backend = "auto",
    seed: int,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Env], Env]] = (),
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
    check_choice("backend", backend, BACKENDS)
    check_choice("autoreset", autoreset, ("next_step", "same_step"))
    if num_envs < 1:
        raise InputError(f"num_envs: expected at least 1, got {num_envs}")
    expect_memory(
        f"num_envs: {num_envs} environments", num_envs * SMALLEST_ENV, "use fewer environments"
    )
    if env_id.startswith(POOL):
        check_choice(f"backend of {env_id}", backend, ("auto", "envpool"))
        env_id, backend = env_id.removeprefix(POOL), "envpool"
    if threads is not None and threads < 1:
        raise InputError(f"threads: expected at least 1, got {threads}")
    request = _Request(
        env_id=env_id,
        num_envs=num_envs,
        seed=seed,
        kwargs=dict(env_kwargs or {}),
        wrappers=tuple(wrappers),
        autoreset=autoreset,
        threads=min(num_envs, threads or cores()),
        threads_given=threads is not None,
        timeout=timeout,
        restart_workers=restart_workers,
        atari=atari or AtariOptions(),
        guard=guard,
    )
    envs: Envs
    native_maker, maker = native(env_id), named_maker(env_id, request.kwargs)
    if native_maker is not None:
        envs = _native(native_maker, backend, request)
    elif maker is not None and (kind := _kind(maker, request)) != "gymnasium":
        make = _parallel if kind == "parallel" else _made_vector
        envs = make(maker, backend, request)
    else:
        request = replace(request, maker=maker)
        envs = _auto(request) if backend == "auto" else _make(backend, request)
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
        settings = atari or AtariOptions()
        return settings.max_frames // settings.frame_skip
    if native(env_id) is not None or named_maker(env_id, env_kwargs or {}) is not None:
        return None
    spec = find_spec(env_id)
    if spec is not None:
        return spec.max_episode_steps
    if _installed("envpool") and env_id in (envpool := import_envpool("")).list_all_envs():
        return int(envpool.make_spec(env_id).config.max_episode_steps)
    return None


def _native(make: Callable[..., Envs], backend: str, request: _Request) -> Envs:
    """Make all copies in one object."""
    check_choice("backend", backend, ("auto", "vector"))
    if request.wrappers:
        raise InputError(f"wrappers: are Gymnasium's; {request.env_id} is not made of its parts")
    with constructor_of(request.env_id):
        return make(request.num_envs, **request.kwargs)


def _parallel(maker: Maker, backend: str, request: _Request) -> Envs:
    """Make all copies in one object where the module has a vector form, else one by one."""
    check_choice("backend", backend, ("auto", "vector", "sync"))
    if request.wrappers or request.autoreset == "same_step":
        raise InputError(
            "wrappers, autoreset: are Gymnasium's; this environment has several agents"
        )
    with constructor_of(request.env_id):
        if maker.make_many is not None and backend != "sync":
            envs: Envs = maker.make_many(request.num_envs, **request.kwargs)
            return envs
        if backend == "vector":
            raise InputError(f"backend: {request.env_id} has no vector form; use sync")
        make = partial(_make_one, maker, request.kwargs)
        return ParallelEnvs(make, request.num_envs, request.timeout)


def _made_vector(maker: Maker, backend: str, request: _Request) -> Envs:
    """Take a vector environment of Gymnasium with as many environments as it has."""
    check_choice("backend", backend, ("auto", "vector"))
    if request.wrappers or request.autoreset == "same_step":
        raise InputError(f"wrappers, autoreset: {request.env_id} is a vector environment already")
    with constructor_of(request.env_id):
        return VectorEnvs(maker.make(**request.kwargs), timeout=request.timeout)


def _kind(maker: Maker, request: _Request) -> str:
    with constructor_of(request.env_id):
        return kind_of(maker, request.kwargs)


def _make_one(maker: Maker, kwargs: Mapping[str, Any]) -> Any:
    env = maker.make(**kwargs)
    check_made(maker.name, env)
    return env


def _make(backend: str, request: _Request) -> Envs:
    plain = backend not in ("sync", "async")
    if plain and request.wrappers:
        raise InputError(f"wrappers: need backend sync or async, not {backend}")
    if plain and request.autoreset == "same_step":
        raise InputError(f"autoreset: same_step needs backend sync or async, not {backend}")
    with constructor_of(request.env_id):
        if backend == "ale":
            return _ale(request)
        if backend == "envpool":
            return _envpool(request)
        if backend == "vector":
            return _vector(request)
        factory = _factory(request)
        if backend == "sync":
            return SyncEnvs(factory, request.num_envs, request.autoreset, request.timeout)
        return AsyncEnvs(
            factory,
            request.num_envs,
            autoreset=request.autoreset,
            workers=request.threads,
            timeout=request.timeout,
            restarts=request.restart_workers,
        )


def _ale(request: _Request) -> Envs:
    game = atari_game(request.env_id)
    if game is None:
        raise InputError(f"backend: ale plays Atari games, not {request.env_id}")
    if request.kwargs:
        raise InputError(ATARI_KWARGS)
    return AtariEnvs(game, request.num_envs, threads=request.threads, options=request.atari)


def _auto(request: _Request) -> Envs:
    own_process = bool(request.wrappers) or request.autoreset == "same_step"
    if atari_game(request.env_id) is not None and not own_process:
        return _make(
            "ale" if _installed("ale_py") or not _installed("envpool") else "envpool", request
        )
    spec = _spec(request)
    if spec is None:
        if _installed("envpool") and request.env_id in import_envpool("").list_all_envs():
            _warn(request, also_offered(request.env_id, None))
            return _make("envpool", request)
        raise unknown(request.env_id)
    if spec.vector_entry_point is not None and not own_process:
        try:
            return _make("vector", request)
        except Exception as error:
            _warn(request, f"its vector entry point failed ({error}); stepping one by one")
    elif str(spec.entry_point).startswith("gymnasium.envs.mujoco") and not own_process:
        envs = _mujoco(request)
        if envs is not None:
            _warn(request, also_offered(request.env_id, spec))
            return envs
    return _make("async" if _is_slow(request) else "sync", request)


def _mujoco(request: _Request) -> Envs | None:
    if not _installed("envpool"):
        _warn(request, 'three times as fast with pip install "keel-rl[envpool]"')
        return None
    if request.env_id not in import_envpool("").list_all_envs():
        return None
    try:
        return _make("envpool", request)
    except (InputError, EnvError) as error:
        _warn(request, f"EnvPool cannot take it as asked ({error}); using Gymnasium")
        return None


def _envpool(request: _Request) -> Envs:
    game = atari_game(request.env_id)
    task = request.env_id if game is None else f"{game}-v5"
    envpool = import_envpool(request.env_id)
    module, _, name = task.rpartition(":")
    if module:
        raise InputError(
            f"backend: {request.env_id} is that of {module}; EnvPool's own is {POOL}{name}"
        )
    if task not in envpool.list_all_envs():
        raise unknown(request.env_id, envpool.list_all_envs())
    options = {**({} if game is None else request.atari.for_envpool()), **request.kwargs}
    known_options = envpool.make_spec(task)._config_keys
    unknown_options = sorted(set(options) - set(known_options))
    if unknown_options:
        raise InputError(f"env_kwargs: EnvPool's {task} does not know {', '.join(unknown_options)}")
    spec = find_spec(task)
    light = spec is not None and str(spec.entry_point).startswith(LIGHT)
    return PoolEnvs(
        task,
        request.num_envs,
        seed=request.seed,
        threads=1 if light and not request.threads_given else request.threads,
        options=options,
        clip_reward=game is not None and request.atari.clip_reward,
        timeout=request.timeout,
    )


def _vector(request: _Request) -> Envs:
    spec = _spec(request)
    if spec is None or spec.vector_entry_point is None:
        raise InputError(f"backend: {request.env_id} has no vector entry point; use sync or async")
    venv = gymnasium.make_vec(
        spec, request.num_envs, vectorization_mode="vector_entry_point", **request.kwargs
    )
    if request.guard:
        # Every action is looked at already, in a tenth of the time that Gymnasium's own look takes.
        vars(venv.unwrapped.action_space)["contains"] = lambda action: True
    return VectorEnvs(venv, timeout=request.timeout)


def _spec(request: _Request) -> EnvSpec | None:
    if request.maker is not None:
        return spec_of(request.maker)
    game = atari_game(request.env_id)
    return find_spec(request.env_id if game is None else f"ALE/{game}-v5")


def _factory(request: _Request) -> EnvFactory:
    spec = _spec(request)
    if spec is None:
        raise unknown(request.env_id)
    if atari_game(request.env_id) is None or request.wrappers:
        return EnvFactory(at_hand(spec), request.kwargs, request.wrappers)
    if request.kwargs:
        raise InputError(ATARI_KWARGS)
    show = PreprocessAtari(request.atari)
    return EnvFactory(at_hand(spec), show.kwargs(), (show,))


def _is_slow(request: _Request) -> bool:
    """Return whether steps are slow enough for worker processes; a warning says so."""
    if min(request.num_envs, request.threads) < 2:
        return False
    with constructor_of(request.env_id):
        factory = _factory(request)
        step = step_time(
            request.env_id, factory.spec.entry_point, request.kwargs, factory, request.timeout
        )
    if step.is_slow:
        _warn(request, f"{step.reason}: worker processes step it; envs.backend decides otherwise")
    return step.is_slow


def _warn(request: _Request, message: str) -> None:
    warnings.warn(f"{request.env_id}: {message}", EnvWarning, stacklevel=5)


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
