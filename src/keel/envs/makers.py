"""Environments named `module:attribute`: what they must be is checked before they are called."""

from __future__ import annotations

import builtins
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import BuiltinFunctionType
from typing import Any, Literal, NamedTuple

import gymnasium
from gymnasium.vector import VectorEnv

from keel.envs.faults import EnvError, constructor_of
from keel.envs.multi import ParallelEnvs
from keel.envs.protocol import Envs, Request
from keel.envs.vector import VectorEnvs
from keel.errors import InputError, check_choice
from keel.registry import ImportFailed, import_attribute, import_module, is_object

VECTOR = "vector_env"
"""Function of a module that makes many copies at once, `(num_envs, …) -> Envs`."""


class Maker(NamedTuple):
    """A class or a function that makes environments, checked but not called yet."""

    name: str
    """`module:attribute`"""
    make: Callable[..., Any]
    """one environment"""
    make_many: Callable[..., Any] | None
    """`(num_envs, …) -> Envs`, the module's `vector_env`, where it has one"""


def find_maker(name: str, kwargs: Mapping[str, Any]) -> Maker:
    """Import what `module:attribute` names, and check that it can be an environment.

    Args:
        name: `module:attribute`.
        kwargs: what it would be called with.

    Raises:
        EnvError: it cannot be imported, or is nothing that makes environments.
        InputError: it cannot be called with `kwargs`.
    """
    module = name.partition(":")[0]
    if _is_standard(module):
        raise EnvError(_refusal(name, f"{module!r} is a module of Python's standard library"))
    try:
        imported = None if is_object(name) else import_module(module, name)
        make = import_attribute(name)
    except ImportFailed as error:
        raise EnvError(str(error)) from error
    check_maker(name, make, kwargs)
    make_many = getattr(imported, VECTOR, None)
    if make_many is not None:
        check_maker(f"{module}:{VECTOR}", make_many, kwargs, (1,))
    return Maker(name, make, make_many)


def check_maker(
    name: str, make: Any, kwargs: Mapping[str, Any], args: tuple[Any, ...] = ()
) -> None:
    """Raise unless `make` is a class of environments, or a function that may make one.

    A class needs `reset` and `step`. A function must be written in Python, outside of the standard
    library, must not be annotated to return something else, and must take `args` and `kwargs`.
    """
    if not callable(make):
        raise EnvError(_refusal(name, f"it is a {type(make).__name__}"))
    inner = make.func if isinstance(make, functools.partial) else make
    module = str(getattr(inner, "__module__", None) or type(inner).__module__)
    if isinstance(inner, BuiltinFunctionType) or _is_standard(module):
        raise EnvError(_refusal(name, f"it belongs to {module!r}, which makes none"))
    if isinstance(inner, type):
        if not _is_environment(inner):
            raise EnvError(_refusal(name, "the class has no reset and step"))
    elif not _may_return_environment(inner):
        raise EnvError(_refusal(name, "it is annotated to return something else"))
    try:
        inspect.signature(make).bind(*args, **_constructor_kwargs(kwargs))
    except TypeError as error:
        raise InputError(f"{name}: {error}") from error
    except ValueError:
        pass  # an extension class does not tell its signature


Kind = Literal["gymnasium", "vector", "parallel"]


def check_made(name: str, env: Any) -> Kind:
    """Return which kind of environment was made; an `EnvError` if it is none that Keel takes."""
    if isinstance(env, gymnasium.Env):
        return "gymnasium"
    if isinstance(env, VectorEnv):
        return "vector"
    if hasattr(env, "possible_agents"):
        return "parallel"
    raise EnvError(_refusal(name, f"it gave a {type(env).__name__}"))


def kind_of(maker: Maker, kwargs: Mapping[str, Any]) -> Kind:
    """Return what `maker` makes; a function is called once to see."""
    make = maker.make
    if isinstance(make, type):
        if issubclass(make, VectorEnv):
            return "vector"
        return "gymnasium" if issubclass(make, gymnasium.Env) else "parallel"
    if maker.make_many is not None:
        return "parallel"
    env = make(**_constructor_kwargs(kwargs))
    try:
        return check_made(maker.name, env)
    finally:
        if callable(close := getattr(env, "close", None)):
            close()


def make_named(maker: Maker, backend: str, request: Request) -> Envs | None:
    """Make what `module:attribute` names, or None where it makes environments of Gymnasium.

    Args:
        maker: what was found under the name.
        backend: the backend that was asked for.
        request: the rest of what was.
    """
    with constructor_of(request.env_id):
        kind = kind_of(maker, request.kwargs)
    if kind == "gymnasium":
        return None
    make = _make_parallel if kind == "parallel" else _make_vector
    return make(maker, backend, request)


def _make_parallel(maker: Maker, backend: str, request: Request) -> Envs:
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


def _make_vector(maker: Maker, backend: str, request: Request) -> Envs:
    """Take a vector environment of Gymnasium with as many environments as it has."""
    check_choice("backend", backend, ("auto", "vector"))
    if request.wrappers or request.autoreset == "same_step":
        raise InputError(f"wrappers, autoreset: {request.env_id} is a vector environment already")
    with constructor_of(request.env_id):
        return VectorEnvs(maker.make(**request.kwargs), timeout=request.timeout)


def _make_one(maker: Maker, kwargs: Mapping[str, Any]) -> Any:
    env = maker.make(**kwargs)
    check_made(maker.name, env)
    return env


def _constructor_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an environment itself: Gymnasium limits episodes by a wrapper."""
    return {name: value for name, value in kwargs.items() if name != "max_episode_steps"}


def _is_environment(kind: type) -> bool:
    return all(callable(getattr(kind, method, None)) for method in ("reset", "step"))


def _may_return_environment(function: Any) -> bool:
    """Return whether the return annotation of a function leaves room for an environment."""
    try:
        result = inspect.signature(function).return_annotation
    except (TypeError, ValueError):
        return True
    if isinstance(result, str):  # looked up, never evaluated
        scope = getattr(function, "__globals__", {})
        result = scope.get(result, getattr(builtins, result, inspect.Signature.empty))
    if result is None or result == "None":
        return False
    anything = (inspect.Signature.empty, object, Any)  # Any is a class since Python 3.11
    return not isinstance(result, type) or result in anything or _is_environment(result)


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _refusal(name: str, reason: str) -> str:
    return (
        f"{name}: is no Gymnasium or PettingZoo environment, and no function that makes one: "
        f"{reason}"
    )
