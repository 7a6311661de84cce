"""Many clusters in one set of arrays, one routing decision at a time in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from keel.apps.serving import fields as f
from keel.apps.serving.arrays import (
    Clock,
    Floats,
    Ints,
    Plan,
    Replicas,
    Requests,
    Telemetry,
    View,
    Weights,
    blank_view,
    idle_replicas,
)
from keel.apps.serving.observations import REPLICA, REQUEST
from keel.apps.serving.settings import PREFIX_BLOCK, Scenario, Setting, draw
from keel.apps.serving.simulation import Trace, telemetry_of
from keel.apps.serving.windows import most_prefixes
from keel.models.parallel import parallel_map

ABREAST = 16
"""Clusters from which on a second thread pays."""
FAILURES = 2
"""Of a scene at most: a replica goes, and comes back."""
PREFIXES = 64
"""Prefix blocks of the longest prompt."""


class Many:
    """`count` clusters of one setting; each at the arrival of a request that is not sent yet."""

    def __init__(
        self,
        setting: Setting,
        count: int,
        weights: Weights = Weights(),  # noqa: B008
    ) -> None:
        self.weights, self.setting, self.count, self.all = weights, setting, count, np.arange(count)
        example = draw(replace(setting, fewest=None), 0)
        self.clock: Clock
        self.clock, plan = example.cluster.arrays()
        size, block = setting.requests, example.workload.prefix_block
        room = _room(setting)
        most = int(np.ceil(setting.cache[1])) * PREFIX_BLOCK // block
        largest = plan._replace(cache=np.full(setting.replicas, most))
        self.plan = _stack(plan, count)
        self.requests = _stack(_blank_requests(size, room, block), count)
        self.future = _stack(_blank_requests(size, room, block), count)
        idle = idle_replicas(largest, room)
        self.replicas, self.index = _stack(idle, count), _stack(idle, count)
        self.spare = _stack(idle_replicas(_first(largest), room), count)
        self.view: View = _stack(blank_view(setting.replicas), count)
        self.telemetry = _stack(_on_time(), count)
        self.failures = np.full((count, FAILURES, 3), np.inf)
        self.next_failure = np.zeros(count, np.int64)
        self.dice = np.zeros((count, 1), np.uint64)
        self.at = np.zeros(count, np.int64)
        self.sizes = np.full(count, setting.replicas)
        self._idle = idle
        self.seen = (
            np.zeros((count, setting.replicas, len(REPLICA)), np.float32),
            np.zeros((count, len(REQUEST)), np.float32),
            np.ones((count, setting.replicas), bool),
        )

    def begin(self, cluster: int, scene: Scenario, seed: int) -> None:
        """A new trace through a new cluster."""
        c, workload = cluster, scene.workload
        _, plan = scene.cluster.arrays()
        size = self.sizes[c] = len(scene.cluster)
        for name in ("kind", "speed", "blocks", "watermark", "cache"):
            getattr(self.plan, name)[c, :size] = getattr(plan, name)
        fresh = workload.requests()
        for many in (self.requests, self.future):
            many.ints[c], many.times[c], many.first[c] = fresh.ints, fresh.times, fresh.first
            many.hashes[c, : len(workload.hashes)] = workload.hashes
        for many in (self.replicas, self.index):
            for own, idle in zip(many, self._idle, strict=True):
                own[c] = idle
            many.ints[c, f.R_FREE, :size], many.ints[c, f.R_ROOM, :size] = plan.blocks, plan.cache
            many.ints[c, f.R_UP, size:] = 0  # places that are not taken
            many.ints[c, f.R_NAMES] = workload.universe
        for own, blank in zip(self.view, blank_view(self.setting.replicas), strict=True):
            own[c] = blank
        for name, value in telemetry_of(scene.conditions, workload, seed)._asdict().items():
            getattr(self.telemetry, name)[c] = value
        self.failures[c], strikes = np.inf, scene.conditions.strikes()
        self.failures[c, : len(strikes)] = strikes
        self.dice[c], self.at[c], self.next_failure[c] = seed, 0, 0

    def look(self, clusters: Ints) -> None:
        """Up to the arrival of the request at hand; `seen` tells what there is to see."""
        from keel.apps.serving.kernels_vector import look_many

        self._in_parallel(lambda part: look_many(part, *self._everything()), clusters)

    def step(self, action: Ints) -> Floats:
        """Send the requests at hand, and look at the next ones.

        Returns what all requests cost until then, `[C]`; after a last request until all have
        ended, and the cluster waits for a new trace.
        """
        from keel.apps.serving.kernels_vector import step_many

        cost, everything = np.zeros(self.count), self._everything()
        self._in_parallel(
            lambda part: step_many(part, action, self.weights, cost, *everything), self.all
        )
        return cost

    def _everything(self) -> tuple[Any, ...]:
        return (
            self.at, self.clock, self.plan, self.telemetry, self.failures, self.next_failure,
            self.requests, self.replicas, self.index, self.view, self.seen,
        )  # fmt: skip

    def weighed(self) -> Floats:
        """What each choice would cost all requests: `[C, R]`."""
        from keel.apps.serving.kernels_vector import weigh_many

        weight = np.zeros((self.count, self.setting.replicas))

        def run(part: Ints) -> None:
            weigh_many(
                part, self.weights, self.at, self.clock, self.plan, self.requests, self.future,
                self.replicas, self.spare, weight,
            )  # fmt: skip

        self._in_parallel(run, self.all)
        return weight

    def played(self, cluster: int, router: str) -> Trace:
        """A trace that has ended."""
        own = {
            name: (x if name == "prefix_block" else x[cluster])
            for name, x in self.requests._asdict().items()
        }
        found, size = self.replicas, int(self.sizes[cluster])
        replicas = {name: x[cluster][:size] for name, x in found._asdict().items()}
        replicas["ints"] = found.ints[cluster][:, :size]
        replicas["times"] = found.times[cluster][:, :size]
        return Trace(router, Requests(**own), Replicas(**replicas))

    def save(self) -> dict[str, np.ndarray]:
        """Everything that goes on."""
        return {name: x.copy() for name, x in self._arrays().items()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Go on where `save` was called."""
        for name, x in self._arrays().items():
            x[...] = arrays[name]

    def _arrays(self) -> dict[str, np.ndarray]:
        groups: dict[str, Any] = {
            "plan": self.plan, "requests": self.requests, "replicas": self.replicas,
            "index": self.index, "view": self.view, "telemetry": self.telemetry,
        }  # fmt: skip
        found: dict[str, np.ndarray] = {
            f"{group}.{name}": x
            for group, many in groups.items()
            for name, x in many._asdict().items()
            if isinstance(x, np.ndarray)
        }
        plain: dict[str, np.ndarray] = {
            "failures": self.failures, "dice": self.dice, "at": self.at, "next": self.next_failure,
            "sizes": self.sizes,
            "seen.replicas": self.seen[0], "seen.request": self.seen[1], "seen.mask": self.seen[2],
        }  # fmt: skip
        return found | plain

    def _in_parallel(self, run: Callable[[Ints], None], clusters: Ints) -> None:
        workers = torch.get_num_threads() if len(clusters) >= ABREAST else 1
        parallel_map(run, np.array_split(clusters, workers), workers)


