"""Files that survive a crash: written, flushed to the disk, then renamed into place."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
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
