"""Routers and traces beside plain ones: whom each router takes, and what conversations are."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from plain_cluster import (
    Call,
    calls_of,
    column,
    expect_same,
    extra_cost,
    plain_cluster,
    random_workload,
)
from serving_toys import toy_tables

from keel.apps.serving import fields as f
from keel.apps.serving.arrays import Weights
from keel.apps.serving.cluster import Cluster, Replica
from keel.apps.serving.kernels_draw import arrival_times, conversations
from keel.apps.serving.simulation import Conditions, clairvoyant, simulate
from keel.apps.serving.workload import Workload, make_workload

TABLES = toy_tables()


class PlainRouter:
    """What a router knows of every replica, by its last report, and its scores."""

    def __init__(self, cluster: Cluster, workload: Workload, interval: float) -> None:
        self.replicas, self.index = plain_cluster(cluster), plain_cluster(cluster)
        self.interval, self.mean_output = interval, float(workload.output.mean())
        count = len(cluster)
        self.waiting, self.running, self.unread, self.sent, self.sent_tokens = (
            [0] * count for _ in range(5)
        )
        self.reported = [0.0] * count

    def look(self, now: float) -> None:
        for r, replica in enumerate(self.replicas):
            when = now
            if self.interval:  # in turn
                phase = self.interval * r / len(self.replicas)
                when = phase + math.floor((now - phase) / self.interval) * self.interval
            if not self.interval or when > self.reported[r]:
                replica.advance(when)
                self.waiting[r] = len(replica.queue)
                self.running[r] = len(replica.running) + len(replica.batch)
                self.unread[r] = sum(x.prefill for x in replica.queue) + replica.unread
                self.sent[r] = self.sent_tokens[r] = 0
                self.reported[r] = when
            replica.advance(now)

    def score(self, router: str, r: int, x: Call) -> float:
        reported, speed = self.waiting[r] + self.running[r], self.replicas[r].speed
        outstanding, hit = reported + self.sent[r], self.index[r].known(x)
        work = self.unread[r] + self.sent_tokens[r] + self.mean_output * outstanding
        scores = {
            "least-outstanding": reported,
            "local-count": outstanding,
            "least-by-speed": (outstanding + 1) / speed,
            "token-work": work,
            "sticky": outstanding - 1e9 * hit / x.prompt,
            "cache-work": work + x.prompt - hit,
            "cache-work-by-speed": (work + x.prompt - hit) / speed,
            "vidur-lor": self.waiting[r] + self.sent[r],
        }
        return scores[router]

    def send(self, r: int, x: Call) -> None:
        self.sent[r] += 1
        self.sent_tokens[r] += x.prompt - self.index[r].known(x)
        self.index[r].keep(x.names)
        self.replicas[r].send(x, x.arrival)


ROUTERS = (
    "least-outstanding", "local-count", "least-by-speed", "token-work", "sticky", "cache-work",
    "cache-work-by-speed", "vidur-lor",
)  # fmt: skip


@pytest.mark.parametrize("interval", [0.0, 0.03])
@pytest.mark.parametrize("router", ROUTERS)
def test_a_router_takes_what_has_the_least_score(router: str, interval: float) -> None:
    """By plain numbers of its last reports; Vidur's the first of those that have it."""
    cluster = Cluster(tuple(Replica(TABLES, speed=s, cache=30) for s in (1.0, 2.0, 0.5)), chunk=256)
    workload = random_workload(5, 40, gap=0.004)
    conditions = Conditions(interval=interval, known_speeds=True)
    played = simulate(cluster, workload, router, conditions)
    plain, calls = PlainRouter(cluster, workload, interval), calls_of(workload)
    choices = played.requests.ints[f.Q_REPLICA].tolist()
    for x, r in zip(calls, choices, strict=True):
        plain.look(x.arrival)
        scores = [plain.score(router, k, x) for k in range(3)]
        assert scores[r] == pytest.approx(min(scores), rel=1e-12)
        if router == "vidur-lor":
            assert r == scores.index(min(scores))
        plain.send(r, x)
    for replica in plain.replicas:
        replica.advance(math.inf)
    expect_same(played, calls)
    assert len(set(choices)) == 3


