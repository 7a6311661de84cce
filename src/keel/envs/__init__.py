"""Environments: Gymnasium, EnvPool and the ALE behind one protocol, numpy on the hot path.

Modules are loaded when one of their names is first used: a run imports the backend that it is on.
"""

from typing import TYPE_CHECKING

from keel.registry import lazy_names

if TYPE_CHECKING:
    from keel.envs.atari import AtariOptions
    from keel.envs.check import check_env
    from keel.envs.faults import (
        BadStepError,
        ClosedEnvError,
        EnvError,
        EnvFaultError,
        EnvHungError,
        EnvMakeError,
        EnvRaisedError,
        EnvWarning,
        MissingExtraError,
        UnknownEnvError,
        UnsupportedSpaceError,
        WorkerDiedError,
    )
    from keel.envs.guard import Guarded
    from keel.envs.make import make_envs, time_limit
    from keel.envs.normalize import ObsNormalizer, RewardNormalizer, RunningMoments
    from keel.envs.protocol import Envs, Obs, Step, env_seeds, lead
    from keel.envs.vector import VectorEnvs

__all__ = [
    "AtariOptions",
    "BadStepError",
    "ClosedEnvError",
    "EnvError",
    "EnvFaultError",
    "EnvHungError",
    "EnvMakeError",
    "EnvRaisedError",
    "EnvWarning",
    "Envs",
    "Guarded",
    "MissingExtraError",
    "Obs",
    "ObsNormalizer",
    "RewardNormalizer",
    "RunningMoments",
    "Step",
    "UnknownEnvError",
    "UnsupportedSpaceError",
    "VectorEnvs",
    "WorkerDiedError",
    "check_env",
    "env_seeds",
    "lead",
    "make_envs",
    "time_limit",
]

_NAMES = {
    "atari": "AtariOptions",
    "check": "check_env",
    "faults": (
        "BadStepError ClosedEnvError EnvError EnvFaultError EnvHungError EnvMakeError "
        "EnvRaisedError EnvWarning MissingExtraError UnknownEnvError UnsupportedSpaceError "
        "WorkerDiedError"
    ),
    "guard": "Guarded",
    "make": "make_envs time_limit",
    "normalize": "ObsNormalizer RewardNormalizer RunningMoments",
    "protocol": "Envs Obs Step env_seeds lead",
    "vector": "VectorEnvs",
}
__getattr__ = lazy_names(__name__, _NAMES)


def __dir__() -> list[str]:
    return __all__
