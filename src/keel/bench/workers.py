"""Workers of measurements: one subprocess, one job, one line of JSON each; two in turns."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.bench.settings import Settings
from keel.errors import KeelError

TURN = "your turn"
"""Line that a worker prints when the other may run (`benchmarks/workers/common.py`)."""
ROOT = Path(__file__).resolve().parents[3]
OURS = ("keel", "keel-tokens", "floor")
"""Workers that our own Python runs."""

Job = Settings | Mapping[str, Any]
"""Settings of a worker, as they are or as plain data."""


class BenchError(KeelError):
    """A measurement that cannot be taken."""


@dataclass(frozen=True)
class Reading:
    """Measurement of one worker."""

    rate: float
    """steps per second"""
    peak_mb: float
    wall: float
    """seconds from starting the process to its end"""
    versions: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workers:
    """Paths of the workers and of the two Pythons."""

    root: Path = ROOT
    ours: Path = Path(sys.executable)

    @property
    def scripts(self) -> Path:
        """Folder of the scripts."""
        return self.root / "benchmarks" / "workers"

    @property
    def peers(self) -> Path:
        """Python of the peers' environment."""
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
        """Run one worker on a job, alone.

        Args:
            name: `keel`, `keel-tokens`, `floor`, or a peer.
            settings: the job.
            extra: environment variables.
        """
        with _Worker(self, name, settings.replace(turn=0), extra) as worker:
            worker.go()
            return worker.reading()

    def race(self, *jobs: tuple[str, Settings]) -> list[Reading]:
        """Run several workers side by side, of which only one is ever awake.

        Args:
            jobs: names of workers, and their settings.
        """
        return self.race_sides(*((self, name, settings, None) for name, settings in jobs))

    @staticmethod
    def race_sides(
        *jobs: tuple[Workers, str, Job, Mapping[str, str] | None],
    ) -> list[Reading]:
        """Run workers of several checkouts side by side, of which only one is ever awake.

        A machine that is shared changes its speed within minutes: between two runs one after the
        other by half, between two turns of a second by little.

        Args:
            jobs: checkout, name of the worker, settings (plain data for another revision, whose
                settings may have other names), and environment variables of each.
        """
        with ExitStack() as stack:
            workers = []
            for checkout, name, settings, extra in jobs:
                worker = stack.enter_context(_Worker(checkout, name, settings, extra))
                worker.go()  # to its first turn, before the next one starts
                workers.append(worker)
            while any(worker.running for worker in workers):
                for worker in workers:
                    if worker.running:
                        worker.go()
            return [worker.reading() for worker in workers]


class _Worker:
    """A subprocess that runs until its turn is over or its job is done."""

    def __init__(
        self, workers: Workers, name: str, settings: Job, extra: Mapping[str, str] | None
    ) -> None:
        is_ours = name in OURS
        script = workers.scripts / (
            "floor.py" if name == "floor" else f"run_{name.replace('-', '_')}.py"
        )
        python = workers.ours if is_ours else workers.peers
        data = settings if isinstance(settings, Mapping) else dataclasses.asdict(settings)
        job = json.dumps(data)
        self._name, self.running = name, True
        self._output, self._errors = "", tempfile.TemporaryFile("w+")  # noqa: SIM115  see __exit__
        self._started = time.perf_counter()
        self._wall, self._is_started = 0.0, False
        self._process = subprocess.Popen(
            [str(python), "-W", "ignore", str(script), job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **(extra or {})},
        )

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def go(self) -> None:
        """Resume the worker, and wait until its turn is over or it ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._is_started:
            with suppress(BrokenPipeError):
                self._process.stdin.write("\n")
                self._process.stdin.flush()
        self._is_started = True
        for line in self._process.stdout:
            if line.strip() == TURN:
                return
            self._output = line.strip() or self._output
        self._process.wait()
        self._wall, self.running = time.perf_counter() - self._started, False

    def reading(self) -> Reading:
        """Return the measurement of a worker that has ended."""
        self._errors.seek(0)
        return _read(
            self._name, self._output, self._errors.read(), self._process.returncode, self._wall
        )


def _read(name: str, output: str, errors: str, status: int, wall: float) -> Reading:
    try:
        line = json.loads(output)
        return Reading(
            rate=float(line.pop("steps_per_second")),
            peak_mb=float(line.pop("peak_mb", 0.0)),
            wall=wall,
            versions=dict(line.pop("versions", {})),
            details=line,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        complaint = (errors.strip().splitlines() or ["nothing on its standard error"])[-1]
        raise BenchError(
            f"bench: the worker {name} ended with status {status} and gave no result: {complaint}"
        ) from None
