"""Walking an update back into the trust region."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from keel.errors import InputError

SAFETY = 0.98
"""Aim a little inside the bound, so that the next measurement usually ends the search."""
ENOUGH = 0.5
"""Share of the bound from which on a KL inside of it ends the search."""
STEEPEST = 8.0
"""Largest d log KL / d log fraction for which at least `ENOUGH` of the bound is found."""
MAX_EVALUATIONS = 20
INTERPOLATIONS = 2
"""Measurements that follow the slope between both sides of the bound; bisection follows them."""
SMALLEST = -700.0
"""log of the smallest fraction that is tried."""


class WalkBack(NamedTuple):
    """The share of a step that may be kept, per group: `[G]` each."""

    fraction: Tensor
    """Share of the step to take, from 1 (all of it) to 0 (none: roll back)."""
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
    """Return the share of each group's step whose *measured* KL is at most `bound`.

    The search runs in log KL over log fraction, where a KL that grows with any power of the
    fraction is a straight line: quadratic at first, as small steps are, then by the slope between
    two measurements, and by bisection where the line bends. It ends with a KL between half of the
    bound and all of it, in at most 8 measurements for KL ∝ fraction^p with 1 ≤ p ≤ 8 and in at most
    20 wherever d log KL / d log fraction ≤ 8. What is returned was measured, so a KL that jumps, is
    not monotone or not finite cannot break the promise; where nothing holds, nothing is kept.

    Args:
        kl_at: Maps fractions `[G]` to the KL of old + fraction·step, `[G]`; a group's KL depends on
            its own fraction only.
        bound: Largest KL that may be kept.
        groups: G.
        requested: `[G]`, the KL of the whole step, where it is known: saves a measurement.
    """
    if not bound > 0.0:
        raise InputError(f"bound: expected a positive KL, got {bound}")
    fraction = torch.ones(groups, dtype=torch.float64)
    evaluations = int(requested is None)
    requested = kl_at(fraction) if requested is None else requested
    searches = [_Search(kl, bound) for kl in requested.tolist()]
    while evaluations < MAX_EVALUATIONS and not all(search.done for search in searches):
        fraction = torch.tensor([search.propose() for search in searches], dtype=torch.float64)
        for search, kl in zip(searches, kl_at(fraction).tolist(), strict=True):
            search.record(kl)
        evaluations += 1
    best = torch.tensor([search.best for search in searches], dtype=torch.float64)
    return WalkBack(best[:, 0], best[:, 1], requested, evaluations)


class _Search:
    """The search of one group, in x = log fraction and y = log KL."""

    def __init__(self, requested: float, bound: float) -> None:
        self._bound, self._aim = bound, math.log(SAFETY * bound)
        self._x, self._step, self._interpolated = 0.0, 0.0, 0
        self._above, self._below = (0.0, math.inf), (-math.inf, -math.inf)
        self._slope = 2.0  # of a KL that is quadratic, as it is while steps are small
        self.best, self.done = (0.0, 0.0), False
        self.record(requested)

    def record(self, kl: float) -> None:
        """Take note of the KL at the fraction that was proposed last."""
        if self.done:
            return
        here = self._x, _log(kl)
        if not kl <= self._bound:  # NaN is above, too
            last, self._above = self._above, here
            if math.isfinite(last[1]) and math.isfinite(here[1]) and last[0] != here[0]:
                self._slope = (last[1] - here[1]) / (last[0] - here[0])
        else:
            self._below = here
            if kl >= self.best[1]:
                self.best = math.exp(self._x), kl
        narrow = self._above[0] - self._below[0] < math.log(1.0 / ENOUGH) / STEEPEST
        self.done = ENOUGH * self._bound <= kl <= self._bound or narrow or self._x <= SMALLEST
        if self._x == 0.0 and kl <= self._bound:
            self.best, self.done = (1.0, kl), True

    def propose(self) -> float:
        """Return the fraction to measure next; of a search that is done, its result."""
        if self.done:
            return self.best[0]
        self._x = max(SMALLEST, self._down() if self._below[0] == -math.inf else self._between())
        return math.exp(self._x)

    def _down(self) -> float:
        """Return a smaller x where all that was measured is above the bound."""
        x, y = self._above
        shortest, longest = 2.0 * self._step, max(10.0, 4.0 * abs(x))
        if math.isfinite(y) and self._slope > 0.0:
            step = min(max((y - self._aim) / self._slope, shortest), longest)
        else:
            step = max(math.log(2.0), shortest)
        self._step = min(max(step, 0.1), 10.0)
        return x - step

    def _between(self) -> float:
        """Return an x between one that is above the bound and one that is inside."""
        (high, above), (low, below) = self._above, self._below
        straight = math.isfinite(above) and math.isfinite(below)
        if straight and self._interpolated < INTERPOLATIONS:
            self._interpolated += 1
            return low + (high - low) * (self._aim - below) / (above - below)
        return 0.5 * (low + high)


def _log(kl: float) -> float:
    """Return log KL: −∞ for 0 or less, ∞ for what is not finite."""
    if not math.isfinite(kl):
        return math.inf
    return math.log(kl) if kl > 0.0 else -math.inf
