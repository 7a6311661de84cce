"""The simulator beside one in plain Python: every rule, and every number that routers go by."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plain_cluster import Call, calls_of, extra_cost, plain_cluster, plain_replay
from serving_toys import toy_tables

from keel.apps.serving import fields as f
from keel.apps.serving.arrays import Weights
from keel.apps.serving.cluster import Cluster, Replica
from keel.apps.serving.kernels_draw import conversations, wandering
from keel.apps.serving.many import Many
from keel.apps.serving.playing import Conditions, Played, foresee, play, replay
from keel.apps.serving.settings import Scene, make_setting
from keel.apps.serving.workload import Workload, make_workload

TABLES, GROUPED = toy_tables(), toy_tables(grouped=True)


def random_workload(
    seed: int,
    count: int = 10,
    *,
    gap: float = 0.01,
    prompt: int = 300,
    output: int = 40,
    block: int = 16,
) -> Workload:
    """Prompts of up to `prompt` tokens; those of a kind share some of their first blocks."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(gap, count))
    prompts, outputs = rng.integers(1, prompt, count), rng.integers(1, output, count)
    kinds, shared = rng.integers(0, 3, count), rng.integers(0, 9, count)
    chains = [
        [int(kind) * 100 + k if k < both else 1000 * i + k for k in range(int(length) // block)]
        for i, (kind, both, length) in enumerate(zip(kinds, shared, prompts, strict=True))
    ]
    first = np.cumsum([0, *map(len, chains)])
    names = np.unique(np.array([x for chain in chains for x in chain]), return_inverse=True)[1]
    return make_workload(arrival, prompts, outputs, first, names, block)


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


def column(calls: list[Call], name: str) -> list[Any]:
    return [getattr(x, name) for x in calls]


def expect_same(played: Played, calls: list[Call]) -> None:
    ints, times = played.requests.ints, played.requests.times
    for row, name in ((f.Q_LOST, "lost"), (f.Q_RESTARTS, "restarts"), (f.Q_HIT, "hit")):
        assert ints[row].tolist() == column(calls, name), name
    for row, name in ((f.Q_FIRST_TOKEN, "first"), (f.Q_FINISHED, "end")):
        np.testing.assert_allclose(times[row], column(calls, name), rtol=1e-9, err_msg=name)


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
    played = play(cluster, workload, "round-robin", Conditions(failures=FAILURES))
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


def many_of(cluster: Cluster, workload: Workload, conditions: Conditions | None = None) -> Many:
    """One cluster, with rules of its own, at the arrival of its first request."""
    setting = make_setting(
        "mixed", replicas=len(cluster), requests=len(workload), speed=(1.0, 1.0), cache=(9.0, 9.0)
    )
    many = Many(setting, 1, WEIGHTS)
    many.clock, plan = cluster.arrays()
    rules = ("chunk", "cap", "order", "queue", "patience")
    many.plan = many.plan._replace(**{name: getattr(plan, name) for name in rules})
    assert many.requests.prefix_block == workload.prefix_block
    many.begin(0, Scene(cluster, workload, conditions or Conditions()), seed=3)
    many.look(many.all)
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
        weighed = many.weighed()[0]
        expected = [extra_cost(own, x, WEIGHTS) for own in beside]
        assert weighed.tolist() == pytest.approx(expected, rel=1e-7, abs=1e-9)
        r = q % 2
        costs.append(many.step(np.array([r]))[0])
        index[r].keep(x.names)
        beside[r].send(x, x.arrival)
    for own in beside:
        own.advance(math.inf)
    expect_same(many.played(0, "turns"), calls)
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
        assert (many.weighed()[0, 1] == WEIGHTS.lost) == (q >= 2)
        many.step(np.array([0]))


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
    played = play(cluster, workload, router, conditions)
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
    where = play(cluster, workload, router, Conditions(failures=failures)).requests.ints
    counts = np.bincount(where[f.Q_REPLICA], minlength=3)
    assert counts[1] == 0
    assert abs(counts[0] - 100) < 30  # four standard deviations of √(200/4) = 7.1


@pytest.mark.parametrize("router", ["power-of-two", "random"])
def test_the_only_one_that_is_up_gets_all(router: str) -> None:
    cluster = Cluster((Replica(TABLES),) * 3)
    workload = make_workload(np.arange(40) * 1.0, [8] * 40, [1] * 40)
    failures = ((0.0, 0, False), (0.0, 2, False))
    chosen = play(cluster, workload, router, Conditions(failures=failures)).requests.ints
    assert set(chosen[f.Q_REPLICA].tolist()) == {1}


@pytest.mark.parametrize("router", ["power-of-two", "random", "local-count"])
def test_where_none_is_up_any_is_taken_and_the_request_is_lost(router: str) -> None:
    cluster = Cluster((Replica(TABLES),) * 3)
    workload = make_workload(np.arange(60) * 1.0, [8] * 60, [1] * 60)
    failures = tuple((0.0, r, False) for r in range(3))
    ints = play(cluster, workload, router, Conditions(failures=failures)).requests.ints
    assert set(ints[f.Q_REPLICA].tolist()) == {0, 1, 2}
    assert set(ints[f.Q_LOST].tolist()) == {3}


def test_the_better_of_two_is_the_one_with_fewer() -> None:
    """Two replicas. Where nothing ever waits, half each; where the first one is never done with
    what it has, it is taken when it is drawn twice: a quarter of the time."""
    workload = make_workload(1e-3 + np.arange(400) * 0.05, [8] * 400, [1] * 400)
    shares = []
    for speed in (1.0, 1e-6):
        cluster = Cluster((Replica(TABLES, speed=speed), Replica(TABLES)))
        chosen = play(cluster, workload, "power-of-two").requests.ints[f.Q_REPLICA]
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
    played = foresee(cluster, workload, Conditions(failures=failures), weights)
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
    assert wandering(gaps, noise, 0.7, 5.0).tolist() == pytest.approx(expected, rel=1e-12)
