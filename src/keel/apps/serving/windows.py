"""Parts of a recorded trace, at a load that is asked for."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from keel.apps.serving import fields as f
from keel.apps.serving.cluster import equal_cluster
from keel.apps.serving.results import last_moment
from keel.apps.serving.simulation import simulate
from keel.apps.serving.tables import closed_form
from keel.apps.serving.workload import Workload, load_workload, make_workload
from keel.errors import InputError

TRAINING = 0.7
"""Share of a trace, from its begin, that training takes its windows from; the rest is held out."""
WELL = 0.39
"""Of what a replica can do at most, what it does well: two of five conversations a second."""
SAMPLE = 1_000


@lru_cache(maxsize=4)
def trace(path: str) -> Workload:
    """Read once."""
    return load_workload(Path(path))


def window(
    path: str, count: int, rate: float, held_out: bool, rng: np.random.Generator
) -> Workload:
    """`count` requests that follow each other, from anywhere in its part of the trace, `rate` a
    second on average."""
    whole = trace(path)
    border = int(TRAINING * len(whole))
    begin, end = (border, len(whole)) if held_out else (0, border)
    if end - begin < count:
        part = "held out" if held_out else "for training"
        raise InputError(f"{path}: {end - begin} requests are {part}, and a scene takes {count}")
    at = int(rng.integers(begin, end - count + 1))
    found = whole.part(at, at + count)
    return found.slower(found.rate / rate) if found.rate > 0.0 else found


def most_prefixes(path: str, count: int) -> int:
    """Prefix blocks of any window, at most."""
    first = trace(path).first
    width = min(count, len(first) - 1)
    return int((first[width:] - first[: len(first) - width]).max(initial=0))


@lru_cache(maxsize=16)
def served_well(path: str, model: str) -> float:
    """Requests a second that one replica of speed 1 serves well, by their lengths."""
    some = trace(path)
    prompt, output = some.prompt[:SAMPLE], some.output[:SAMPLE]
    at_once = make_workload(np.zeros(len(prompt)), prompt, output)
    played = simulate(equal_cluster(closed_form(model), 1), at_once, "round-robin")
    if (played.requests.ints[f.Q_LOST] != 0).all():
        raise InputError(f"{path}: a replica of {model} has memory for none of its requests")
    return WELL * len(at_once) / last_moment(played)
