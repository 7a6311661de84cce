"""Note 002's milestones: the steps to the first point, and to a mean of 10, 50 and 100."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

MILESTONES = {"first point": 0.0, "mean 10": 10.0, "mean 50": 50.0, "mean 100": 100.0}
"""What the mean return of the last hundred games must reach; for the first point, exceed."""


class Milestone(NamedTuple):
    """When a run got there; NaN if it did not."""

    name: str
    steps: float


def milestones(steps: Sequence[float], returns: Sequence[float]) -> list[Milestone]:
    """The steps at which the training return first reached each of `MILESTONES`."""
    found = []
    for name, score in MILESTONES.items():
        passed = (
            step
            for step, value in zip(steps, returns, strict=True)
            if (value > score if score == 0.0 else value >= score)
        )
        found.append(Milestone(name, next(passed, math.nan)))
    return found
