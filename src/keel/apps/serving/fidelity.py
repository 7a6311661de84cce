"""Comparison with another simulator: replay of its results, request by request."""

from __future__ import annotations

import csv
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from keel.apps.serving import fields as f
from keel.apps.serving.arrays import Floats
from keel.apps.serving.cluster import equal_cluster
from keel.apps.serving.results import latencies
from keel.apps.serving.simulation import replay
from keel.apps.serving.tables import Tables
from keel.apps.serving.workload import load_workload
from keel.errors import InputError

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "replica", "ttft_s", "e2e_s", "restarts")


@dataclass(frozen=True)
class Fidelity:
    """Differences from one file of results."""

    requests: int
    replicas: int
    max_relative_error: float
    """larger of the two errors below"""
    ttft_error: float
    """largest error of any request, relative to the other simulator's latency"""
    end_to_end_error: float
    restarts: int
    restarts_differ: int
    """requests with a different number of restarts"""
    requests_per_second: float
    """simulated requests per second, best of five after compilation"""

    def to_dict(self) -> dict[str, object]:
        """Return the comparison as plain data for JSON."""
        return asdict(self)


def compare(results: Path, tables: Tables) -> Fidelity:
    """Replay the routing choices of another simulator and compare the latencies.

    Args:
        results: CSV file with the columns `COLUMNS`.
        tables: Iteration times that the results were made with.
    """
    workload = load_workload(results)
    with results.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    missing = [name for name in COLUMNS if name not in rows[0]]
    if missing:
        raise InputError(f"{results}: has no column {', '.join(missing)}")

    def column(name: str) -> Floats:
        try:
            return np.array([float(row[name]) for row in rows])
        except (TypeError, ValueError):
            raise InputError(f"{results}: {name} holds something that is no number") from None

    arrival = column("arrival_s")
    if (np.diff(arrival) < 0).any():
        raise InputError(f"{results}: expected requests in the order of their arrival")
    chosen = column("replica").astype(np.int64)
    if chosen.min() < 0 or chosen.max() >= 1_000:
        raise InputError(f"{results}: expected replicas from 0 on, got {chosen.min()}")
    cluster = equal_cluster(tables, int(chosen.max()) + 1)
    workload = replace(workload, arrival=arrival)  # loaders begin at 0, these do not
    result = replay(cluster, workload, chosen)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        result = replay(cluster, workload, chosen)
        seconds.append(time.perf_counter() - begin)
    ttft, _, end_to_end = latencies(result)
    errors = [
        float(np.abs(own / column(name) - 1.0).max())
        for own, name in ((ttft, "ttft_s"), (end_to_end, "e2e_s"))
    ]
    restarts = result.requests.ints[f.Q_RESTARTS]
    return Fidelity(
        requests=len(workload),
        replicas=len(cluster),
        max_relative_error=max(errors),
        ttft_error=errors[0],
        end_to_end_error=errors[1],
        restarts=int(restarts.sum()),
        restarts_differ=int((restarts != column("restarts")).sum()),
        requests_per_second=len(workload) / min(seconds),
    )
