"""Make the runs of a half that are missing, in workers that import their trainer once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.doctor_corpus.table import Job

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "doctor"
"""Where runs are made; what is kept of them is packed from here."""
LIMIT = 300.0
"""Seconds after which a run is ended."""
RESULT = "job.json"
"""What was run, with which outcome; written last, so that a run without it is made again."""
OWN = "keel"
"""The trainer that runs in this Python; the others run in that of the peers."""


class Worker:
    """A process that makes the runs of one trainer."""

    def __init__(self, trainer: str, python: str) -> None:
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [python, "-m", f"benchmarks.doctor_corpus.{trainer}_runs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=ROOT,
        )

    def make(self, job: Job, folder: Path) -> dict[str, Any]:
        """Make one run, and return how it went."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        told = job.as_dict() | {"folder": str(folder), "limit": LIMIT}
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the worker of {job.setup.trainer} ended: {self.process.wait()}")
        outcome: dict[str, Any] = json.loads(answer)
        return outcome

    def close(self) -> None:
        """Let the worker end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def make(jobs: Iterable[Job], half: str, peers: str, minutes: float) -> int:
    """Make what is missing; returns how many runs failed.

    Args:
        jobs: Of the half, in their order.
        half: Name of the half.
        peers: Python of the other trainers.
        minutes: Time after which no new run begins.
    """
    until = time.monotonic() + 60.0 * minutes
    missing = [job for job in jobs if not is_made(job, BUILD / half / job.path)]
    workers: dict[str, Worker] = {}
    failed = 0
    try:
        for number, job in enumerate(missing, 1):
            if time.monotonic() > until:
                print(f"{len(missing) - number + 1} runs are left for another time")
                break
            trainer = job.setup.trainer
            if trainer not in workers:
                workers[trainer] = Worker(trainer, sys.executable if trainer == OWN else peers)
            folder = BUILD / half / job.path
            shutil.rmtree(folder, ignore_errors=True)  # of a run that failed, or was other
            outcome = workers[trainer].make(job, folder)
            failed += outcome["status"] != 0
            print(f"{number}/{len(missing)} {job.path}: {outcome}", flush=True)
            (folder / RESULT).write_text(json.dumps(job.as_dict() | outcome | {"commit": commit()}))
    finally:
        for worker in workers.values():
            worker.close()
    return failed


def is_made(job: Job, folder: Path) -> bool:
    """Return whether a run is there that was made as the tables say now, and did not fail.

    Args:
        job: The run.
        folder: Where it is kept.
    """
    if not (folder / RESULT).exists():
        return False
    made = json.loads((folder / RESULT).read_text())
    told = json.loads(json.dumps(job.as_dict()))
    return made["status"] == 0 and {name: made.get(name) for name in told} == told


def commit() -> str:
    """Return the commit that is checked out, marked where something is not committed."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    changes = subprocess.run(
        [*git, "status", "--porcelain", "src"], capture_output=True, text=True, check=True
    )
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
