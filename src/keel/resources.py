"""Resources of this machine: cores, memory, devices, and the threads of torch that share them.

An operation of a small model takes a fraction of a millisecond, and torch's threads meet after each
of them. Threads that take half of the rows through the whole pass meet once (`parallel_map`). There
are as many as torch has. Environments and readers of runs ask for cores and memory without torch,
so it is imported where it is used.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

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


POOL = "keel-parallel"
"""Prefix of the names of our threads."""

Piece = TypeVar("Piece")
Result = TypeVar("Result")


_LIMIT: list[int] = []
"""Number of threads of a forked process until it sets their number itself."""


def set_threads(count: int) -> None:
    """Set the number of threads of torch, and of those that take pieces in parallel.

    Args:
        count: at least 1.
    """
    import torch

    torch.set_num_threads(count)
    _LIMIT.clear()


def threads() -> int:
    """Return how many threads may take pieces in parallel; in such a thread, one."""
    import torch

    own = threading.current_thread().name.startswith(POOL)
    return 1 if own else (_LIMIT or [torch.get_num_threads()])[0]


def _alone_after_fork() -> None:
    """Reset the pool: threads do not survive fork(), and the child would wait for them for ever."""
    _LIMIT[:] = [1]
    _threads.cache_clear()


def parallel_map(
    function: Callable[[Piece], Result], pieces: Sequence[Piece], workers: int
) -> list[Result]:
    """Apply the function to every piece, results in order; it must not change what others read.

    Args:
        function: Function of a piece.
        pieces: Pieces of work.
        workers: Number of threads.
    """
    if workers < 2 or len(pieces) < 2:
        return [function(piece) for piece in pieces]
    import torch

    learning = torch.is_grad_enabled()  # of this thread, and not of others

    def run(piece: Piece) -> Result:
        with torch.set_grad_enabled(learning):
            return function(piece)

    return list(_threads(workers).map(run, pieces))


@cache
def _threads(workers: int) -> ThreadPoolExecutor:
    """Return threads that compute alone; the caller's own number of them stays as it was."""
    import torch

    before = torch.get_num_threads()

    def alone() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread takes the number over when it is first asked for it

    pool = ThreadPoolExecutor(workers, POOL, initializer=alone)
    all_there = threading.Barrier(workers)
    list(pool.map(lambda _: all_there.wait(), range(workers)))
    torch.set_num_threads(before)  # what a thread sets is also what later ones begin with
    return pool


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_alone_after_fork)
