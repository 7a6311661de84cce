"""The simulator beside one in plain Python: every rule, and every number that routers go by."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plain_cluster import (
    Call,
    calls_of,
    column,
    expect_same,
    extra_cost,
    plain_cluster,
    plain_replay,
    random_workload,
)
from serving_toys import toy_tables

from keel.apps.serving import fields as f
from keel.apps.serving.arrays import Weights
from keel.apps.serving.cluster import Cluster, Replica
from keel.apps.serving.settings import Scenario, make_setting
from keel.apps.serving.simulation import Conditions, replay, simulate
from keel.apps.serving.vector_clusters import VectorClusters
from keel.apps.serving.workload import Workload, make_workload

TABLES, GROUPED = toy_tables(), toy_tables(grouped=True)


CLUSTERS: dict[str, tuple[Cluster, dict[str, Any]]] = {
    "plain": (Cluster((Replica(TABLES),)), {}),
    "vllm": (Cluster((Replica(TABLES),), order="vllm"), {"prompt": 900}),
    "grouped queries": (Cluster((Replica(GROUPED, speed=2.0),)), {}),
    "little memory": (Cluster((Replica(TABLES, blocks=40),)), {"prompt": 200, "output": 150}),
    "little memory, vllm": (
        Cluster((Replica(TABLES, blocks=40),), order="vllm"),
        {"prompt": 200, "output": 150},
    ),
    "a watermark": (
        Cluster((Replica(TABLES, blocks=40),), watermark=0.3),
        {"prompt": 200, "output": 100},
    ),
    "small chunks": (Cluster((Replica(TABLES),), chunk=24, cap=6), {"prompt": 90}),
    "few at once": (Cluster((Replica(TABLES),), chunk=8, cap=2), {"prompt": 40}),
    "few at once, vllm": (Cluster((Replica(TABLES),), cap=3, order="vllm"), {}),
    "a cache": (Cluster((Replica(TABLES, cache=12),)), {"gap": 0.05}),
    "a cache, vllm": (Cluster((Replica(TABLES, cache=12),), order="vllm"), {"gap": 0.05}),
    "a cache and little memory": (
        Cluster((Replica(TABLES, cache=6, blocks=40),)),
        {"prompt": 200, "output": 100},
    ),
    "a queue": (Cluster((Replica(TABLES),), chunk=16, cap=2, queue=2), {"prompt": 90}),
    "patience": (Cluster((Replica(TABLES),), chunk=16, cap=3, patience=0.08), {"prompt": 60}),
    "patience and little memory": (
        Cluster((Replica(TABLES, blocks=30),), patience=0.05),
        {"prompt": 150, "output": 150, "gap": 0.03},
    ),
    "long contexts": (
        Cluster((Replica(TABLES),)),
        {"prompt": 5_000, "output": 400, "gap": 0.2, "count": 5},
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CLUSTERS)
def test_a_replica_is_the_plain_one(name: str, seed: int) -> None:
    cluster, sizes = CLUSTERS[name]
    workload = random_workload(seed, **sizes)
    played = replay(cluster, workload, [0] * len(workload))
    (plain,), calls = plain_replay(cluster, workload, [0] * len(workload))
    expect_same(played, calls)
    ints, times = played.replicas.ints[:, 0], played.replicas.times[:, 0]
    assert times[f.R_PACE] == pytest.approx(plain.pace, rel=1e-9)
    assert times[f.R_BUSY] == pytest.approx(plain.busy, rel=1e-9)
    assert ints[f.R_DONE_TOKENS] == plain.tokens
    assert ints[f.R_FINISHED] == plain.finished
    assert ints[f.R_FREE] == plain.free == plain.blocks
    assert ints[f.R_CACHED] == len(plain.cached)
    for row in (f.R_WAITING, f.R_WAITING_TOKENS, f.R_SIZE, f.R_ASIDE, f.R_READING):
        assert ints[row] == 0
    assert (ints[f.R_HEAD], ints[f.R_TAIL]) == (-1, -1)
    assert not played.requests.ints[f.Q_HELD].any()


@pytest.mark.parametrize("seed", range(3))
def test_a_cache_whose_blocks_are_used_again_and_again_is_the_plain_one(seed: int) -> None:
    """Two prompts come nine times in ten: most uses on record are of blocks that were used since,
    and have to be tidied up before the record is full."""
    rng, count = np.random.default_rng(seed), 120
    keys = np.where(rng.random(count) < 0.9, rng.integers(0, 2, count), rng.integers(2, 9, count))
    chains = [[int(key) * 4 + k for k in range(rng.integers(1, 5))] for key in keys]
    first = np.cumsum([0, *map(len, chains)])
    workload = make_workload(
        np.arange(count) * 1.0,
        [16 * len(chain) + 5 for chain in chains],
        [1] * count,
        first,
        [name for chain in chains for name in chain],
        16,
    )
    cluster = Cluster((Replica(TABLES, cache=10),))
    _, calls = plain_replay(cluster, workload, [0] * count)
    expect_same(replay(cluster, workload, [0] * count), calls)


def test_every_rule_is_met_somewhere() -> None:
    """Or the test above would say less than it seems to."""
    seen: dict[str, set[int]] = {"lost": set(), "restarts": set(), "hit": set()}
    for cluster, sizes in CLUSTERS.values():
        for seed in range(3):
            workload = random_workload(seed, **sizes)
            _, calls = plain_replay(cluster, workload, [0] * len(workload))
            for name, values in seen.items():
                values |= set(column(calls, name))
    assert seen["lost"] == {0, 1, 2}
    assert max(seen["restarts"]) > 1
    assert max(seen["hit"]) > 64


FAILURES = ((0.04, 0, False), (0.05, 1, False), (0.09, 0, True), (0.2, 1, True))


@pytest.mark.parametrize("seed", range(3))
def test_failures_are_those_of_the_plain_cluster(seed: int) -> None:
    """Two replicas with caches go down and come up; a router that takes turns sends round."""
    cluster = Cluster(tuple(Replica(TABLES, cache=20, speed=s) for s in (1.0, 2.0, 0.5)))
    workload = random_workload(seed, 16, gap=0.006, output=90)
    played = simulate(cluster, workload, "round-robin", Conditions(failures=FAILURES))
    chosen = played.requests.ints[f.Q_REPLICA].tolist()
    _, calls = plain_replay(cluster, workload, chosen, FAILURES)
    expect_same(played, calls)
    assert 3 in column(calls, "lost")
    expected, turn = [], 0
    for x in calls:
        down = {0} if 0.04 <= x.arrival < 0.09 else set()
        down |= {1} if 0.05 <= x.arrival < 0.2 else set()
        while turn % 3 in down:
            turn += 1
        expected.append(turn % 3)
        turn += 1
    assert chosen == expected


# --- what routers go by ---------------------------------------------------------------------------

REPORTING = (
    "plain", "vllm", "grouped queries", "little memory", "small chunks", "a cache", "patience",
)  # fmt: skip
WEIGHTS = Weights(end=1.0, first=0.5, lost=3.0)


def many_of(
    cluster: Cluster, workload: Workload, conditions: Conditions | None = None
) -> VectorClusters:
    """One cluster, with rules of its own, at the arrival of its first request."""
    setting = make_setting(
        "mixed", replicas=len(cluster), requests=len(workload), speed=(1.0, 1.0), cache=(9.0, 9.0)
    )
    many = VectorClusters(setting, 1, WEIGHTS)
    many.clock, plan = cluster.arrays()
    rules = ("chunk", "cap", "order", "queue", "patience")
    many.plan = many.plan._replace(**{name: getattr(plan, name) for name in rules})
    assert many.requests.prefix_block == workload.prefix_block
    many.begin(0, Scenario(cluster, workload, conditions or Conditions()), seed=3)
    many.observe(many.all)
    return many


def overlap(begin: float, end: float, since: float, until: float) -> float:
    return max(0.0, min(end, until) - max(begin, since))


def cost_between(calls: list[Call], q: int, since: float, until: float) -> float:
    """Of the first q + 1 calls between two times; of the last also what is lost at the first."""
    total = 0.0
    for i, x in enumerate(calls[: q + 1]):
        first = x.end if math.isnan(x.first) else x.first
        total += WEIGHTS.end * overlap(x.arrival, x.end, since, until)
        total += WEIGHTS.first * overlap(x.arrival, first, since, until)
        ends_here = since < x.end <= until or (i == q and x.end == since)
        total += WEIGHTS.lost * (x.lost > 0 and ends_here)
    return total


@pytest.mark.parametrize("name", REPORTING)
def test_what_a_router_is_told_and_what_its_choices_cost(name: str) -> None:
    """At every arrival of a plain cluster: who waits and runs, tokens to read, memory, what is
    cached by the router's own index, and what each choice would cost; then what a step did cost."""
    rules, sizes = CLUSTERS[name]
    (replica,) = rules.replicas
    cluster = replace(rules, replicas=(replica, replace(replica, speed=1.5 * replica.speed)))
    workload = random_workload(7, **{**sizes, "count": 12, "block": 64})
    many = many_of(cluster, workload)
    view_ints, view_times = many.view.ints[0], many.view.times[0]
    beside, calls = plain_cluster(cluster), calls_of(workload)
    index = plain_cluster(cluster)  # of which only the caches are used
    costs, mid_stretch = [], 0
    for q, x in enumerate(calls):
        for r, own in enumerate(beside):
            own.advance(x.arrival)
            assert view_ints[f.V_WAITING, r] == len(own.queue)
            assert view_ints[f.V_RUNNING, r] == len(own.running) + len(own.batch)
            assert view_ints[f.V_UNREAD, r] == sum(y.prefill for y in own.queue) + own.unread
            memory = 1.0 - own.free / own.blocks
            assert view_times[f.V_MEMORY, r] == pytest.approx(memory, abs=1e-12)
            assert view_times[f.V_REPORTED, r] == x.arrival
            assert view_ints[f.V_HIT, r] == index[r].known(x)
            mid_stretch += int(many.replicas.ints[0, f.R_MORE, r] > 1 and bool(own.batch))
        weighed = many.counterfactual_costs()[0]
        expected = [extra_cost(own, x, WEIGHTS) for own in beside]
        assert weighed.tolist() == pytest.approx(expected, rel=1e-7, abs=1e-9)
        r = q % 2
        costs.append(many.step(np.array([r]))[0])
        index[r].keep(x.names)
        beside[r].send(x, x.arrival)
    for own in beside:
        own.advance(math.inf)
    expect_same(many.result(0, "turns"), calls)
    times = [*column(calls, "arrival"), max(column(calls, "end"))]
    between = [cost_between(calls, q, times[q], times[q + 1]) for q in range(len(calls))]
    assert costs == pytest.approx(between, rel=1e-7, abs=1e-9)
    assert mid_stretch or name not in ("plain", "grouped queries", "a cache")


def test_a_replica_that_is_down_costs_a_lost_request() -> None:
    cluster = Cluster((Replica(TABLES),) * 2)
    workload = random_workload(1, 6, block=64)
    when = float(workload.arrival[2])
    many = many_of(cluster, workload, Conditions(failures=((when, 1, False), (1e9, 1, True))))
    for q in range(6):
        assert (many.counterfactual_costs()[0, 1] == WEIGHTS.lost) == (q >= 2)
        many.step(np.array([0]))
