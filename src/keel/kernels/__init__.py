"""Compiled kernels: the only place of the core that imports numba.

Here are the place of compiled loops on disk, and the decorators that cache them there. numba
compiles a function together with those that it calls, but asks only whether the caller's own file
has changed before it takes what is on disk: an edit to a file of loops would leave its callers as
they were, here and after an upgrade of Keel. So the folder is named after all of these files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCES = (*sorted(HERE.glob("*.py")), HERE.parent / "functional" / "value.py")


def cache_folder(sources: Sequence[Path] = SOURCES) -> Path:
    """Return the folder of this version of the loops; below NUMBA_CACHE_DIR if that is set."""
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()
    beside = sources[0].parent / "__pycache__"
    return Path(os.environ.get("NUMBA_CACHE_DIR") or beside) / f"loops-{digest[:12]}"


def keeping(
    sources: Sequence[Path], **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for loops in one of `sources`, which are all files that they call into."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        from numba import config, njit

        before = getattr(config, "CACHE_DIR", "")
        config.CACHE_DIR = str(cache_folder(sources))  # type: ignore[attr-defined]
        try:  # if nothing can be written there, numba looks for another place
            loop: Callable[..., Any] = njit(cache=True, nogil=True, error_model="numpy", **options)(
                function
            )
        finally:
            config.CACHE_DIR = before  # type: ignore[attr-defined]
        return loop

    return decorate


compiled = keeping(SOURCES)
vectorised = keeping(SOURCES, fastmath={"reassoc", "contract"})
"""The decorator for loops whose sums may be reordered, without which no loop over a sum becomes a
vector. Not where numbers are asked whether they are finite: numba asks by x − x = 0, which
reordering makes true of all."""
