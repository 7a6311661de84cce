"""Child processes that never outlive their parent, however the parent ends.

Two nets, because each has a hole. The kernel's parent-death signal (Linux only) reaches code that
never returns to Python, but comes with the end of the *thread* that started the child, and not at
all if the parent died before the child asked for it. A pipe that only the parent can write to is at
its end as soon as the parent is gone, on every system, but has to be read by a thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

LIFELINE = "KEEL_LIFELINE"
"""Environment variable of a child whose standard input is such a pipe; its value says which thread
of the parent started it, `main` or `other`."""
_SET_PARENT_DEATH_SIGNAL = 1


def start_child(command: Sequence[str], out: IO[str], error: IO[str]) -> subprocess.Popen[bytes]:
    """Start a `python -m keel …` command that is killed when this process ends.

    The child has a session of its own, so that Ctrl-C reaches it once, through its parent.

    Args:
        command: the program and its arguments; it has to call `watch_lifeline`.
        out: file for its standard output.
        error: file for its standard error.
    """
    main = threading.current_thread() is threading.main_thread()
    python, *arguments = command
    return subprocess.Popen(
        [python, *same_path(), *arguments],
        stdin=subprocess.PIPE,
        stdout=out,
        stderr=error,
        env={**os.environ, LIFELINE: "main" if main else "other"},
        start_new_session=True,
    )


def same_path() -> list[str]:
    """Return flags with which a child imports from the working directory only if this process does.

    `python -m` puts that directory first: a file there called `yaml.py` would be run by the
    children of `keel train --seeds 0 1`, and not by `keel train`. Python 3.10 has no such flag.
    """
    imports_from_here = "" in sys.path or str(Path.cwd()) in sys.path
    return [] if imports_from_here or sys.version_info < (3, 11) else ["-P"]


def watch_lifeline() -> None:
    """End this process with its parent, if the parent started it by `start_child`.

    Standard input is then free for others: it reads as empty, here and in processes started later.
    """
    thread = os.environ.pop(LIFELINE, None)
    if thread is None:
        return
    if thread == "main":
        request_parent_death_signal()
    lifeline = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    threading.Thread(target=_exit_at_end_of, args=(lifeline,), daemon=True).start()


def request_parent_death_signal() -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _exit_at_end_of(pipe: int) -> None:
    while os.read(pipe, 1024):
        pass
    os._exit(1)