@pytest.mark.parametrize("router", ["power-of-two", "random"])
def test_chance_chooses_among_those_that_are_up(router: str) -> None:
    """Of three of which the second is down all the time, requests that never meet: half each."""
    cluster = Cluster((Replica(TABLES),) * 3)
    workload = make_workload(np.arange(200) * 1.0, [8] * 200, [1] * 200)
    failures = ((0.0, 1, False),)
    where = simulate(cluster, workload, router, Conditions(failures=failures)).requests.ints
    counts = np.bincount(where[f.Q_REPLICA], minlength=3)
    assert counts[1] == 0
    assert abs(counts[0] - 100) < 30  # four standard deviations of √(200/4) = 7.1


@pytest.mark.parametrize("router", ["power-of-two", "random"])
def test_the_only_one_that_is_up_gets_all(router: str) -> None:
    cluster = Cluster((Replica(TABLES),) * 3)
    workload = make_workload(np.arange(40) * 1.0, [8] * 40, [1] * 40)
    failures = ((0.0, 0, False), (0.0, 2, False))
    chosen = simulate(cluster, workload, router, Conditions(failures=failures)).requests.ints
    assert set(chosen[f.Q_REPLICA].tolist()) == {1}


@pytest.mark.parametrize("router", ["power-of-two", "random", "local-count"])
def test_where_none_is_up_any_is_taken_and_the_request_is_lost(router: str) -> None:
    cluster = Cluster((Replica(TABLES),) * 3)
    workload = make_workload(np.arange(60) * 1.0, [8] * 60, [1] * 60)
    failures = tuple((0.0, r, False) for r in range(3))
    ints = simulate(cluster, workload, router, Conditions(failures=failures)).requests.ints
    assert set(ints[f.Q_REPLICA].tolist()) == {0, 1, 2}
    assert set(ints[f.Q_LOST].tolist()) == {3}


def test_the_better_of_two_is_the_one_with_fewer() -> None:
    """Two replicas. Where nothing ever waits, half each; where the first one is never done with
    what it has, it is taken when it is drawn twice: a quarter of the time."""
    workload = make_workload(1e-3 + np.arange(400) * 0.05, [8] * 400, [1] * 400)
    shares = []
    for speed in (1.0, 1e-6):
        cluster = Cluster((Replica(TABLES, speed=speed), Replica(TABLES)))
        chosen = simulate(cluster, workload, "power-of-two").requests.ints[f.Q_REPLICA]
        shares.append(float(np.mean(chosen == 0)))
    assert shares[0] == pytest.approx(0.5, abs=0.1)  # four standard deviations of 0.5/√400
    assert shares[1] == pytest.approx(0.25, abs=0.09)


@pytest.mark.parametrize("weights", [Weights(), Weights(1.0, 5.0, 0.01)])
def test_one_who_knows_all_takes_what_costs_least(weights: Weights) -> None:
    """Every choice, against every future of a plain cluster; one replica fails, and is back."""
    cluster = Cluster(
        tuple(Replica(TABLES, speed=s, cache=c) for s, c in ((1.0, 0), (2.0, 9), (0.5, 30))),
        chunk=128,
        cap=4,
        queue=2,
    )
    workload = random_workload(9, 16, gap=0.003)
    middle = float(workload.arrival[8])
    failures = ((middle, 1, False), (middle + 0.01, 1, True))
    played = clairvoyant(cluster, workload, Conditions(failures=failures), weights)
    replicas, calls, waiting = plain_cluster(cluster), calls_of(workload), list(failures)
    for q, x in enumerate(calls):
        while waiting and waiting[0][0] <= x.arrival:
            when, number, back = waiting.pop(0)
            replicas[number].advance(when)
            if back:
                replicas[number].up = True
            else:
                replicas[number].fail(when)
        for replica in replicas:
            replica.advance(x.arrival)
        costs = [extra_cost(y, x, weights) if y.up else math.inf for y in replicas]
        r = played.requests.ints[f.Q_REPLICA, q]
        assert costs[r] == pytest.approx(min(costs), rel=1e-7, abs=1e-9)
        replicas[r].send(x, x.arrival)
    for replica in replicas:
        replica.advance(math.inf)
    expect_same(played, calls)
    assert 3 in column(calls, "lost")


