"""A checksum at the end of every line of `metrics.jsonl`, so that one changed digit is noticed.

{"step":2048,"train/kl_exact":0.01} becomes {"step":2048,"train/kl_exact":0.01,"crc":"ab54d286"}:
the CRC-32 of the line as it was without it.
"""

from __future__ import annotations

import re
import zlib

KEY = "crc"
_START = f',"{KEY}":"'.encode()
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
