"""Shape checks that name the argument, so that a broadcast never hides a mistake."""

from __future__ import annotations

from torch import Tensor

from keel.errors import ShapeError


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
