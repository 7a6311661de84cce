"""What a learned router sees: of every replica the same numbers, and of the request a few."""

from __future__ import annotations

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
)
"""Columns of the matrix `replicas` `[R, 12]`; counts, tokens and seconds as logarithms.

`outstanding`: waiting, running, and sent since the report. `work`: tokens to read. `pace`: of an
iteration of decoding. `hit`: share of this prompt that is probably cached. `to_read`: what is left
of it. `age`: of the report. `delay`: outstanding requests times the pace, over all that are known.
"""
REQUEST = ("prompt", "replicas", "mean_outstanding")
"""The vector `request` `[3]`."""
