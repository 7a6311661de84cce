"""The decorators of the simulator's loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

from keel.models.compiling import keeping

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
    """`function` as a part of the loops that call it: without a way in from Python, and in place.

    A call passes every array by its seven numbers, and there are fifty of them: that took half of
    the time.
    """
    loop: Callable[..., Any] = njit(forceinline=True, **OPTIONS)(function)
    return loop


def outer(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for several loops, which share one copy: those that are large and called seldom
    would else be compiled again and again."""
    loop: Callable[..., Any] = njit(**OPTIONS)(function)
    return loop
