"""Walking an update back into the trust region."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from keel.errors import InputError

SAFETY = 0.98
"""Aim a little inside the bound, so that the next measurement usually ends the search."""
NEWTON_STEPS = 3
BISECTIONS = 20


class WalkBack(NamedTuple):
    """How much of a step may be kept, per group: `[G]` each."""

    fraction: Tensor
    """of the step, from 1 (all of it) to 0 (none: roll back)"""
    kl: Tensor
    """measured at `fraction`; 0 after a roll-back"""
    requested: Tensor
    """the KL of the whole step"""
    evaluations: int


def walk_back(
    kl_at: Callable[[Tensor], Tensor],
    bound: float,
    groups: int = 1,
    *,
    requested: Tensor | None = None,
) -> WalkBack:
    """The share of each group's step whose *measured* KL is at most `bound`.

    `kl_at(fraction)` maps `[G]` to `[G]`: the KL of old + fraction·step, where a group's KL depends
    on its own fraction only. Along a step the KL is nearly quadratic, so
    fraction ← fraction·√(bound/KL) lands almost at once; halving follows where it does not, and 0
    where nothing holds. What is returned was measured, so a KL that is not monotone (or not finite)
    cannot break the promise. The KL of the whole step, where it is known, may be given as
    `requested`, which saves a measurement.
    """
    if not bound > 0.0:
        raise InputError(f"bound: expected a positive KL, got {bound}")
    fraction = torch.ones(groups, dtype=torch.float64)
    evaluations = int(requested is None)
    requested = kl = kl_at(fraction) if requested is None else requested
    for attempt in range(NEWTON_STEPS + BISECTIONS):
        over = ~(kl <= bound)  # a KL that is NaN is over, too
        if not over.any():
            return WalkBack(fraction, kl, requested, evaluations)
        quadratic = attempt < NEWTON_STEPS
        guess = torch.sqrt(SAFETY * bound / kl).clamp(max=0.99)
        shrink = torch.where(torch.isfinite(kl) & quadratic, guess, 0.5)
        fraction = torch.where(over, fraction * shrink, fraction)
        kl = kl_at(fraction)
        evaluations += 1
    over = ~(kl <= bound)
    zero = torch.zeros_like(kl)
    return WalkBack(
        torch.where(over, 0.0, fraction), torch.where(over, zero, kl), requested, evaluations
    )
