"""Files of a run that survive a crash, and the lock that keeps the run for one process.

Files are written, flushed to the disk, then renamed into place. The lock is a file that its process
keeps locked (`flock`) and that names it: the system frees it when the process ends, however it
does. Where there is no `flock` (Windows), the file names the process and keeps nobody out.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from keel.errors import RunError

Hook = Callable[[str], None]
"""Told before each step what comes next; tests stop the process there."""


def _nothing(_: str) -> None:
    pass


def write_synced(path: Path, data: bytes, hook: Hook = _nothing) -> None:
    """Create `path`, which must not exist, and return when its bytes are on the disk."""
    hook(f"create {path.name}")
    with path.open("xb", buffering=0) as file:
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            hook(f"write {path.name}")
            _write_all(file.fileno(), part)
        hook(f"sync {path.name}")
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, hook: Hook = _nothing) -> None:
    """Put `data` in the place of `path`: a reader sees the old bytes or the new, never a mix.

    Args:
        path: File to replace.
        data: New bytes.
        hook: Called with the name of each step; for tests.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        write_synced(temporary, data, hook)
        hook(f"replace {path.name}")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_file(path: Path, data: bytes, *, make_folder: bool = True) -> None:
    """Put `data` in the place of `path`, whole or not at all; a `RunError` says why it cannot be.

    Args:
        path: the file.
        data: its new content.
        make_folder: whether to make the folder of the file where there is none.
    """
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from error


def read_regular(path: Path) -> bytes:
    """Read a whole file; an `OSError` for a folder, a pipe or a device, which might never end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable; Windows does so by itself."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_disk_full(error: OSError) -> bool:
    """Return whether an error means that no space is left, or that the quota is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


LOCK = "lock"
TRIES, PAUSE = 5, 0.02
"""A lock is free for sure only after a while: `is_held` holds it for a moment."""
_CAREFULLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

_held: dict[tuple[int, int], int] = {}
"""Lock files that this process keeps open, by device and inode (a locked draft gets renamed)."""
_log = logging.getLogger("keel.tracking")


def acquire_lock(directory: Path) -> None:
    """Lock `directory` for this process; a `RunError` names the process that holds it."""
    descriptor = _open_locked(directory / LOCK)
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
        release_lock(directory)
        raise


def release_lock(directory: Path) -> None:
    """Give the lock back, if it is this process's; harmless otherwise, and after a fork."""
    path = directory / LOCK
    with contextlib.suppress(FileNotFoundError):
        descriptor = _held.pop(_identity(path.stat()), None)
        if descriptor is not None:
            path.unlink()
            os.close(descriptor)


def holder_of(directory: Path) -> str:
    """Return the name of the process that holds the lock, or held it last; "" if there is none."""
    try:
        return read_regular(directory / LOCK)[:200].decode(errors="replace")
    except OSError:
        return ""


def is_held(directory: Path) -> bool:
    """Return whether a process, this one included, holds the lock."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | _CAREFULLY)
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
