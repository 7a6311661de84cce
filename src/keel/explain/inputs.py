"""Reading distributions and lists of numbers that a person typed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from keel.errors import InputError

SUM_TOLERANCE = 1e-6


def parse_numbers(name: str, text: str) -> list[float]:
    """Parse `0.8,0.2` or `1/6, 1/6, …` as finite numbers."""
    if not text.strip():
        raise InputError(f"{name}: empty; expected numbers separated by commas, such as 0.8,0.2")
    return [_parse_number(name, part.strip()) for part in text.split(",")]


def _parse_number(name: str, text: str) -> float:
    try:
        value = float(Fraction(text)) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError):
        raise InputError(
            f"{name}: {text!r} is not a number; expected numbers separated by commas"
        ) from None
    if not math.isfinite(value):
        raise InputError(f"{name}: {text!r} is not finite")
    return value


def check_probabilities(name: str, values: Sequence[float]) -> None:
    """Raise unless `values` are a distribution: at least one, none negative, a sum of 1."""
    if not values:
        raise InputError(f"{name}: empty; a distribution needs at least one outcome")
    for value in values:
        if not math.isfinite(value) or value < 0.0:
            raise InputError(f"{name}: {value:g} is not a probability; none may be below 0")
    total = math.fsum(values)
    if abs(total - 1.0) > SUM_TOLERANCE:
        raise InputError(
            f"{name}: the probabilities sum to {total:.6g}, not 1 "
            f"({' + '.join(f'{value:g}' for value in values)})"
        )


def check_distributions(p_name: str, p: Sequence[float], q_name: str, q: Sequence[float]) -> None:
    """Raise unless both are distributions over the same number of outcomes."""
    check_probabilities(p_name, p)
    check_probabilities(q_name, q)
    check_same_length(p_name, p, q_name, q)


def check_same_length(a_name: str, a: Sequence[float], b_name: str, b: Sequence[float]) -> None:
    """Raise unless both have the same number of outcomes."""
    if len(a) != len(b):
        raise InputError(
            f"{a_name} and {b_name} differ in length: {len(a)} and {len(b)} outcomes; "
            "they must speak of the same outcomes"
        )


def check_names(names: Sequence[str] | None, outcomes: int, kind: str = "outcomes") -> list[str]:
    """Return the outcomes' names; a, b, c … where none are given."""
    if names is None:
        letters = "abcdefghijklmnopqrstuvwxyz"
        return [letters[i] if outcomes <= 26 else str(i + 1) for i in range(outcomes)]
    if len(names) != outcomes:
        raise InputError(f"names: got {len(names)} names for {outcomes} {kind}")
    return [name.strip() for name in names]


def check_mask(name: str, mask: Sequence[float] | None, kind: str, length: int) -> list[bool]:
    """Return a mask of ones and zeros as bools, all True where none is given.

    Args:
        name: The mask as the user knows it, for error messages.
        mask: 1 for an element that counts, 0 for one that does not `[length]`.
        kind: What is masked, for error messages.
        length: Number of elements.

    Raises:
        InputError: It has another length, another number, or leaves nothing.
    """
    if mask is None:
        return [True] * length
    if len(mask) != length:
        raise InputError(f"{name}: got {len(mask)} numbers for {length} {kind}")
    for value in mask:
        if value not in (0.0, 1.0):
            raise InputError(f"{name}: {value:g} is neither 1 (counts) nor 0 (does not count)")
    if not any(mask):
        raise InputError(f"{name}: all 0; at least one of the {kind} must count")
    return [bool(value) for value in mask]


def check_positive(name: str, value: float) -> None:
    """Raise unless `value` is a finite number above 0."""
    if not (math.isfinite(value) and value > 0.0):
        raise InputError(f"{name}: expected a number above 0, got {value:g}")


def check_finite(**values: float) -> None:
    """Raise for the first value that is not a finite number."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise InputError(f"{name}: expected a finite number, got {value:g}")


def parse_gaussian(name: str, text: str) -> tuple[float, float]:
    """Parse `MU,SIGMA` with SIGMA > 0."""
    values = parse_numbers(name, text)
    if len(values) != 2:
        raise InputError(f"{name}: expected MU,SIGMA, got {len(values)} numbers in {text!r}")
    check_positive(f"{name} sigma", values[1])
    return values[0], values[1]
