"""Keel's errors: one family, and every message says what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class KeelError(Exception):
    """Base class of everything that Keel raises on purpose."""

    @property
    def brief(self) -> str:
        """Message on one line, as the command line shows it."""
        return " ".join(str(self).split())


class InputError(KeelError, ValueError):
    """A value from outside (command line, file, argument) that cannot be used as it is."""


class ShapeError(InputError):
    """A tensor whose shape does not fit; the message names argument, expected and actual shape."""


class RunError(KeelError):
    """A run directory that cannot be used: taken, locked, read-only, vanished or damaged."""


class RunWarning(UserWarning):
    """Something of a run was lost (a metric line, a sink) while training goes on."""


class EstimatorWarning(UserWarning):
    """A KL estimator in a place where its gradient is not the gradient of the KL it claims."""


LIKENESS = 0.66
"""Share of letters in common from which on a name is a typo of another: klip and clip have 0.75,
nope and hopper 0.6."""


def similar(value: str, options: Iterable[str], limit: int = 1) -> list[str]:
    """Return the options that `value` may be a typo of, best first; upper case does not matter."""
    lowered = {option.lower(): option for option in options}
    matches = difflib.get_close_matches(value[:100].lower(), lowered, n=limit, cutoff=LIKENESS)
    return [lowered[name] for name in matches]


def check_choice(what: str, value: str, options: Iterable[str]) -> str:
    """Return `value` if it is one of `options`, else raise an `InputError` with a suggestion.

    Args:
        what: Name of the value in the error.
        value: Value to check.
        options: Allowed values.
    """
    choices = list(options)
    if value in choices:
        return value
    matches = similar(value, choices)
    hint = f"; did you mean {matches[0]!r}?" if matches else ""
    raise InputError(f"{what}: {value!r} is not one of {', '.join(choices)}{hint}")


def import_extra(module: str, extra: str) -> Any:
    """Import a module of an optional dependency, or say in one line how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f'{extra} is not installed: pip install "keel-rl[{extra}]"') from error


def expect_shape(name: str, tensor: Tensor, expected: tuple[int, ...], because: str) -> None:
    """Raise `ShapeError` unless `tensor` has exactly the `expected` shape."""
    if tuple(tensor.shape) != tuple(expected):
        raise ShapeError(
            f"{name}: expected shape {list(expected)} ({because}), got {list(tensor.shape)}"
        )


def expect_same(reference: str, shape: tuple[int, ...], **tensors: Tensor | None) -> None:
    """Raise `ShapeError` for the first tensor that is given and not shaped like `reference`."""
    for name, tensor in tensors.items():
        if tensor is not None:
            expect_shape(name, tensor, shape, f"that of {reference}")


def expect_rank(name: str, tensor: Tensor, at_least: int, layout: str) -> None:
    """Raise `ShapeError` unless `tensor` has `at_least` axes, laid out as `layout`."""
    if tensor.ndim < at_least:
        raise ShapeError(f"{name}: expected {layout}, got shape {list(tensor.shape)}")
