"""Decorators that compile the kernels of the game."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

from keel.kernels import keeping

HERE = Path(__file__).parent
NAMES = ("arrays.py", "rules.py", "compiling.py")
SOURCES = (*sorted(HERE.glob("kernels*.py")), *(HERE / name for name in NAMES))
compiled = keeping(SOURCES)


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that only other kernels call.

    Without a Python entry point it compiles in half the time; it is cached as a part of its
    callers.
    """
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    loop: Callable[..., Any] = njit(error_model="numpy", **options)(function)
    return loop
