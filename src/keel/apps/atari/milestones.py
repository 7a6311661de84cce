"""Milestones of Breakout: the steps to the first point, and to a mean of 10, 50 and 100."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

MILESTONES = {"first point": 0.0, "mean 10": 10.0, "mean 50": 50.0, "mean 100": 100.0}
"""Mean return of the last hundred games to reach; for the first point, to exceed."""


class Milestone(NamedTuple):
    """Steps at which a run reached a milestone; NaN if it did not."""

    name: str
    steps: float


def milestones(steps: Sequence[float], returns: Sequence[float]) -> list[Milestone]:
    """Return the steps at which the training return first reached each of `MILESTONES`.

    Args:
        steps: Environment steps, `[N]`.
        returns: Mean return of the last hundred games at these steps, `[N]`.
    """
    reached = []
    for name, score in MILESTONES.items():
        passed = (
            step
            for step, value in zip(steps, returns, strict=True)
            if (value > score if score == 0.0 else value >= score)
        )
        reached.append(Milestone(name, next(passed, math.nan)))
    return reached
