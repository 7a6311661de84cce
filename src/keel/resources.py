"""Resources of this machine: cores that may be used, memory that is free, devices."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from keel.errors import InputError

if TYPE_CHECKING:
    import torch

DEVICES = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices that hold numbers and compute with them; torch's `meta`, for one, does not."""


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


def find_device(name: str) -> torch.device:
    """Return the device of this name, after trying it.

    Args:
        name: `auto` (the first GPU, or the CPU), `cpu`, `cuda`, `cuda:1`, `mps` or `xpu`.

    Raises:
        InputError: In one line, where this machine has no such device.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type in DEVICES:
            torch.ones(1, device=device).sum().item()
    except Exception as error:  # each backend has an error of its own for "not here"
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"device: {name!r} cannot be used ({reason}); cpu always can") from error
    if device.type not in DEVICES:
        raise InputError(
            f"device: {name!r} cannot be trained on, expected auto or one of {', '.join(DEVICES)}"
        )
    return device
