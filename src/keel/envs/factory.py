"""Makers of single environments of Gymnasium, for the backends that step them one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from keel.envs.atari import ATARI_KWARGS, AtariOptions
from keel.envs.atari_wrappers import PreprocessAtari
from keel.envs.faults import EnvWarning
from keel.envs.lanes import Env
from keel.envs.names import atari_game, spec_for, unknown
from keel.envs.protocol import Request
from keel.envs.spawning import at_hand
from keel.errors import InputError


@dataclass(frozen=True)
class EnvFactory:
    """Makes one environment; can be sent to another process."""

    spec: EnvSpec
    kwargs: Mapping[str, Any]
    wrappers: tuple[Callable[[Env], Env], ...] = ()

    def __call__(self) -> Env:
        if str(self.spec.entry_point).startswith("gymnasium.envs.mujoco"):
            _hear_mujoco()
        # the guard and the lanes check what Gymnasium's passive checker would, in every step
        env: Env = gymnasium.make(self.spec, disable_env_checker=True, **self.kwargs)
        for wrapper in self.wrappers:
            env = wrapper(env)
        return env


def factory_for(request: Request) -> EnvFactory:
    """Return what makes one environment as it was asked for."""
    spec = spec_for(request)
    if spec is None:
        raise unknown(request.env_id)
    if atari_game(request.env_id) is None or request.wrappers:
        return EnvFactory(at_hand(spec), request.kwargs, request.wrappers)
    if request.kwargs:
        raise InputError(ATARI_KWARGS)
    show = PreprocessAtari(request.atari or AtariOptions())
    return EnvFactory(at_hand(spec), show.kwargs(), (show,))


def _hear_mujoco() -> None:
    """Turn MuJoCo's warnings, which it writes to MUJOCO_LOG.TXT, into warnings of Python."""
    try:
        import mujoco  # type: ignore[import-untyped]
    except ImportError:
        return  # Gymnasium will say so
    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_warn_mujoco)


def _warn_mujoco(text: str) -> None:
    if "deprecated" not in text:  # the model files are Gymnasium's
        warnings.warn(f"MuJoCo: {text}", EnvWarning, stacklevel=2)
