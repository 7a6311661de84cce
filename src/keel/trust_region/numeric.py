"""Errors that stop an update: numbers that are not finite, with the rows that gave them."""

from __future__ import annotations

from torch import Tensor

from keel.errors import KeelError
from keel.types import Tree

BAD_STEPS = 10
"""So many steps of one update may be skipped for a gradient that is not finite."""


class NumericError(KeelError):
    """The loss or the gradients are not finite; `tensors` hold the minibatch and the parameters."""

    def __init__(self, message: str, tensors: Tree) -> None:
        super().__init__(message)
        self.tensors = tensors


def not_finite(what: str, skipped: int, params: Tensor, minibatch: Tree) -> NumericError:
    """Return the error of a step that was skipped; it names the columns that are to blame."""
    wrong = [name for name, x in minibatch.items() if not x.isfinite().all()]
    cause = f"not finite in the minibatch: {', '.join(wrong)}" if wrong else "the minibatch is fine"
    large = max((x.abs().max().item(), name) for name, x in minibatch.items() if x.numel())
    return NumericError(
        f"{what} is not finite (steps skipped, none applied: {skipped}); {cause}; "
        f"its largest number is {large[0]:.3g} ({large[1]}), the largest parameter "
        f"{params.abs().max().item():.3g}. Usual causes: rewards or observations of great size "
        "(normalize them), a learning rate that is too high",
        {**minibatch, "params": params},
    )
