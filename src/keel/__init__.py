"""Keel: trust-region policy optimization, exact, visible and enforced.

Names are loaded when they are first used, so that `import keel` and `keel --help` cost nothing.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Idle threads of torch spin for milliseconds before they sleep, on cores that the environments
# need: a rollout on pixels is a tenth faster with 0.1 ms. Read once, when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

if TYPE_CHECKING:
    from keel import errors, explain, functional
    from keel.compare.api import compare_runs
    from keel.config import Config
    from keel.config.common import (
        ADVANTAGES,
        CONTROLLERS,
        DISTRIBUTIONS,
        LOSSES,
        NETWORKS,
    )
    from keel.controllers.controllers import AdaptiveKLController, FixedKLController
    from keel.doctor.api import diagnose
    from keel.errors import EstimatorWarning, InputError, KeelError, ShapeError
    from keel.training.api import check_env, evaluate, iterate, load, resume, train
    from keel.training.policy import Policy
    from keel.training.run import Run

    register_loss = LOSSES.register
    register_network = NETWORKS.register
    register_controller = CONTROLLERS.register
    register_distribution = DISTRIBUTIONS.register
    register_advantage = ADVANTAGES.register

_MODULES = ("errors", "explain", "functional")
_REGISTRIES = {
    "register_advantage": "ADVANTAGES",
    "register_controller": "CONTROLLERS",
    "register_distribution": "DISTRIBUTIONS",
    "register_loss": "LOSSES",
    "register_network": "NETWORKS",
}
_NAMES = {
    "AdaptiveKLController": "keel.controllers.controllers",
    "Config": "keel.config",
    "EstimatorWarning": "keel.errors",
    "FixedKLController": "keel.controllers.controllers",
    "InputError": "keel.errors",
    "KeelError": "keel.errors",
    "Policy": "keel.training.policy",
    "Run": "keel.training.run",
    "ShapeError": "keel.errors",
    "check_env": "keel.training.api",
    "compare_runs": "keel.compare.api",
    "diagnose": "keel.doctor.api",
    "evaluate": "keel.training.api",
    "iterate": "keel.training.api",
    "load": "keel.training.api",
    "resume": "keel.training.api",
    "train": "keel.training.api",
}

__all__ = [
    "AdaptiveKLController",
    "Config",
    "EstimatorWarning",
    "FixedKLController",
    "InputError",
    "KeelError",
    "Policy",
    "Run",
    "ShapeError",
    "__version__",
    "check_env",
    "compare_runs",
    "diagnose",
    "errors",
    "evaluate",
    "explain",
    "functional",
    "iterate",
    "load",
    "register_advantage",
    "register_controller",
    "register_distribution",
    "register_loss",
    "register_network",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"keel.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _REGISTRIES:
        registries = importlib.import_module("keel.config.common")
        return getattr(registries, _REGISTRIES[name]).register
    raise AttributeError(f"module 'keel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
