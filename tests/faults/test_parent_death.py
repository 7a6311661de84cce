"""`kill -9` of a command that trains in child processes: none of them lives on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from children import is_alive

from keel.ablate import run_jobs
from keel.tracking import list_runs

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
PATIENCE = 300.0


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    """Return the direct children, of all threads."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, task.read_text().split())
    return children


@contextmanager
def no_survivors(pids: list[int]) -> Iterator[None]:
    """Kill processes after a test, whatever it finds."""
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_job_that_waits_in_a_system_call_dies_with_its_parent(tmp_path: Path):
    """`keel train` that blocks on opening a pipe as its config, before anything is imported."""
    pipe = tmp_path / "config.yaml"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "keel", "train", "CartPole-v1", "--config", str(pipe)]
    parent = os.fork()
    if parent == 0:
        with contextlib.suppress(BaseException):
            run_jobs([("a", lambda: command)], 1, lambda *_: None)
        os._exit(0)
    pids = [parent]
    with no_survivors(pids):
        wait_until(lambda: children_of(parent), "the job was not started")
        children = children_of(parent)
        pids += children
        time.sleep(0.3)
        assert all(map(is_alive, children))
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        wait_until(lambda: not any(map(is_alive, children)), "a job outlived its parent")


TRAIN = ["CartPole-v1", "--rollout-steps", "64", "--checkpoints.every", "512"]
COMMANDS = {
    "ablate": ["ablate", *TRAIN, "--vary", "region.max_kl=0.05,0.01", "--seeds", "0"],
    "tune": ["tune", *TRAIN, "--trials", "2", "--search", "region.epochs=1,2", "--name", "study"],
    "seeds": ["train", *TRAIN, "--seeds", "0", "1", "--name", "both"],
}


def runs_with_a_checkpoint(root: Path) -> set[Path]:
    return {path.parents[2] for path in root.glob("**/checkpoints/*/manifest.json")}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_commands_leave_no_process_and_can_be_started_again(name: str, tmp_path: Path):
    """After `kill -9` nothing trains on, every lock is a dead one, and a restart takes over."""
    words = [sys.executable, "-m", "keel", *COMMANDS[name], "--runs", str(tmp_path)]
    at_once = [] if name == "seeds" else ["--at-once", "2"]
    parent = subprocess.Popen(
        [*words, *at_once, "--total-steps", "100000000"], stderr=subprocess.DEVNULL
    )
    pids = [parent.pid]
    with no_survivors(pids):
        wait_until(lambda: len(runs_with_a_checkpoint(tmp_path)) >= 2, "nothing was trained")
        children = children_of(parent.pid)
        pids += children
        assert len(children) == 2
        parent.kill()
        parent.wait()
        wait_until(lambda: not any(map(is_alive, children)), "a child outlived its parent")
    # a process of many threads is a zombie before the last of them has let go of the lock
    crashed = lambda: {run.status for run in list_runs(tmp_path)} <= {"crashed"}  # noqa: E731
    wait_until(crashed, "a lock outlived its process")
    again = [*words, *at_once, "--total-steps", "2048"]
    if name == "seeds":
        steps = ["--total-steps", "1024", "--json"]
        again = [sys.executable, "-m", "keel", "resume", str(tmp_path / "both" / "seed-0"), *steps]
    done = subprocess.run([*again, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])
