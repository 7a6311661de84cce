"""What a learned router sees: of every replica the same numbers, and of the request a few."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from keel.keys import MASK

REPLICA = (
    "outstanding",
    "running",
    "work",
    "memory",
    "pace",
    "hit",
    "to_read",
    "sent",
    "age",
    "delay",
    "until_read",
)
"""Columns of the matrix `replicas` `[R, 11]`; counts, tokens and seconds as logarithms.

`outstanding`: waiting, running, and sent since the report. `work`: tokens to read. `pace`: of an
iteration of decoding, over 20 ms; of one that has told none, what the others' is like. `hit`: share
of this prompt that is probably cached. `to_read`: what is left of it. `age`: of the report.
`delay`: outstanding requests times the pace. `until_read`: all tokens to read, this prompt's
included, times the pace.

What a request costs at a replica depends on nobody else, so nothing here is measured by the others:
the fastest of sixteen is farther from the mean than any of four, and a policy that was trained with
four would not know it.
"""
REQUEST = ("prompt", "mean_outstanding")
"""The vector `request` `[2]`."""
UNKNOWN_PACE = math.log(0.02)
"""Of decoding, before any replica has told its own."""
PACE_DOWN, PACE_UP = 0.8, 0.99
"""What is kept of a replica's pace when the next token came faster, or later. It falls at once and
rises slowly: tokens that waited for somebody's prompt say little about how fast a replica is, but
one that does nothing but read must not look as fast as it was when it was idle."""


def local_count(obs: Mapping[str, NDArray[np.float32]]) -> int:
    """A router to imitate: fewest outstanding, of those that are up.

    Recorded by `--policy keel.apps.serving.observations:local_count` of `keel demos record`.
    """
    return _least(obs["replicas"][:, REPLICA.index("outstanding")], obs)


def least_delay(obs: Mapping[str, NDArray[np.float32]]) -> int:
    """The same, times how long a token takes there."""
    return _least(obs["replicas"][:, REPLICA.index("delay")], obs)


def _least(score: NDArray[np.float32], obs: Mapping[str, NDArray[np.float32]]) -> int:
    return int(np.where(obs[MASK], score, np.inf).argmin())


def follow(pace: float, gap: float) -> float:
    """The pace after another token, `gap` seconds after the last; 0: none is known yet."""
    if pace == 0.0:
        return gap
    kept = PACE_DOWN if gap < pace else PACE_UP
    return kept * pace + (1.0 - kept) * gap
