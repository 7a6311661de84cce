"""Decorators that compile the kernels of the simulator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

from keel.kernels import keeping

HERE = Path(__file__).parent
SOURCES = (
    *sorted(HERE.glob("kernels*.py")),
    HERE / "arrays.py",
    HERE / "fields.py",
    HERE / "observations.py",  # its constants are compiled in
    Path(__file__),
)
compiled = keeping(SOURCES)


OPTIONS: dict[str, Any] = {
    "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy",
}  # fmt: skip


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function into the kernels that call it, without a Python entry point.

    A call would pass each of fifty arrays as seven numbers, which took half of the time.
    """
    loop: Callable[..., Any] = njit(forceinline=True, **OPTIONS)(function)
    return loop


def outer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function as one copy that several kernels share.

    Large functions that are called seldom would otherwise be compiled once for each caller.
    """
    loop: Callable[..., Any] = njit(**OPTIONS)(function)
    return loop
