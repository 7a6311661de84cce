"""Vectorized clusters in one set of arrays, with one routing decision at a time in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from keel.apps.serving import fields as f
from keel.apps.serving.arrays import (
    PER_REPLICA,
    Clock,
    Floats,
    Ints,
    Replicas,
    Requests,
    Telemetry,
    View,
    Weights,
    blank_view,
    idle_replicas,
    plan_of_replica,
)
from keel.apps.serving.observations import REPLICA, REQUEST
from keel.apps.serving.settings import PREFIX_BLOCK, Scenario, Setting, draw_scenario
from keel.apps.serving.simulation import SimulationResult, telemetry_of
from keel.apps.serving.windows import most_prefixes
from keel.resources import parallel_map

MIN_PARALLEL = 16
"""Number of clusters from which on a second thread pays off."""
FAILURES = 2
"""Most failure events of a scenario: a replica fails, and comes back."""
PREFIXES = 64
"""Prefix blocks of the longest prompt."""


class VectorClusters:
    """Clusters of one setting, each at the arrival of a request that is not sent yet.

    Args:
        setting: Distribution of clusters and traces.
        count: Number of clusters, C.
        weights: Costs of a second and of a lost request.
    """

    def __init__(
        self,
        setting: Setting,
        count: int,
        weights: Weights = Weights(),  # noqa: B008
    ) -> None:
        self.weights, self.setting, self.count, self.all = weights, setting, count, np.arange(count)
        example = draw_scenario(replace(setting, fewest=None), 0)
        self.clock: Clock
        self.clock, plan = example.cluster.arrays()
        size, block = setting.requests, example.workload.prefix_block
        max_blocks = _max_prefix_blocks(setting)
        max_cache = int(np.ceil(setting.cache[1])) * PREFIX_BLOCK // block
        largest = plan._replace(cache=np.full(setting.replicas, max_cache))
        self.plan = _stack(plan, count)
        self.requests = _stack(_blank_requests(size, max_blocks, block), count)
        self.future = _stack(_blank_requests(size, max_blocks, block), count)
        idle = idle_replicas(largest, max_blocks)
        self.replicas, self.index = _stack(idle, count), _stack(idle, count)
        self.spare = _stack(idle_replicas(plan_of_replica(largest, 0), max_blocks), count)
        self.view: View = _stack(blank_view(setting.replicas), count)
        self.telemetry = _stack(_on_time(), count)
        self.failures = np.full((count, FAILURES, 3), np.inf)
        self.next_failure = np.zeros(count, np.int64)
        self.dice = np.zeros((count, 1), np.uint64)
        self.at = np.zeros(count, np.int64)
        self.sizes = np.full(count, setting.replicas)
        self._idle = idle
        self.observations = (
            np.zeros((count, setting.replicas, len(REPLICA)), np.float32),
            np.zeros((count, len(REQUEST)), np.float32),
            np.ones((count, setting.replicas), bool),
        )

    def begin(self, cluster: int, scenario: Scenario, seed: int) -> None:
        """Start a new trace in a new cluster.

        Args:
            cluster: Index of the cluster.
            scenario: The cluster and its trace.
            seed: Seed of lost reports and random choices.
        """
        c, workload = cluster, scenario.workload
        _, plan = scenario.cluster.arrays()
        size = self.sizes[c] = len(scenario.cluster)
        for name in PER_REPLICA:
            getattr(self.plan, name)[c, :size] = getattr(plan, name)
        fresh = workload.requests()
        for batch in (self.requests, self.future):
            batch.ints[c], batch.times[c], batch.first[c] = fresh.ints, fresh.times, fresh.first
            batch.hashes[c, : len(workload.hashes)] = workload.hashes
        for batch in (self.replicas, self.index):
            for own, idle in zip(batch, self._idle, strict=True):
                own[c] = idle
            batch.ints[c, f.R_FREE, :size], batch.ints[c, f.R_ROOM, :size] = plan.blocks, plan.cache
            batch.ints[c, f.R_UP, size:] = 0  # unused places
            batch.ints[c, f.R_NAMES] = workload.universe
        for own, blank in zip(self.view, blank_view(self.setting.replicas), strict=True):
            own[c] = blank
        for name, value in telemetry_of(scenario.conditions, workload, seed)._asdict().items():
            getattr(self.telemetry, name)[c] = value
        self.failures[c], failure_table = np.inf, scenario.conditions.failure_table()
        self.failures[c, : len(failure_table)] = failure_table
        self.dice[c], self.at[c], self.next_failure[c] = seed, 0, 0

    def observe(self, clusters: Ints) -> None:
        """Advance clusters to the arrival of the request at hand, and write `observations`."""
        from keel.apps.serving.kernels_vector import observe_clusters

        self._in_parallel(lambda part: observe_clusters(part, *self._kernel_arguments()), clusters)

    def step(self, action: Ints) -> Floats:
        """Send the requests at hand, and observe the next ones.

        Args:
            action: Chosen replicas, `[C]`.

        Returns:
            Costs of all requests until then, `[C]`; after the last request until all have ended,
            and the cluster waits for a new trace.
        """
        from keel.apps.serving.kernels_vector import step_clusters

        cost, arguments = np.zeros(self.count), self._kernel_arguments()
        self._in_parallel(
            lambda part: step_clusters(part, action, self.weights, cost, *arguments), self.all
        )
        return cost

    def _kernel_arguments(self) -> tuple[Any, ...]:
        return (
            self.at, self.clock, self.plan, self.telemetry, self.failures, self.next_failure,
            self.requests, self.replicas, self.index, self.view, self.observations,
        )  # fmt: skip

    def counterfactual_costs(self) -> Floats:
        """Return the cost of each choice to all requests, `[C, R]`."""
        from keel.apps.serving.kernels_vector import counterfactual_costs

        cost = np.zeros((self.count, self.setting.replicas))

        def run(part: Ints) -> None:
            counterfactual_costs(
                part, self.weights, self.at, self.clock, self.plan, self.requests, self.future,
                self.replicas, self.spare, cost,
            )  # fmt: skip

        self._in_parallel(run, self.all)
        return cost

    def result(self, cluster: int, router: str) -> SimulationResult:
        """Return the result of a trace that has ended."""
        size = int(self.sizes[cluster])
        own = {
            name: x[cluster] for name, x in zip(Requests._fields, self.requests[:-1], strict=False)
        }
        requests = self.requests._replace(**own)
        ints, times, *others = (x[cluster] for x in self.replicas)
        replicas = Replicas(ints[:, :size], times[:, :size], *(x[:size] for x in others))
        return SimulationResult(router, requests, replicas)

    def save(self) -> dict[str, np.ndarray]:
        """Return the state that a bit-exact continuation needs."""
        return {name: x.copy() for name, x in self._arrays().items()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Continue where `save` was called."""
        for name, x in self._arrays().items():
            x[...] = arrays[name]

    def _arrays(self) -> dict[str, np.ndarray]:
        groups: dict[str, Any] = {
            "plan": self.plan, "requests": self.requests, "replicas": self.replicas,
            "index": self.index, "view": self.view, "telemetry": self.telemetry,
        }  # fmt: skip
        arrays: dict[str, np.ndarray] = {
            f"{group}.{name}": x
            for group, batch in groups.items()
            for name, x in batch._asdict().items()
            if isinstance(x, np.ndarray)
        }
        others: dict[str, np.ndarray] = {
            "failures": self.failures, "dice": self.dice, "at": self.at, "next": self.next_failure,
            "sizes": self.sizes,
            "seen.replicas": self.observations[0], "seen.request": self.observations[1],
            "seen.mask": self.observations[2],
        }  # fmt: skip
        return arrays | others

    def _in_parallel(self, run: Callable[[Ints], None], clusters: Ints) -> None:
        workers = torch.get_num_threads() if len(clusters) >= MIN_PARALLEL else 1
        parallel_map(run, np.array_split(clusters, workers), workers)


def _max_prefix_blocks(setting: Setting) -> int:
    """Return the most prefix blocks of all requests of a scenario."""
    if setting.trace is not None:
        return most_prefixes(setting.trace, setting.requests)
    return setting.requests * PREFIXES if setting.sessions[1] or setting.shared else 0


def _stack(one: Any, count: int) -> Any:
    """Repeat the arrays of a tuple `count` times along a new first axis; share other values."""
    parts = {
        name: np.repeat(x[None], count, 0) if isinstance(x, np.ndarray) else x
        for name, x in one._asdict().items()
    }
    return type(one)(**parts)


def _on_time() -> Any:
    """Return telemetry as arrays, which can be stacked."""
    return Telemetry(*(np.array(x) for x in (0.0, 0.0, 0, 0.0, 0)))  # type: ignore[arg-type]


def _blank_requests(size: int, max_blocks: int, block: int) -> Requests:
    return Requests(
        ints=np.zeros((f.Q_INTS, size), np.int64),
        times=np.zeros((f.Q_TIMES, size)),
        first=np.zeros(size + 1, np.int64),
        hashes=np.zeros(max_blocks, np.int64),
        prefix_block=block,
    )
