"""Environments passed from Python as objects: classes, callables and instances get a name.

The name stands in the configuration of a run, and `make_envs` finds the object by it. Classes and
functions of a module are named by their import path, all else by `object:NAME` (`keel.registry`).
"""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv, VectorWrapper

from keel.envs.faults import EnvError
from keel.envs.names import GivenEnv
from keel.errors import InputError
from keel.registry import name_of


def name_object(env: Any) -> GivenEnv:
    """Return the name of an environment that was passed as an object.

    Args:
        env: as for `keel.envs.names.given_env`, anything but a text.
    """
    if not _is_instance(env):
        if callable(env):
            return GivenEnv(name_of(env))
        raise InputError(
            f"env: expected an id, a class, a callable or an environment, got {type(env).__name__}"
        )
    source = Instance(env)
    num = int(env.num_envs) if isinstance(env, VectorEnv) else None
    return GivenEnv(name_of(source), num, source.copies)


def _is_instance(env: Any) -> bool:
    return not isinstance(env, type) and (
        isinstance(env, gymnasium.Env | VectorEnv) or hasattr(env, "possible_agents")
    )


class Instance:
    """A maker of environments like one that is there: copies of it, or itself if it has none.

    What was passed is never closed: it belongs to the caller. If it can be copied, nothing is done
    to it at all.

    Args:
        env: the environment.
    """

    def __init__(self, env: Any) -> None:
        self.__qualname__ = type(env).__name__
        self._env = env
        self.in_use = False
        try:
            self._copy().close()
            self.copies = True
        except Exception:  # whatever an environment raises that cannot be copied
            self.copies = False

    def __call__(self) -> Any:
        """Return an environment that nobody else uses."""
        if self.copies:
            return self._copy()
        if self.in_use:
            raise EnvError(
                f"{self.__qualname__}: cannot be copied, and is in use; pass a callable that makes "
                "one (env=lambda: …)"
            )
        self.in_use = True
        wrapper: Any = _LentVector if isinstance(self._env, VectorEnv) else _Lent
        return wrapper(self._env, self)

    def __deepcopy__(self, memo: Any) -> Instance:
        return self  # Gymnasium copies specifications, and with them what makes environments

    def _copy(self) -> Any:
        try:
            return copy.deepcopy(self._env)
        except Exception:
            spec = self._env.spec if isinstance(self._env, gymnasium.Env) else None
            if spec is None:
                raise
            return gymnasium.make(spec)


class _Lent(gymnasium.Wrapper):
    """An environment of the caller's, which is given back in place of being closed."""

    def __init__(self, env: Any, source: Instance) -> None:
        super().__init__(env)
        self._source, self._own_spec = source, env.unwrapped.spec

    def close(self) -> None:
        self.unwrapped.spec = self._own_spec  # `gymnasium.make` has written another one
        self._source.in_use = False


class _LentVector(VectorWrapper):
    """The same for a vector of environments."""

    def __init__(self, env: Any, source: Instance) -> None:
        super().__init__(env)
        self._source = source

    def close(self, **_: Any) -> None:
        self._source.in_use = False
