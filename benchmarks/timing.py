"""Interleaved timing: both sides share whatever else the machine is doing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """Median seconds of one call, and how many times faster ours is."""

    name: str
    ours: float
    peer: float
    repeats: int

    @property
    def ratio(self) -> float:
        return self.peer / self.ours


def compare(
    name: str,
    ours: Callable[[], object],
    peer: Callable[[], object],
    *,
    repeats: int = 15,
    calls: int = 1,
) -> Comparison:
    """Time `ours` and `peer` in turn, `repeats` times, after a warm-up of each."""
    ours(), peer()
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for side, function in enumerate((ours, peer)):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            seconds[side].append((time.perf_counter() - start) / calls)
    return Comparison(name, *(statistics.median(side) for side in seconds), repeats)
