"""Tables of data that stand as YAML beside the module that reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


def read_beside(module: str, name: str, kind: type[T]) -> T:
    """Return the data of a file, converted to a type and checked.

    Args:
        module: `__file__` of the module beside which it stands.
        name: Name of the file.
        kind: The type: dataclasses, and lists and mappings of such.
    """
    return msgspec.yaml.decode(Path(module).with_name(name).read_bytes(), type=kind)
