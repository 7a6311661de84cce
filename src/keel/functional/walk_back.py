"""Walking an update back into the trust region."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from keel.errors import InputError

SAFETY = 0.98
"""Aim a little inside the bound, so that the next measurement usually ends the search."""
NEWTON_STEPS = 3
BISECTIONS = 20


class WalkBack(NamedTuple):
    """How much of a step may be kept."""

    fraction: float
    """of the step, from 1 (all of it) to 0 (none: roll back)"""
    kl: float
    """measured at `fraction`; 0 after a roll-back"""
    requested: float
    """the KL of the whole step"""
    evaluations: int


def walk_back(kl_at: Callable[[float], float], bound: float) -> WalkBack:
    """The share of a step whose *measured* KL is at most `bound`.

    `kl_at(fraction)` measures the KL of old + fraction·step. Along a step the KL is nearly
    quadratic, so fraction ← fraction·√(bound/KL) lands almost at once; bisection follows where it
    does not, and 0 where nothing holds. What is returned was measured, so a KL that is not monotone
    (or not finite) cannot break the promise.
    """
    if not bound > 0.0:
        raise InputError(f"bound: expected a positive KL, got {bound}")
    requested = kl_at(1.0)
    if requested <= bound:
        return WalkBack(1.0, requested, requested, 1)
    fraction, kl, evaluations = 1.0, requested, 1
    for _ in range(NEWTON_STEPS):
        if not math.isfinite(kl):
            break
        fraction *= math.sqrt(SAFETY * bound / kl)
        kl = kl_at(fraction)
        evaluations += 1
        if kl <= bound:
            return WalkBack(fraction, kl, requested, evaluations)
    for _ in range(BISECTIONS):
        fraction *= 0.5
        kl = kl_at(fraction)
        evaluations += 1
        if kl <= bound:
            return WalkBack(fraction, kl, requested, evaluations)
    return WalkBack(0.0, 0.0, requested, evaluations)
