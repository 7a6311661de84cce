"""One process per run: a lock file that says who holds it, and is taken over from the dead."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from keel.printing import printable
from keel.tracking.errors import RunError
from keel.tracking.files import read_regular

NAME = "lock"
UNREADABLE_AFTER = 10.0
"""Seconds after which a lock without content belongs to a process that died while writing it."""

_ZOMBIE = "dead, and not yet waited for"
_log = logging.getLogger("keel.tracking")


@dataclass(frozen=True)
class Holder:
    """The process that holds a run."""

    pid: int
    host: str
    since: str
    """when it took the lock, in ISO 8601"""
    started: str
    """when the process started, as its machine counts; tells it from a later one of the same id"""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


def acquire(directory: Path) -> Holder:
    """Lock `directory` for this process; a `RunError` names the process that holds it."""
    path = directory / NAME
    if _create(path):
        return _this_process()
    with exclusive(directory):  # of two that find a dead holder, one takes over and one is refused
        holder, stale = holder_of(directory), path.exists()
        if holder is not None and is_alive(holder):
            raise RunError(
                f"{directory}: in use by {holder}; wait for it, stop it, or choose another --name"
            )
        if holder is None and stale and _age(path) < UNREADABLE_AFTER:
            raise RunError(f"{path}: held by a process that has not said yet who it is; try again")
        path.unlink(missing_ok=True)
        if not _create(path):
            raise RunError(f"{directory}: in use by {holder_of(directory)}")
    if stale:
        dead = holder or "a process"
        _log.warning(printable(f"{directory}: took over the lock of {dead}, which is dead"))
    return _this_process()


def release(directory: Path) -> None:
    """Give the lock back, if it is this process's; harmless otherwise, and after a fork."""
    holder = holder_of(directory)
    if holder is not None and (holder.pid, holder.started) == (os.getpid(), _started(os.getpid())):
        (directory / NAME).unlink(missing_ok=True)


def holder_of(directory: Path) -> Holder | None:
    """Return the process that holds the lock, dead or alive, or None."""
    try:
        holder = Holder(**json.loads(read_regular(directory / NAME)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    is_valid = type(holder.pid) is int and 0 < holder.pid < 2**31
    return holder if is_valid and isinstance(holder.host, str) else None


def is_alive(holder: Holder) -> bool:
    """Return whether the holder still runs; on another machine, it is taken to be alive."""
    if holder.host != socket.gethostname() or os.name != "posix":
        return True
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists and belongs to another user
    started = _started(holder.pid)
    return started == holder.started or "" in (started, holder.started)


def _create(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, json.dumps(asdict(_this_process())).encode())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return True


def _this_process() -> Holder:
    pid = os.getpid()
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return Holder(pid=pid, host=socket.gethostname(), since=now, started=_started(pid))


def _started(pid: int) -> str:
    """Return boot and clock tick of the start of a process (ids are reused), or ""."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The command name stands in brackets and may hold anything: count from the last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return _ZOMBIE if fields[0] in "ZX" else f"{boot}/{fields[19]}"


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Exclude all other processes for a moment; the kernel lets go when a process dies."""
    if os.name != "posix":
        yield
        return
    import fcntl

    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
