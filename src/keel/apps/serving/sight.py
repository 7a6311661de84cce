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
    "pace_known",
    "hit",
    "to_read",
    "sent",
    "age",
    "delay",
    "relative_pace",
    "until_read",
)
"""Columns of the matrix `replicas` `[R, 13]`; counts, tokens and seconds as logarithms.

`outstanding`: waiting, running, and sent since the report. `work`: tokens to read. `pace`: of an
iteration of decoding. `hit`: share of this prompt that is probably cached. `to_read`: what is left
of it. `age`: of the report. `relative_pace`: over the fastest's; `delay`: outstanding requests
times that; `until_read`: all tokens to read, this prompt's included, times that.

They are measured by the fastest replica and not by the mean one: among sixteen the fastest is much
faster than the mean, which nobody sees who is trained with four.
"""
REQUEST = ("prompt", "mean_outstanding")
"""The vector `request` `[2]`."""
UNKNOWN_PACE = math.log(0.02)
"""Of decoding, before any replica has told its own."""


def local_count(obs: Mapping[str, NDArray[np.float32]]) -> int:
    """A router to imitate: fewest outstanding, of those that are up.

    `keel demos record serving --policy keel.apps.serving.sight:local_count --out DIR` records it.
    """
    return _least(obs["replicas"][:, REPLICA.index("outstanding")], obs)


def least_delay(obs: Mapping[str, NDArray[np.float32]]) -> int:
    """The same, times how long a token takes there."""
    return _least(obs["replicas"][:, REPLICA.index("delay")], obs)


def _least(score: NDArray[np.float32], obs: Mapping[str, NDArray[np.float32]]) -> int:
    return int(np.where(obs[MASK], score, np.inf).argmin())
