"""The header of a safetensors file, checked before anything is read or allocated.

    8 bytes: length N of the header, little-endian | N bytes: JSON | the tensors' bytes

Hashes only say that a file is the one its manifest describes; a file from a stranger comes with a
manifest of the stranger's. So every number in the header must fit the size of the file itself.
"""

from __future__ import annotations

import json
import math
from typing import Any, BinaryIO

MAX_HEADER = 16 * 1024 * 1024
MAX_DIMENSIONS = 32
_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


class HeaderError(ValueError):
    """Error of a file that is no safetensors file, or none that can be trusted."""


def check_header(file: BinaryIO, size: int) -> None:
    """Raise a `HeaderError` unless the header of the open `file` of `size` bytes is sound."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > size - 8:
        raise HeaderError("its header is longer than the file (pickles are never loaded)")
    if length > MAX_HEADER:
        raise HeaderError(f"its header has {length} bytes, more than {MAX_HEADER}")
    try:
        header = json.loads(file.read(length), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise HeaderError("its header is not an object")
    header.pop("__metadata__", None)
    _check_layout(header, size - 8 - length)


def _check_layout(header: dict[str, Any], size: int) -> None:
    """Raise unless tensors fill the data from first to last byte without gap or overlap."""
    end = 0
    for begin, stop, name in sorted(_extent(name, entry) for name, entry in header.items()):
        if begin != end:
            raise HeaderError(f"tensor {name!r} {'overlaps' if begin < end else 'leaves a gap'}")
        end = stop
    if end != size:
        raise HeaderError(f"its tensors take {end} bytes, the file has {size}")


def _extent(name: str, entry: Any) -> tuple[int, int, str]:
    try:
        item, shape, (begin, stop) = _BYTES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        numbers = [begin, stop, *shape]
    except (KeyError, TypeError, ValueError) as error:
        raise HeaderError(f"tensor {name!r} is not described as one") from error
    if any(type(n) is not int or n < 0 for n in numbers) or len(shape) > MAX_DIMENSIONS:
        raise HeaderError(f"tensor {name!r} has an impossible shape or place")
    if math.prod(shape) * item != stop - begin:
        raise HeaderError(f"tensor {name!r}: shape {shape} does not fit its {stop - begin} bytes")
    return begin, stop, name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a name stands twice")
    return mapping
