"""Pieces of a pass in parallel: threads that compute alone, each on rows of its own.

An operation of a small model takes a fraction of a millisecond, and torch's threads meet after each
of them. Threads that take half of the rows through the whole pass meet once. There are as many as
torch has.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

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
    torch.set_num_threads(count)
    _LIMIT.clear()


def threads() -> int:
    """Return how many threads may take pieces in parallel; in such a thread, one."""
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
    learning = torch.is_grad_enabled()  # of this thread, and not of others

    def run(piece: Piece) -> Result:
        with torch.set_grad_enabled(learning):
            return function(piece)

    return list(_threads(workers).map(run, pieces))


@cache
def _threads(workers: int) -> ThreadPoolExecutor:
    """Return threads that compute alone; the caller's own number of them stays as it was."""
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
