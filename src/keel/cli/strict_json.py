"""JSON on stdout for `--json`: strict, so that every parser can read it."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any


def print_json(data: object) -> None:
    """Print one JSON object on one line; NaN and infinities become null.

    Args:
        data: Dictionaries, lists, dataclasses, numbers and words.
    """
    print(json.dumps(strict(data), allow_nan=False))  # noqa: T201


def strict(value: Any) -> Any:
    """Return the same data without what strict JSON cannot hold: NaN and infinities become None.

    Args:
        value: Dictionaries, lists, tuples, dataclasses, numbers and words.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return strict(dataclasses.asdict(value))
    return value
