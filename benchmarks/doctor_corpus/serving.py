"""A worker that imports its trainer once, and forks a child for every run it is told to make."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[dict[str, Any], Path], None]
"""Trains as a job says and leaves its log in a folder."""


def serve(run: Run) -> None:
    """Make the runs that come as lines of JSON, one after the other, and answer each with a line.

    Args:
        run: Makes one run, in a process of its own.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what trainers print is no answer
    for line in sys.stdin:
        job = json.loads(line)
        folder = Path(job["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        child = os.fork()
        if child == 0:
            _in_child(run, job, folder)
        status = _wait(child, begin + float(job["limit"]))
        seconds = time.perf_counter() - begin
        try:
            answers.write(json.dumps({"status": status, "seconds": seconds}) + "\n")
            answers.flush()
        except BrokenPipeError:  # nobody waits any more
            return


def _in_child(run: Run, job: dict[str, Any], folder: Path) -> None:
    """Run the job and leave, whatever happens."""
    status = 1
    try:
        with (folder / "output.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            try:
                run(job, folder)
                status = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _wait(child: int, until: float) -> int:
    """Return the exit status of a child; one that takes too long is ended, which is status 124."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.perf_counter() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 124
        time.sleep(0.05)
