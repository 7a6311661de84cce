"""A folder with a manifest of its files' sizes and hashes; what differs from it is not read."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from keel.tracking import strict_json

MANIFEST, CHECKSUM = "manifest.json", "checksum"
MAX_MANIFEST = 64 * 1024


class IntegrityError(ValueError):
    """Error of a folder that is not what its manifest says."""


def dump_manifest(contents: Mapping[str, bytes], header: Mapping[str, Any]) -> bytes:
    """Return the manifest of `contents`, with the fields of `header` beside the files."""
    files = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    return dump_checked({**header, "files": files})


def dump_checked(record: Mapping[str, Any]) -> bytes:
    """Return strict JSON of `record` with its own checksum, so that a flipped bit is noticed."""
    return strict_json.dump({**record, CHECKSUM: _checksum(record)})


def is_intact(record: Mapping[str, Any]) -> bool:
    """Return whether a record fits its own checksum; one of an older Keel, without any, does."""
    return CHECKSUM not in record or record[CHECKSUM] == _checksum(record)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest, or raise an `IntegrityError` if it is damaged."""
    if folder.is_symlink():
        raise IntegrityError("it is a symbolic link")
    with _open(folder, MANIFEST) as file:
        content = file.read(MAX_MANIFEST + 1)
    if len(content) > MAX_MANIFEST:
        raise IntegrityError(f"{MANIFEST} has more than {MAX_MANIFEST} bytes")
    try:
        manifest = strict_json.load(content)
    except ValueError as error:
        raise IntegrityError(f"{MANIFEST}: {error}") from error
    if CHECKSUM not in manifest or not is_intact(manifest):
        raise IntegrityError(f"{MANIFEST} is damaged: its checksum differs")
    return manifest


def read_files(folder: Path, manifest: Mapping[str, Any], names: Iterable[str]) -> dict[str, bytes]:
    """Read the files of the manifest, `names` among them, and check their sizes and hashes.

    Sizes and the headers of tensor files are checked before a file is read as a whole.
    """
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise IntegrityError(f"{MANIFEST} lists no files")
    for name in files:
        if Path(name).name != name or "\\" in name or name in ("", ".", ".."):
            raise IntegrityError(f"{MANIFEST} names {name!r}, which is no file of this folder")
    missing = set(names) - set(files)
    if missing:
        raise IntegrityError(f"{MANIFEST} lists {sorted(files)}, and not {sorted(missing)}")
    return {name: _read(folder, name, entry) for name, entry in files.items()}


def _read(folder: Path, name: str, entry: Any) -> bytes:
    size, digest = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (0, 0)
    with _open(folder, name) as file:
        actual = os.fstat(file.fileno()).st_size
        if actual != size:
            raise IntegrityError(f"{name} has {actual} bytes instead of {size}")
        if name.endswith(".safetensors"):
            _check_tensors(folder, name)
        content = file.read(actual)
    if hashlib.sha256(content).hexdigest() != digest:
        raise IntegrityError(f"{name} is damaged: its SHA-256 differs")
    return content


def _check_tensors(folder: Path, name: str) -> None:
    """Raise unless the header of a file of tensors fits its size; nothing is read or allocated."""
    try:
        with safe_open(folder / name, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise IntegrityError(
            f"{name} is not a sound safetensors file (pickles are never loaded): {error}"
        ) from error


def _open(folder: Path, name: str) -> BinaryIO:
    """Open a regular file of the folder itself: no link that leads out, no pipe that blocks."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    path = folder / name
    if path.is_symlink():
        raise IntegrityError(f"{name} is a symbolic link")
    try:
        descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise IntegrityError(f"{name}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IntegrityError(f"{name} is not a regular file")
    return os.fdopen(descriptor, "rb")


def _checksum(record: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in record.items() if name != CHECKSUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
