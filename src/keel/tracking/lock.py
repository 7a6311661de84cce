"""Lock of a run for one process: a file that its process keeps locked (`flock`) and that names it.

The system frees the lock when the process ends, however it does. Where there is no `flock`
(Windows), the file names the process and keeps nobody out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from keel.errors import RunError
from keel.tracking.files import read_regular

NAME = "lock"
TRIES, PAUSE = 5, 0.02
"""A lock is free for sure only after a while: `is_held` holds it for a moment."""
_CAREFULLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

_held: dict[tuple[int, int], int] = {}
"""Lock files that this process keeps open, by device and inode (a locked draft gets renamed)."""
_log = logging.getLogger("keel.tracking")


def acquire(directory: Path) -> None:
    """Lock `directory` for this process; a `RunError` names the process that holds it."""
    descriptor = _open_locked(directory / NAME)
    if descriptor is None:
        raise RunError(
            f"{directory}: in use by {holder_of(directory) or 'a process that begins just now'}; "
            "wait for it, stop it, or choose another --name"
        )
    if dead := holder_of(directory):
        from keel.printing import printable

        _log.warning(printable(f"{directory}: took over the lock of {dead}, which is dead"))
    _held[_identity(os.fstat(descriptor))] = descriptor
    since = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()} ({since})".encode())
    except OSError:
        release(directory)
        raise


def release(directory: Path) -> None:
    """Give the lock back, if it is this process's; harmless otherwise, and after a fork."""
    path = directory / NAME
    with contextlib.suppress(FileNotFoundError):
        descriptor = _held.pop(_identity(path.stat()), None)
        if descriptor is not None:
            path.unlink()
            os.close(descriptor)


def holder_of(directory: Path) -> str:
    """Return the name of the process that holds the lock, or held it last; "" if there is none."""
    try:
        return read_regular(directory / NAME)[:200].decode(errors="replace")
    except OSError:
        return ""


def is_held(directory: Path) -> bool:
    """Return whether a process, this one included, holds the lock."""
    try:
        descriptor = os.open(directory / NAME, os.O_RDONLY | _CAREFULLY)
    except OSError:
        return False
    try:
        return not _flock(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Exclude all other processes for a moment; the kernel lets go when a process dies."""
    if os.name != "posix":  # folders cannot be opened there
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _flock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def _open_locked(path: Path) -> int | None:
    """Open a lock file and lock it; None if another process has it."""
    for _ in range(TRIES):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _CAREFULLY, 0o644)
        with contextlib.suppress(FileNotFoundError):  # removed by the last holder meanwhile
            if _flock(descriptor) and _identity(os.fstat(descriptor)) == _identity(path.stat()):
                return descriptor
        os.close(descriptor)
        time.sleep(PAUSE)
    return None


def _flock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file until it is closed; return False if it is locked already."""
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
    return True


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _forget() -> None:
    """Leave the locks to the parent: what a fork copied neither releases nor prolongs them."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
