"""Keel: trust-region policy optimization, exact, visible and enforced.

Names are loaded when they are first used, so that `import keel` and `keel --help` cost nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from keel import errors, explain, functional
    from keel.errors import EstimatorWarning, InputError, KeelError, ShapeError

_MODULES = ("errors", "explain", "functional")
_ERRORS = ("EstimatorWarning", "InputError", "KeelError", "ShapeError")

__all__ = [
    "EstimatorWarning",
    "InputError",
    "KeelError",
    "ShapeError",
    "__version__",
    "errors",
    "explain",
    "functional",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"keel.{name}")
    if name in _ERRORS:
        return getattr(importlib.import_module("keel.errors"), name)
    raise AttributeError(f"module 'keel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
