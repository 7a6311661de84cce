"""Close training loops that a program leaves open, before the interpreter takes itself apart."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Generator
from typing import Any, TypeVar

G = TypeVar("G", bound=Generator[Any, Any, Any])
_OPEN: weakref.WeakKeyDictionary[Generator[Any, Any, Any], int] = weakref.WeakKeyDictionary()
"""Loops, and the process that made each."""


def close_at_exit(loop: G) -> G:
    """Return `loop`, which is closed at exit if nothing else has done so: its checkpoint is saved.

    Args:
        loop: a generator that holds a run; closing it a second time does nothing.
    """
    _OPEN[loop] = os.getpid()
    return loop


@atexit.register
def _close_all() -> None:
    for loop, process in list(_OPEN.items()):
        if process == os.getpid() and not loop.gi_running:  # type: ignore[attr-defined]
            loop.close()
