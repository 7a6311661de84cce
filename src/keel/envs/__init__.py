"""Environments: Gymnasium, EnvPool and the ALE behind one protocol, numpy on the hot path."""

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
from keel.envs.protocol import Envs, Obs, Step, lead
from keel.envs.seeding import env_seeds
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
