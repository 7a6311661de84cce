"""Processes that tests start: with the signals of a fresh login, and none left behind.

A suite that runs in the background of a script ignores SIGINT, and children inherit that; what a
test leaves behind would train on for hours. Start processes with `start_child` (or the fixture
`child`, which ends them) and `run_child`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RESET = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)


def default_signals() -> None:
    """Let signals do in this process what they do by default: called between fork and exec."""
    for number in RESET:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RESET)


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a process in a session of its own, whose id is its process group's as well."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(
        list(command), start_new_session=True, preexec_fn=default_signals, **options
    )


def end_child(process: subprocess.Popen[str]) -> None:
    """Kill a process and all of its group, and wait for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def run_child(
    command: Sequence[str], timeout: float = 300.0, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end, like `subprocess.run`; its group does not outlive it."""
    process = start_child(command, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        end_child(process)
    done = subprocess.CompletedProcess(list(command), process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


@contextmanager
def children() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Yield `start_child`; every process that it starts is ended with the block."""
    started: list[subprocess.Popen[str]] = []

    def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        started.append(start_child(command, **options))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            end_child(process)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt in this process, whatever it inherited."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def is_alive(pid: int) -> bool:
    """Return whether a process runs: it is neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Wait for something that another process does; a busy machine may take its time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
