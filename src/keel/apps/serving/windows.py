"""Windows of a recorded trace, rescaled to a given load."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from keel.apps.serving import fields as f
from keel.apps.serving.cluster import equal_cluster
from keel.apps.serving.results import end_time
from keel.apps.serving.simulation import simulate
from keel.apps.serving.tables import closed_form
from keel.apps.serving.workload import Workload, load_workload, make_workload
from keel.errors import InputError

TRAINING = 0.7
"""Share of a trace, from its begin, that training takes its windows from; the rest is held out."""
SUSTAINABLE_SHARE = 0.39
"""Sustainable share of a replica's peak rate: two of five conversations a second."""
SAMPLE = 1_000


@lru_cache(maxsize=4)
def load_trace(path: str) -> Workload:
    """Load a trace; cached."""
    return load_workload(Path(path))


def window(
    path: str, count: int, rate: float, held_out: bool, rng: np.random.Generator
) -> Workload:
    """Draw a window of consecutive requests.

    Args:
        path: File of the trace.
        count: Number of requests.
        rate: Mean requests per second to rescale to.
        held_out: Draw from the held-out part of the trace.
        rng: Source of randomness.
    """
    trace = load_trace(path)
    border = int(TRAINING * len(trace))
    begin, end = (border, len(trace)) if held_out else (0, border)
    if end - begin < count:
        part = "held out" if held_out else "for training"
        raise InputError(f"{path}: {end - begin} requests are {part}, and a scene takes {count}")
    at = int(rng.integers(begin, end - count + 1))
    requests = trace.part(at, at + count)
    return requests.slower(requests.rate / rate) if requests.rate > 0.0 else requests


def most_prefixes(path: str, count: int) -> int:
    """Return the most prefix blocks of any window of `count` requests."""
    first = load_trace(path).first
    width = min(count, len(first) - 1)
    return int((first[width:] - first[: len(first) - width]).max(initial=0))


@lru_cache(maxsize=16)
def sustainable_rate(path: str, model: str) -> float:
    """Return the sustainable requests per second of one replica of speed 1 on a trace."""
    trace = load_trace(path)
    prompt, output = trace.prompt[:SAMPLE], trace.output[:SAMPLE]
    at_once = make_workload(np.zeros(len(prompt)), prompt, output)
    result = simulate(equal_cluster(closed_form(model), 1), at_once, "round-robin")
    if (result.requests.ints[f.Q_LOST] != 0).all():
        raise InputError(f"{path}: a replica of {model} has memory for none of its requests")
    return SUSTAINABLE_SHARE * len(at_once) / end_time(result)
