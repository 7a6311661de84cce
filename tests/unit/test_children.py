"""The processes that tests start: signals as usual, and nothing left behind."""

from __future__ import annotations

import signal
import sys
import time

import pytest
from children import children, is_alive, run_child

ASK = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"


def test_a_child_can_be_interrupted_where_the_suite_cannot() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = run_child([sys.executable, "-S", "-c", ASK])
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.stdout == "True\n"


def test_no_process_outlives_a_test_that_fails() -> None:
    """Nor one that the process itself has started."""
    script = (
        "import subprocess, time\n"
        "print(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    started = []

    def fail() -> None:
        with children() as start:
            started.append(start([sys.executable, "-S", "-c", script]))
            started.append(int(started[0].stdout.readline()))
            raise AssertionError("the test fails")

    with pytest.raises(AssertionError, match="the test"):
        fail()
    process, grandchild = started
    assert process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10.0
    while is_alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(grandchild)
