"""Resources of this machine: the cores that may be used, and the memory that is free."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from keel.errors import InputError


def cores() -> int:
    """Return the number of cores that this process may use, at least 1.

    Where the system has no affinity masks (macOS, Windows), all cores of the machine.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_bytes() -> int | None:
    """Return the memory that the operating system says is available, or None."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def expect_memory(what: str, needed: float, hint: str) -> None:
    """Refuse, before anything is allocated, what this machine cannot hold.

    Args:
        what: Name of the allocation.
        needed: Bytes.
        hint: Advice in the error.
    """
    free = free_bytes()
    if free is not None and needed > free:
        raise InputError(
            f"{what}: needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; {hint}"
        )


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE = 1 << 30


def keep_memory() -> None:
    """Ask glibc to keep freed blocks of up to 1 GiB for the next use.

    A minibatch of images needs the same 100 MB again and again. Given back to the system each time,
    they come back as 60,000 page faults an iteration: a twentieth of its time. Elsewhere than on
    Linux with glibc nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, LARGE)
        mallopt(M_MMAP_THRESHOLD, LARGE)
