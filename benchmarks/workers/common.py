"""What every worker shares: the job from the command line, the clock, and the one line of answer.

Workers are plain scripts, each run by the Python of the library it measures; nothing of Keel is
imported here. `src/keel/bench/settings.py` says what a job holds.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STARTED = time.perf_counter()


def job() -> SimpleNamespace:
    """The settings, as the driver wrote them on the command line."""
    return SimpleNamespace(**json.loads(sys.argv[1]))


def total_steps(work: SimpleNamespace) -> int:
    return (work.warmup + work.iterations) * work.num_envs * work.rollout_steps


TURN = "your turn"
"""What a worker says when the other may run; it goes on when it is told a line."""


class Clock:
    """Ticks when an iteration begins, and once more after the last.

    Where two workers are measured against each other they take turns, `work.turn` iterations each,
    so that both feel the same machine; the time of the other is not counted.
    """

    def __init__(self, work: SimpleNamespace) -> None:
        self.work = work
        self.begun: list[float] = []
        self.ended: list[float] = []

    def tick(self) -> None:
        done = len(self.begun)
        if done:
            self.ended.append(time.perf_counter())
        more = done < self.work.warmup + self.work.iterations
        if more and self.work.turn and done % self.work.turn == 0:
            print(TURN, flush=True)
            sys.stdin.readline()
        self.begun.append(time.perf_counter())

    def rate(self) -> float:
        """Steps per second over the iterations after the warm-up."""
        expected = self.work.warmup + self.work.iterations
        if len(self.ended) != expected:
            raise RuntimeError(f"{len(self.ended)} iterations ran, expected {expected}")
        steps = self.work.iterations * self.work.num_envs * self.work.rollout_steps
        spent = [b - a for a, b in zip(self.begun, self.ended, strict=False)]
        return steps / sum(spent[self.work.warmup :])


def answer(clock: Clock, packages: list[str], **more: Any) -> None:
    """One line of JSON, the last of the output."""
    line = {
        "steps_per_second": clock.rate(),
        "ready_seconds": clock.begun[0] - STARTED,
        "peak_mb": peak_mb(),
        "versions": {name: version(name) for name in packages},
        **more,
    }
    print(json.dumps(line), flush=True)


def peak_mb() -> float:
    """Peak resident memory of this process and of the children it still has, in MB.

    Read from /proc where there is one: `ru_maxrss` also remembers the parent before `exec`.
    """
    if not Path("/proc/self/status").exists():
        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return sum(_high_water(pid) for pid in _family(os.getpid())) / 1024


def _family(pid: int) -> list[int]:
    found = [pid]
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(listing).split():
            found += _family(int(child))
    return found


def _high_water(pid: int) -> int:
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # it ended in between
