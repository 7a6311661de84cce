"""Simulation of a trace on a cluster: with given choices, a heuristic, or a clairvoyant router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keel.apps.serving.arrays import (
    Floats,
    Ints,
    Replicas,
    Requests,
    Telemetry,
    Weights,
    blank_view,
    idle_replicas,
    plan_of_replica,
)
from keel.apps.serving.cluster import Cluster
from keel.apps.serving.workload import Workload
from keel.data import read_beside
from keel.errors import InputError, check_choice

ROUTERS = read_beside(__file__, "routers.yaml", dict[str, str])
"""Routers with a description, in the order of their numbers in
`keel.apps.serving.kernels_route`."""
HEURISTICS = tuple(name for name in ROUTERS if name != "vidur-lor")
"""Routers that serve as baselines: all but the broken one."""


@dataclass(frozen=True)
class Conditions:
    """Conditions of a simulation: telemetry and failures."""

    interval: float = 0.0
    """seconds between the reports of a replica; 0: always up to date"""
    dropped: float = 0.0
    """share of reports that get lost"""
    known_speeds: bool = False
    """routers know the speeds of the replicas"""
    failures: tuple[tuple[float, int, bool], ...] = ()
    """time, replica, and whether it comes back"""

    def __post_init__(self) -> None:
        if not 0.0 <= self.interval < np.inf or not 0.0 <= self.dropped < 1.0:
            raise InputError("conditions: expected interval ≥ 0 and 0 ≤ dropped < 1")

    def failure_table(self) -> Floats:
        """Return the failures `[F, 3]` in the order of time: time, replica, and 1 for a return."""
        rows = [(when, float(r), float(back)) for when, r, back in sorted(self.failures)]
        return np.array(rows, dtype=np.float64).reshape(-1, 3)


@dataclass(frozen=True)
class SimulationResult:
    """State of all requests and replicas after a trace."""

    router: str
    requests: Requests
    replicas: Replicas


def telemetry_of(conditions: Conditions, workload: Workload, seed: int) -> Telemetry:
    """Return telemetry for the kernels; of output lengths routers know only the mean."""
    return Telemetry(
        float(conditions.interval),
        float(conditions.dropped),
        int(conditions.known_speeds),
        float(workload.output.mean()),
        seed,
    )


def replay(cluster: Cluster, workload: Workload, chosen: Sequence[int] | Ints) -> SimulationResult:
    """Simulate a trace with given choices of replicas.

    Args:
        cluster: R replicas.
        workload: N requests.
        chosen: Replica of each request, `[N]`.
    """
    from keel.apps.serving import kernels

    where = np.asarray(chosen, dtype=np.int64)
    if where.shape != (len(workload),) or not ((where >= 0) & (where < len(cluster))).all():
        raise InputError(
            f"replicas: expected one from 0 to {len(cluster) - 1} for each of {len(workload)} "
            "requests"
        )
    clock, plan = cluster.arrays()
    requests, replicas = workload.requests(), idle_replicas(plan, workload.universe)
    kernels.replay(where, clock, plan, requests, replicas)
    return SimulationResult("replay", requests, replicas)


def simulate(
    cluster: Cluster,
    workload: Workload,
    router: str,
    conditions: Conditions | None = None,
    seed: int = 0,
) -> SimulationResult:
    """Simulate a trace with a heuristic router.

    Args:
        cluster: The replicas.
        workload: The requests.
        router: A name of `ROUTERS`.
        conditions: Telemetry and failures; by default `Conditions()`.
        seed: Source of everything random.
    """
    from keel.apps.serving import kernels_route

    kind = list(ROUTERS).index(check_choice("router", router, ROUTERS))
    conditions = _checked(conditions, cluster)
    clock, plan = cluster.arrays()
    requests, universe = workload.requests(), workload.universe
    replicas, index = (idle_replicas(plan, universe) for _ in range(2))
    kernels_route.simulate(
        kind,
        clock,
        plan,
        telemetry_of(conditions, workload, seed),
        conditions.failure_table(),
        requests,
        replicas,
        index,
        blank_view(len(cluster)),
        np.array([seed], dtype=np.uint64),
    )
    return SimulationResult(router, requests, replicas)


def clairvoyant(
    cluster: Cluster,
    workload: Workload,
    conditions: Conditions | None = None,
    weights: Weights = Weights(),  # noqa: B008
) -> SimulationResult:
    """Simulate a trace with a router that knows all lengths, speeds and caches.

    It simulates the future of every choice. It does not know the requests that are still to come,
    so it is no bound in the strict sense.

    Args:
        cluster: The replicas.
        workload: The requests.
        conditions: Telemetry and failures; by default `Conditions()`.
        weights: Costs that it minimizes.
    """
    from keel.apps.serving import kernels_route

    conditions = _checked(conditions, cluster)
    clock, plan = cluster.arrays()
    singles = tuple(plan_of_replica(plan, r) for r in range(len(cluster)))
    requests, universe = workload.requests(), workload.universe
    replicas, index = (idle_replicas(plan, universe) for _ in range(2))
    spare = idle_replicas(plan_of_replica(plan, int(plan.cache.argmax())), universe)
    kernels_route.clairvoyant(
        weights,
        clock,
        plan,
        singles,
        requests,
        workload.requests(),
        replicas,
        spare,
        conditions.failure_table(),
        index,
    )
    return SimulationResult("clairvoyant", requests, replicas)


def _checked(conditions: Conditions | None, cluster: Cluster) -> Conditions:
    """Return the conditions, by default `Conditions()`; replicas that fail must exist."""
    conditions = conditions or Conditions()
    for when, replica, _ in conditions.failures:
        if not 0 <= replica < len(cluster) or not when >= 0.0:
            raise InputError(f"failures: there is no replica {replica} of {len(cluster)}")
    return conditions