def _room(setting: Setting) -> int:
    """Prefix blocks of all requests of a scene, at most."""
    if setting.trace is not None:
        return most_prefixes(setting.trace, setting.requests)
    return setting.requests * PREFIXES if setting.sessions[1] or setting.shared else 0


def _stack(one: Any, count: int) -> Any:
    """A tuple of arrays, `count` times; what is no array is of all."""
    parts = {
        name: np.repeat(x[None], count, 0) if isinstance(x, np.ndarray) else x
        for name, x in one._asdict().items()
    }
    return type(one)(**parts)


def _on_time() -> Any:
    """Telemetry as arrays, which can be stacked."""
    return Telemetry(*(np.array(x) for x in (0.0, 0.0, 0, 0.0, 0)))  # type: ignore[arg-type]


def _first(plan: Plan) -> Plan:
    names = ("kind", "speed", "blocks", "watermark", "cache")
    return plan._replace(**{name: getattr(plan, name)[:1].copy() for name in names})


def _blank_requests(size: int, room: int, block: int) -> Requests:
    return Requests(
        ints=np.zeros((f.Q_INTS, size), np.int64),
        times=np.zeros((f.Q_TIMES, size)),
        first=np.zeros(size + 1, np.int64),
        hashes=np.zeros(room, np.int64),
        prefix_block=block,
    )
