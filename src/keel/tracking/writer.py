"""Metrics of a run: append-only `metrics.jsonl`, one strict-JSON line an iteration.

    {"step":2048,"train/kl_exact":0.0,"train/kl_step":null,"flags":{"train/kl_step":"nan"},"crc":…}

A number that JSON cannot hold is null and named in `flags`; after a full disk, `dropped` counts the
lines that are missing. `crc` is a checksum of the line (`integrity.py`).
"""

from __future__ import annotations

import errno
import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

from keel.errors import InputError, RunError, RunWarning
from keel.tracking.directory import METRICS
from keel.tracking.files import is_disk_full, replace_file
from keel.tracking.integrity import CRC, add_checksum, damaged_lines, describe_lines

RESERVED = ("step", "flags", "dropped", CRC)

Value = SupportsFloat | str | None
"""A number (Python's, numpy's, a tensor of one element), a short text (a verdict), or nothing."""


class MetricsWriter:
    """Writer of `metrics.jsonl`; half a line left by a crash is cut off when it opens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        """lines lost to a full disk"""
        self._torn = 0
        """number of a half-written line at the end, which was cut off; 0 if there was none"""
        self._descriptor = self._open()

    def write(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Append one line.

        A full disk costs this line, one warning and a count; any other failure is a `RunError`.

        Args:
            step: of the run.
            metrics: numbers and short texts by name.
        """
        if self._descriptor is None:
            raise RunError(f"{self.path}: the writer is closed")
        line = encode_line(step, metrics, self.dropped)
        try:
            self._append(self._descriptor, line)
        except OSError as error:
            if not is_disk_full(error):
                raise self._failure(error) from error
            self._drop()

    def amend(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Add metrics to the line of `step`, if it is the last one; else append a line.

        The longer line is written over the shorter one at once: a process that is killed leaves the
        one or the other.

        Args:
            step: of the run.
            metrics: numbers and short texts by name.
        """
        if self._descriptor is None:
            raise RunError(f"{self.path}: the writer is closed")
        try:
            before = _last_line(self.path)
            record = _record_of(before)
            if record is None or record["step"] != step:
                self.write(step, metrics)
                return
            self._overwrite(before, encode_line(step, _merge(record, metrics), self.dropped))
        except OSError as error:
            if not is_disk_full(error):
                raise self._failure(error) from error
            self._drop()

    def last(self) -> dict[str, Any] | None:
        """Return the last line as plain data, or None if there is none."""
        return last_record(self.path)

    def sync(self) -> None:
        """Return when all lines are on the disk; call it before a checkpoint that follows them."""
        if self._descriptor is None:
            return
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            if not is_disk_full(error):
                raise self._failure(error) from error

    def truncate_after(self, step: int) -> int:
        """Drop the lines after `step`, which a resumed run writes again; return their number.

        What remains keeps its bytes: continued, the file equals that of a run without interruption.
        A `RunWarning` says which lines were dropped because they hold no record.

        Args:
            step: of the last line that stays.
        """
        self.close()
        try:
            removed, damaged = _truncate_after(self.path, step)
        except OSError as error:
            raise self._failure(error) from error
        if self._torn:
            damaged.append(self._torn)
        for sentence in describe_lines(damaged, "without a record of metrics"):
            warnings.warn(f"{self.path}: {sentence}", RunWarning, stacklevel=2)
        self._descriptor = self._open()
        return removed

    def close(self) -> None:
        """Flush to the disk and close; a second call does nothing."""
        if self._descriptor is not None:
            try:
                self.sync()
            finally:
                os.close(self._descriptor)
                self._descriptor = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int | None:
        try:
            self._torn = cut_half_line(self.path)
            return os.open(self.path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        except OSError as error:
            raise self._failure(error) from error

    def _append(self, descriptor: int, line: bytes) -> None:
        status = os.fstat(descriptor)
        if status.st_nlink == 0:  # deleted under us: the write would succeed, into nothing
            raise FileNotFoundError(2, "the run's directory or file was deleted")
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, status.st_size)  # no half line: the next one must stand alone
            raise

    def _overwrite(self, before: bytes, line: bytes) -> None:
        """Replace the last line, `before`; where there is no space, it stays."""
        descriptor = os.open(self.path, os.O_WRONLY)
        try:
            start = os.fstat(descriptor).st_size - len(before)
            try:
                os.lseek(descriptor, start, os.SEEK_SET)
                if os.write(descriptor, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.ftruncate(descriptor, start + len(line))
            except OSError:
                os.lseek(descriptor, start, os.SEEK_SET)
                os.write(descriptor, before)  # over itself: this needs no space
                os.ftruncate(descriptor, start + len(before))
                raise
        finally:
            os.close(descriptor)

    def _drop(self) -> None:
        self.dropped += 1
        if self.dropped == 1:
            warnings.warn(
                f"{self.path}: the disk is full; metrics are dropped and counted until there is "
                f"space again, training goes on",
                RunWarning,
                stacklevel=3,
            )

    def _failure(self, error: OSError) -> RunError:
        return RunError(f"{self.path}: metrics cannot be written: {error.strerror or error}")


def encode_line(step: int, metrics: Mapping[str, Value], dropped: int = 0) -> bytes:
    """Return one line of `metrics.jsonl`, newline included."""
    record: dict[str, object] = {"step": int(step)}
    flags: dict[str, str] = {}
    for name, value in metrics.items():
        if name in RESERVED:
            raise InputError(f"metric {name!r}: this name is the line's own")
        number = record[name] = _plain(name, value)
        if isinstance(number, float) and not math.isfinite(number):
            record[name], flags[name] = None, str(number)
    if flags:
        record["flags"] = flags
    if dropped:
        record["dropped"] = dropped
    text = json.dumps(record, allow_nan=False, separators=(",", ":"))
    return add_checksum(text.encode()) + b"\n"


def last_record(path: Path) -> dict[str, Any] | None:
    """Return the last line of a file of metrics as plain data, or None if there is none."""
    try:
        return _record_of(_last_line(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path}: metrics cannot be read: {error.strerror or error}") from error


def _merge(record: Mapping[str, Any], metrics: Mapping[str, Value]) -> dict[str, Value]:
    """Return the metrics of a line as they were given, and `metrics` after them."""
    flags = record.get("flags", {})
    before = {k: float(flags[k]) if k in flags else v for k, v in record.items()}
    return {k: v for k, v in (before | dict(metrics)).items() if k not in RESERVED}


def _last_line(path: Path) -> bytes:
    """Return the last whole line of a file, newline included; nothing if it has none."""
    with path.open("rb") as file:
        size, tail = file.seek(0, os.SEEK_END), 1 << 16
        while True:
            start = max(size - tail, 0)
            file.seek(start)
            lines = file.read().splitlines(keepends=True)
            if len(lines) > 1 or start == 0:
                return lines[-1] if lines else b""
            tail *= 8


def _record_of(line: bytes) -> dict[str, Any] | None:
    if not math.isfinite(_step_of(line)):
        return None
    return {name: value for name, value in json.loads(line).items() if name != CRC}


def _plain(name: str, value: Value) -> float | str | None:
    if value is None or isinstance(value, str | int):
        return int(value) if isinstance(value, bool) else value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        raise InputError(f"metric {name!r}: expected one number, got {kind}: {error}") from error


def set_metrics_aside(run: Path) -> Path | None:
    """Rename the metrics of a run that starts anew; return their new path, or None."""
    path = run / METRICS
    if not (path.is_file() and path.stat().st_size):
        return None
    number = 1
    while (target := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    try:
        return path.rename(target)
    except OSError as error:
        raise RunError(f"{path}: cannot be renamed: {error.strerror or error}") from error


def _truncate_after(path: Path, step: int) -> tuple[int, list[int]]:
    """Keep the lines up to `step`, byte for byte.

    Returns how many others were removed, and the numbers of those without a record.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return 0, []
    changed = damaged_lines([line.rstrip(b"\n") for line in lines])
    steps = [math.inf if i in changed else _step_of(line) for i, line in enumerate(lines)]
    damaged = [number for number, at in enumerate(steps, start=1) if at == math.inf]
    rest = [line for line, at in zip(lines, steps, strict=True) if at <= step]
    if rest == lines[: len(rest)]:
        os.truncate(path, sum(map(len, rest)))  # needs no space: the disk may be full
    else:
        replace_file(path, b"".join(rest))
    return len(lines) - len(rest), damaged


def _step_of(line: bytes) -> float:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return math.inf
    return step if isinstance(step, int) else math.inf


def cut_half_line(path: Path) -> int:
    """Cut off the last line of a file if it does not end; return its number, 0 if it does."""
    data = path.read_bytes() if path.exists() else b""
    if not data or data.endswith(b"\n"):
        return 0
    os.truncate(path, data.rfind(b"\n") + 1)
    return data.count(b"\n") + 1
