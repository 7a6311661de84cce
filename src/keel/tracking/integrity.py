"""Whether what a run wrote is as it was written: strict JSON, checksums, a manifest of a folder.

Plain data comes back as it went in, infinities included. A checksum is part of every record, and
ends every line of `metrics.jsonl`, so that one changed digit is noticed:
{"step":2048,"train/kl_exact":0.01} becomes {"step":2048,"train/kl_exact":0.01,"crc":"ab54d286"},
the CRC-32 of the line as it was without it. A manifest lists the sizes and hashes of the files of a
folder; what differs from it is not read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from keel.errors import InputError

_FLOAT = "__float__"
"""JSON knows no NaN or infinity: {"__float__": "-inf"}."""


def dump_json(data: Mapping[str, Any], where: str = "data") -> bytes:
    """Return strict JSON of `data`; an `InputError` names what would not come back as it is.

    Only tuples change: they become lists.
    """
    text = json.dumps(_encode(data, where), indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def load_json(data: bytes) -> dict[str, Any]:
    """Parse what `dump_json` wrote; a `ValueError` if it is not strict JSON of an object."""
    try:
        decoded = json.loads(data, parse_constant=_refuse, object_hook=_decode)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(decoded, dict):
        raise ValueError("expected an object")
    return decoded


def _encode(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {_key(key, where): _encode(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if type(value) is float and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise InputError(
        f"{where}: {type(value).__name__} is no plain data; tensors have their own file"
    )


def _key(key: object, where: str) -> str:
    if isinstance(key, str) and key != _FLOAT:
        return key
    raise InputError(f"{where}: the key {key!r} would not come back as it is; use another string")


def _decode(mapping: dict[str, Any]) -> Any:
    return float(mapping[_FLOAT]) if mapping.keys() == {_FLOAT} else mapping


def _refuse(token: str) -> None:
    raise ValueError(f"{token} is not JSON")


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
    return dump_json({**record, CHECKSUM: _checksum(record)})


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
        manifest = load_json(content)
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


NAMED = 5
"""Lines that are named one by one."""
CRC = "crc"
_START = f',"{CRC}":"'.encode()
_END = re.compile(rb'"[0-9a-f]{8}"\}$')
_LENGTH = len(_START) + 8 + len(b'"}')


def add_checksum(line: bytes) -> bytes:
    """Return a line of JSON, `{…}` without a newline, with its checksum as the last entry."""
    return line[:-1] + _START + b'%08x"}' % zlib.crc32(line)


def has_checksum(line: bytes) -> bool:
    """Return whether a line ends in a checksum, damaged or not; lines of an older Keel do not."""
    return line[-_LENGTH:].startswith(_START) or _END.search(line) is not None


def fits_checksum(line: bytes) -> bool:
    """Return whether a line is as it was when its checksum was added."""
    return has_checksum(line) and add_checksum(line[:-_LENGTH] + b"}") == line


def damaged_lines(lines: list[bytes]) -> set[int]:
    """Return the indices of lines that do not fit their checksum.

    Lines before the first checksum were written by an older Keel; after it, every line has one.
    """
    first = next((i for i, line in enumerate(lines) if has_checksum(line)), len(lines))
    later = range(first, len(lines))
    return {i for i in later if lines[i].strip() and not fits_checksum(lines[i])}


def name_lines(lines: Sequence[int], more: int = 0) -> str:
    """Name some lines of a file, and how many more there are.

    Examples:
        >>> name_lines([4]), name_lines([4, 9, 12]), name_lines([4, 9], more=40)
        ('line 4', 'lines 4, 9 and 12', 'lines 4, 9 and 40 more')
    """
    hidden = more + len(lines[NAMED:])
    parts = [str(line) for line in lines[:NAMED]] + ([f"{hidden} more"] if hidden else [])
    if len(parts) == 1:
        return f"line {parts[0]}"
    return f"lines {', '.join(parts[:-1])} and {parts[-1]}"


def describe_lines(lines: Sequence[int], problem: str) -> list[str]:
    """Say how many lines were dropped, why and where; nothing if there are none.

    Examples:
        >>> describe_lines([4, 9], "that hold no step")
        ['2 lines that hold no step were dropped (lines 4 and 9)']
    """
    if not len(lines):
        return []
    is_single = len(lines) == 1
    count = "1 line" if is_single else f"{len(lines):,} lines"
    names = name_lines([int(line) for line in lines[: NAMED + 1]], max(0, len(lines) - NAMED - 1))
    return [f"{count} {problem} {'was' if is_single else 'were'} dropped ({names})"]


def describe_missing(lines: int) -> str:
    """Say how many lines are missing.

    Examples:
        >>> describe_missing(1), describe_missing(2)
        ('1 line is missing since the run ended', '2 lines are missing since the run ended')
    """
    return f"{lines:,} {'line is' if lines == 1 else 'lines are'} missing since the run ended"
