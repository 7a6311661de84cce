"""Observations of a learned router: the same features of every replica, and of the request."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from keel.types import MASK

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

`outstanding`: waiting, running, and sent since the report. `work`: tokens to read. `pace`: seconds
of a decoding iteration, over 20 ms; the mean of the others where it is not known. `hit`: share of
this prompt that is probably cached. `to_read`: tokens of it that are left. `age`: of the report.
`delay`: outstanding requests times the pace. `until_read`: all tokens to read, this prompt's
included, times the pace.

The cost of a request at a replica does not depend on the other replicas, so no feature is relative
to them: the fastest of sixteen is farther from the mean than any of four, outside of what a policy
trained with four has seen.
"""
REQUEST = ("prompt", "mean_outstanding")
"""Entries of the vector `request` `[2]`."""
UNKNOWN_PACE = math.log(0.02)
"""Log seconds of a decoding iteration before any replica has reported its own."""
PACE_DOWN, PACE_UP = 0.8, 0.99
"""Decay of a replica's moving average of pace when the next token came faster, or later. It falls
at once and rises slowly: tokens that waited for another prompt say little about the speed of a
replica, but one that only reads must not look as fast as when it was idle."""


def local_count(obs: Mapping[str, NDArray[np.float32]]) -> int:
    """Choose the replica with the fewest outstanding requests: a router to imitate.

    Recorded by `--policy keel.apps.serving.observations:local_count` of `keel demos record`.
    """
    outstanding = obs["replicas"][:, REPLICA.index("outstanding")]
    return int(np.where(obs[MASK], outstanding, np.inf).argmin())


def update_pace(pace: float, gap: float) -> float:
    """Return the pace after another token, `gap` seconds after the last; 0: not known yet."""
    if pace == 0.0:
        return gap
    decay = PACE_DOWN if gap < pace else PACE_UP
    return decay * pace + (1.0 - decay) * gap