# --- traces ---------------------------------------------------------------------------------------


def plain_conversations(
    prompt: list[int], output: list[int], chance: np.ndarray, kinds: list[int], sessions: float,
    shared: int, shared_tokens: int, block: int,
) -> tuple[list[int], list[list[int]]]:  # fmt: skip
    """With lists: sizes of prompts, and the names of their blocks."""
    names = itertools.count()
    known: dict[int, list[int]] = {}
    talks: list[tuple[int, list[int]]] = []
    sizes, chains = [], []
    for i, length in enumerate(prompt):
        chain: list[int] = []
        if talks and chance[i, 0] < sessions:  # one of the last 64 goes on
            recent = talks[-64:]
            number = len(talks) - len(recent) + int(chance[i, 1] * len(recent))
            said, chain = talks.pop(number)
            size = said + max(8, length // 8)
        elif shared:
            if kinds[i] not in known:
                known[kinds[i]] = [next(names) for _ in range(shared_tokens // block)]
            chain, size = known[kinds[i]], length + shared_tokens
        else:
            size = length
        size = min(size, 3_600)
        chain = [*chain, *(next(names) for _ in range(size // block - len(chain)))]
        chains.append(chain[: size // block])
        sizes.append(size)
        said = min(size + output[i], 3_500)
        written = max(0, said // block - size // block)
        chain = [*chains[-1], *(next(names) for _ in range(written))]
        if said < 3_000:
            talks.append((said, chain))
    return sizes, chains


@pytest.mark.parametrize(
    ("sessions", "shared", "shared_tokens", "longest"),
    [(0.0, 0, 0, 300), (0.7, 0, 0, 900), (0.5, 3, 130, 300), (0.9, 2, 64, 3_500)],
)
def test_conversations_are_the_plain_ones(
    sessions: float, shared: int, shared_tokens: int, longest: int
) -> None:
    rng, count = np.random.default_rng(4), 200
    prompt, output = rng.integers(1, longest, count), rng.integers(1, 400, count)
    chance, kinds = rng.random((count, 2)), rng.integers(0, max(1, shared), count)
    rules = (sessions, shared, shared_tokens, 32)
    sizes, first, names = conversations(prompt, output, chance, kinds, *rules)
    expected = plain_conversations(prompt.tolist(), output.tolist(), chance, kinds.tolist(), *rules)
    assert sizes.tolist() == expected[0]
    assert [names[a:b].tolist() for a, b in itertools.pairwise(first)] == expected[1]


def test_a_wandering_rate_is_the_plain_one() -> None:
    """exp(level) is the rate, in the mean 1; the level forgets by e^(−gap/wander)."""
    rng = np.random.default_rng(0)
    gaps, noise = rng.exponential(1.0, 50), rng.normal(size=51)
    level, now, expected = 0.7 * noise[-1], 0.0, []
    for gap, x in zip(gaps, noise, strict=False):
        now += gap / math.exp(level - 0.7**2 / 2)
        remains = math.exp(-gap / 5.0)
        level = remains * level + 0.7 * math.sqrt(1.0 - remains**2) * x
        expected.append(now)
    assert arrival_times(gaps, noise, 0.7, 5.0).tolist() == pytest.approx(expected, rel=1e-12)
