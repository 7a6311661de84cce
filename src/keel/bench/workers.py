"""Running a worker: one subprocess, one job, one line of JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.bench.settings import Settings
from keel.errors import KeelError

ROOT = Path(__file__).resolve().parents[3]


class BenchError(KeelError):
    """A measurement that cannot be taken."""


@dataclass(frozen=True)
class Reading:
    """What one worker said."""

    rate: float
    """steps per second"""
    peak_mb: float
    wall: float
    """seconds from starting the process to its end"""
    versions: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workers:
    """Where the workers and the two Pythons are."""

    root: Path = ROOT
    ours: Path = Path(sys.executable)

    @property
    def scripts(self) -> Path:
        """The folder of the scripts."""
        return self.root / "benchmarks" / "workers"

    @property
    def peers(self) -> Path:
        """The Python of the peers' environment."""
        return self.root / ".venv-peers" / "bin" / "python"

    def check(self) -> None:
        """Raise a `BenchError` that says what is missing."""
        if not self.scripts.is_dir():
            raise BenchError(
                f"bench: {self.scripts} is missing; measuring needs a checkout of the repository"
            )
        if not self.peers.exists():
            raise BenchError(
                f"bench: no peers in {self.peers.parents[1]}; run `make peers` in {self.root}"
            )

    def run(self, name: str, settings: Settings, extra: Mapping[str, str] | None = None) -> Reading:
        """Run worker `name` (`keel`, `floor`, or a peer) on a job."""
        own = name in ("keel", "floor")
        script = self.scripts / ("floor.py" if name == "floor" else f"run_{name}.py")
        python = self.ours if own else self.peers
        job = json.dumps(dataclasses.asdict(settings))
        started = time.perf_counter()
        done = subprocess.run(
            [str(python), "-W", "ignore", str(script), job],
            capture_output=True,
            text=True,
            env={**os.environ, **(extra or {})},
            check=False,
        )
        wall = time.perf_counter() - started
        return _read(name, done, wall)


def _read(name: str, done: subprocess.CompletedProcess[str], wall: float) -> Reading:
    said = done.stdout.strip().splitlines()
    try:
        line = json.loads(said[-1])
        return Reading(
            rate=float(line.pop("steps_per_second")),
            peak_mb=float(line.pop("peak_mb", 0.0)),
            wall=wall,
            versions=dict(line.pop("versions", {})),
            details=line,
        )
    except (IndexError, ValueError, KeyError, TypeError, AttributeError):
        complaint = (done.stderr.strip().splitlines() or ["nothing on its standard error"])[-1]
        raise BenchError(
            f"bench: the worker {name} ended with status {done.returncode} and gave no result: "
            f"{complaint}"
        ) from None
