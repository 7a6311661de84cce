"""Plain data as strict JSON, exactly: what comes back equals what went in, infinities included."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from keel.errors import InputError

_FLOAT = "__float__"
"""JSON knows no NaN or infinity: {"__float__": "-inf"}."""


def dump(data: Mapping[str, Any], where: str = "data") -> bytes:
    """Return strict JSON of `data`; an `InputError` names what would not come back as it is.

    Only tuples change: they become lists.
    """
    text = json.dumps(_encode(data, where), indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def load(data: bytes) -> dict[str, Any]:
    """Parse what `dump` wrote; a `ValueError` if it is not strict JSON of an object."""
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
