"""The decorators of the game's loops, and the folder in which they are kept.

As `keel.models.compiling`, and for its reason: numba does not see that a function in another file
has changed, so the folder is named after all files with loops.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import config, njit

HERE = Path(__file__).parent
SOURCES = (*sorted(HERE.glob("kernels*.py")), *(HERE / name for name in ("arrays.py", "rules.py")))


def cache_folder() -> Path:
    """Of this version of the loops; below NUMBA_CACHE_DIR if that is set."""
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in SOURCES)).hexdigest()
    return Path(os.environ.get("NUMBA_CACHE_DIR") or HERE / "__pycache__") / f"loops-{digest[:12]}"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled when it is first called on this machine."""
    before = getattr(config, "CACHE_DIR", "")
    config.CACHE_DIR = str(cache_folder())  # type: ignore[attr-defined]
    try:
        loop: Callable[..., Any] = njit(cache=True, nogil=True, error_model="numpy")(function)
    finally:
        config.CACHE_DIR = before  # type: ignore[attr-defined]
    return loop


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for other loops only: without a way in from Python it compiles in half the time,
    and it is kept on disk as a part of them."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    loop: Callable[..., Any] = njit(error_model="numpy", **options)(function)
    return loop
