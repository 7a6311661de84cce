"""A trace through a cluster: by given choices, by a router, or by one who knows the future."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keel.apps.serving.arrays import (
    Floats,
    Ints,
    Plan,
    Replicas,
    Requests,
    Telemetry,
    Weights,
    blank_view,
    idle_replicas,
)
from keel.apps.serving.cluster import Cluster
from keel.apps.serving.workload import Workload
from keel.errors import InputError, check_choice

ROUTERS = {
    "random": "any replica",
    "round-robin": "one after the other",
    "least-outstanding": "fewest requests waiting or running, as reported; ties at random",
    "least-by-speed": "fewest outstanding, what was sent since the report included, divided by "
    "speed: told, or guessed from the pace of decoding",
    "power-of-two": "the better of two at random",
    "token-work": "fewest tokens to read and to write",
    "local-count": "least outstanding, and what was sent since the report",
    "sticky": "where most of the prompt is cached, then fewest outstanding",
    "cache-work": "fewest tokens to read and to write, cached ones not counted",
    "cache-work-by-speed": "the same, divided by speed",
    "vidur-lor": "BROKEN: Vidur's least outstanding, which counts waiting requests only and "
    "sends ties to the first replica",
}
"""In the order of their numbers in `keel.apps.serving.kernels_route`."""
HONEST = tuple(name for name in ROUTERS if name != "vidur-lor")
"""Baselines to be beaten."""


@dataclass(frozen=True)
class Conditions:
    """What a router does not choose."""

    interval: float = 0.0
    """seconds between the reports of a replica; 0: always up to date"""
    dropped: float = 0.0
    """share of reports that get lost"""
    known_speeds: bool = False
    """routers are told how fast replicas are"""
    failures: tuple[tuple[float, int, bool], ...] = ()
    """when, which replica, and whether it comes back"""

    def __post_init__(self) -> None:
        if not 0.0 <= self.interval < np.inf or not 0.0 <= self.dropped < 1.0:
            raise InputError("conditions: expected interval ≥ 0 and 0 ≤ dropped < 1")

    def strikes(self) -> Floats:
        """Failures `[F, 3]`, in their order."""
        found = [(when, float(r), float(back)) for when, r, back in sorted(self.failures)]
        return np.array(found, dtype=np.float64).reshape(-1, 3)


@dataclass(frozen=True)
class Trace:
    """A trace that went through a cluster."""

    router: str
    requests: Requests
    replicas: Replicas


def telemetry_of(conditions: Conditions, workload: Workload, seed: int) -> Telemetry:
    """As the loops take it; routers know the mean length of outputs, and no more."""
    return Telemetry(
        float(conditions.interval),
        float(conditions.dropped),
        int(conditions.known_speeds),
        float(workload.output.mean()),
        seed,
    )


def replay(cluster: Cluster, workload: Workload, chosen: Sequence[int] | Ints) -> Trace:
    """Send every request to the replica that was chosen for it."""
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
    return Trace("replay", requests, replicas)


def simulate(
    cluster: Cluster,
    workload: Workload,
    router: str,
    conditions: Conditions | None = None,
    seed: int = 0,
) -> Trace:
    """Let a router choose; everything random is drawn from `seed`."""
    from keel.apps.serving import kernels_route

    kind = list(ROUTERS).index(check_choice("router", router, ROUTERS))
    conditions = conditions or Conditions()
    _check_failures(conditions, cluster)
    clock, plan = cluster.arrays()
    requests, universe = workload.requests(), workload.universe
    replicas, index = (idle_replicas(plan, universe) for _ in range(2))
    kernels_route.simulate(
        kind,
        clock,
        plan,
        telemetry_of(conditions, workload, seed),
        conditions.strikes(),
        requests,
        replicas,
        index,
        blank_view(len(cluster)),
        np.array([seed], dtype=np.uint64),
    )
    return Trace(router, requests, replicas)


def clairvoyant(
    cluster: Cluster,
    workload: Workload,
    conditions: Conditions | None = None,
    weights: Weights = Weights(),  # noqa: B008
) -> Trace:
    """The choices of one who knows all lengths, speeds and caches, and plays every future.

    What it does not know are the requests that are still to come, so it is no bound in the strict
    sense. `weights` says what it plays for.
    """
    from keel.apps.serving import kernels_route

    conditions = conditions or Conditions()
    _check_failures(conditions, cluster)
    clock, plan = cluster.arrays()
    singles = tuple(_alone(plan, r) for r in range(len(cluster)))
    requests, universe = workload.requests(), workload.universe
    replicas, index = (idle_replicas(plan, universe) for _ in range(2))
    spare = idle_replicas(_alone(plan, int(plan.cache.argmax())), universe)
    kernels_route.foresee(
        weights,
        clock,
        plan,
        singles,
        requests,
        workload.requests(),
        replicas,
        spare,
        conditions.strikes(),
        index,
    )
    return Trace("clairvoyant", requests, replicas)


def _alone(plan: Plan, r: int) -> Plan:
    """The plan of one replica."""
    own = {
        name: getattr(plan, name)[r : r + 1].copy()
        for name in ("kind", "speed", "blocks", "watermark", "cache")
    }
    return plan._replace(**own)


def _check_failures(conditions: Conditions, cluster: Cluster) -> None:
    for when, replica, _ in conditions.failures:
        if not 0 <= replica < len(cluster) or not when >= 0.0:
            raise InputError(f"failures: there is no replica {replica} of {len(cluster)}")
