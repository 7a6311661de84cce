"""Routers, what they know, and what becomes of a trace."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from serving_toys import toy_tables

from keel.apps.serving import fields as f
from keel.apps.serving.cluster import Cluster, Replica, equal_cluster
from keel.apps.serving.kernels_draw import arrival_times, conversations
from keel.apps.serving.kernels_route import VIDUR, heuristic_cost, speed_of, splitmix64
from keel.apps.serving.results import Objective, latencies, summarize
from keel.apps.serving.settings import draw_scenario, held_out, make_setting
from keel.apps.serving.simulation import (
    HEURISTICS,
    ROUTERS,
    Conditions,
    clairvoyant,
    replay,
    simulate,
)
from keel.apps.serving.synthetic import Synthetic, synthesize
from keel.apps.serving.tables import FORMS, closed_form, load_tables
from keel.apps.serving.workload import load_workload, make_workload
from keel.errors import InputError


@pytest.fixture(scope="module")
def trace():
    return synthesize(Synthetic(count=300, rate=60.0, burst=0.3), 0)


def mean_latency(cluster, workload, router, conditions=None) -> float:
    return summarize(simulate(cluster, workload, router, conditions)).end_to_end.mean


def test_round_robin_takes_turns() -> None:
    workload = make_workload(np.arange(8) * 0.01, [10] * 8, [2] * 8)
    found = simulate(equal_cluster(toy_tables(), 4), workload, "round-robin")
    assert found.requests.ints[f.Q_REPLICA].tolist() == [0, 1, 2, 3] * 2


def test_least_outstanding_breaks_ties_by_chance_and_vidurs_does_not() -> None:
    """Requests that are over before the next one comes: all replicas are always idle."""
    workload = make_workload(np.arange(400) * 10.0, [10] * 400, [2] * 400)
    cluster = equal_cluster(toy_tables(), 4)
    fair = summarize(simulate(cluster, workload, "least-outstanding"))
    assert max(fair.shares) < 0.35
    assert min(fair.shares) > 0.15
    assert summarize(simulate(cluster, workload, "vidur-lor")).shares == (1.0, 0.0, 0.0, 0.0)


def test_vidurs_counts_waiting_requests_only() -> None:
    """Everything is admitted at once, so nothing ever waits: all go to the first replica."""
    workload = make_workload(np.arange(20) * 0.001, [40] * 20, [50] * 20)
    cluster = equal_cluster(toy_tables(), 4)
    broken = summarize(simulate(cluster, workload, "vidur-lor")).shares
    assert broken[0] > 0.5
    assert max(summarize(simulate(cluster, workload, "least-outstanding")).shares) < 0.35


def test_tokens_to_read_count_prompts_that_are_being_read() -> None:
    """A prompt of 2,000 tokens is admitted at once and read in chunks of 512; a short one comes
    before it is through. Token work must see the rest of it, or the two replicas look alike."""
    workload = make_workload([0.0, 1e-4, 2e-4], [2_000, 40, 40], [40, 40, 40])
    cluster = equal_cluster(toy_tables(), 2)
    for seed in range(8):
        where = simulate(cluster, workload, "token-work", seed=seed).requests.ints[f.Q_REPLICA]
        assert (where[1:] != where[0]).all()


def test_a_crowded_replica_tells_a_slower_pace() -> None:
    """From token to token, whatever else is done: prompts come so fast that no iteration only
    writes, and the pace of a request that was alone at first rises."""
    arrival = [0.0, *(0.02 + 0.004 * np.arange(200))]
    cluster = equal_cluster(closed_form("llama-2-7b-a100"), 1)
    alone = simulate(cluster, make_workload([0.0], [100], [300]), "random").replicas
    crowd = make_workload(arrival, [100] + [900] * 200, [300] + [2] * 200)
    crowded = simulate(cluster, crowd, "random").replicas
    assert crowded.times[f.R_PACE, 0] > 2.0 * alone.times[f.R_PACE, 0]


def test_knowing_speeds_helps_where_they_differ(trace) -> None:
    replicas = tuple(Replica(toy_tables(), speed=s) for s in (4.0, 1.0, 1.0, 0.25))
    cluster = Cluster(replicas)
    told = Conditions(known_speeds=True)
    by_speed = mean_latency(cluster, trace, "least-by-speed", told)
    assert by_speed < mean_latency(cluster, trace, "least-outstanding", told)
    assert by_speed < 0.7 * mean_latency(cluster, trace, "round-robin", told)


def test_a_replica_whose_pace_nobody_knows_is_taken_for_one_like_the_others() -> None:
    """One that only ever reads prompts never tells its pace. Taken for infinitely fast it got all
    requests, read on, and never told."""
    setting = make_setting(
        "mixed", replicas=8, requests=400, interval=(0.0, 0.0), cache=(0.0, 0.0),
        sessions=(0.0, 0.0), shared=0,
    )  # fmt: skip
    for seed in held_out(6):
        scene = draw_scenario(setting, seed)
        guessed = mean_latency(scene.cluster, scene.workload, "least-by-speed")
        told = Conditions(known_speeds=True)
        assert guessed < 1.25 * mean_latency(scene.cluster, scene.workload, "least-by-speed", told)


def test_speed_helps_those_who_count_tokens_too() -> None:
    setting = make_setting("mixed", requests=400)
    scenes = [(draw_scenario(setting, seed), seed) for seed in held_out(4)]

    def mean(router: str) -> float:
        return sum(mean_latency(s.cluster, s.workload, router, s.conditions) for s, _ in scenes)

    assert mean("cache-work-by-speed") < 0.95 * mean("cache-work")


def test_old_reports_send_a_herd_to_one_replica_unless_one_counts(trace) -> None:
    cluster, old = equal_cluster(toy_tables(), 4), Conditions(interval=1.0)
    herd = mean_latency(cluster, trace, "least-outstanding", old)
    assert herd > 1.2 * mean_latency(cluster, trace, "least-outstanding")
    assert mean_latency(cluster, trace, "local-count", old) < 0.9 * herd


def test_lost_reports_are_older(trace) -> None:
    cluster = equal_cluster(toy_tables(), 4)
    some = mean_latency(cluster, trace, "least-outstanding", Conditions(interval=0.5))
    most = Conditions(interval=0.5, dropped=0.8)
    assert mean_latency(cluster, trace, "least-outstanding", most) > some


def test_the_same_seed_is_the_same_trace(trace) -> None:
    cluster, old = equal_cluster(toy_tables(), 3), Conditions(interval=0.3, dropped=0.2)
    one, other = (simulate(cluster, trace, "power-of-two", old, seed=5) for _ in range(2))
    third = simulate(cluster, trace, "power-of-two", old, seed=6)
    np.testing.assert_array_equal(one.requests.times, other.requests.times)
    assert (one.requests.ints[f.Q_REPLICA] != third.requests.ints[f.Q_REPLICA]).any()


def test_one_who_knows_the_future_is_better_than_all(trace) -> None:
    cluster = Cluster(tuple(Replica(toy_tables(), speed=s) for s in (2.0, 1.0, 0.5)))
    best = min(mean_latency(cluster, trace, name) for name in HEURISTICS)
    assert summarize(clairvoyant(cluster, trace)).end_to_end.mean < best


def plain(kernel: Any) -> Callable[..., float]:
    """A part of the compiled loops as the Python function it was: it has no other way in."""
    function: Callable[..., float] = getattr(kernel, "py_func", kernel)
    return function


def test_chance_is_splitmix64() -> None:
    """The first number of its reference for the seed 0 is E220A8397B1DCDAF."""
    with np.errstate(over="ignore"):
        drawn = plain(splitmix64)(np.uint64(0x9E3779B97F4A7C15))
    assert drawn == (0xE220A8397B1DCDAF >> 11) / 2**53


def test_a_speed_is_told_or_guessed_from_paces() -> None:
    """Paces of ½ and ¼ are speeds of 2 and 4; a replica without one has the mean pace, 3/8."""
    view = SimpleNamespace(times=np.zeros((f.V_PACE + 1, 3)))
    plan = SimpleNamespace(speed=np.array([7.0, 8.0, 9.0]))
    told, guessed = (SimpleNamespace(known_speeds=known) for known in (1, 0))
    speeds = [plain(speed_of)(r, plan, guessed, view) for r in range(3)]
    assert speeds == [1.0, 1.0, 1.0]
    view.times[f.V_PACE] = [0.0, 0.5, 0.25]
    speeds = [plain(speed_of)(r, plan, guessed, view) for r in range(3)]
    assert speeds == pytest.approx([8 / 3, 2.0, 4.0])
    assert plain(speed_of)(1, plan, told, view) == 8.0


def test_vidurs_router_counts_what_waits_and_what_was_sent() -> None:
    view = SimpleNamespace(ints=np.zeros((max(f.V_WAITING, f.V_RUNNING, f.V_SENT) + 1, 1), int))
    for field, number in ((f.V_WAITING, 3), (f.V_RUNNING, 40), (f.V_SENT, 2)):
        view.ints[field] = number
    assert plain(heuristic_cost)(VIDUR, 0, 0, None, None, None, view) == 5.0


# --- prefix caches --------------------------------------------------------------------------------


def test_a_prefix_that_is_cached_is_not_read_again() -> None:
    """Of 100 tokens, 6 blocks of 16 are known the second time: 4 are left to read."""
    tables = toy_tables()
    workload = make_workload(
        [0.0, 10.0], [100, 100], [2, 2], [0, 6, 12], [*range(6), *range(6)], 16
    )
    found = replay(Cluster((Replica(tables, cache=10),)), workload, [0, 0]).requests
    assert found.ints[f.Q_HIT].tolist() == [0, 96]
    first = 1e-3 * (tables.linear[8] + tables.prefill[2, 4])
    assert found.times[f.Q_FIRST_TOKEN, 1] == pytest.approx(10.0 + first)


@pytest.mark.parametrize(("seed", "count", "often"), [(0, 400, 0.0), (1, 150, 0.9)])
def test_the_least_recently_used_blocks_go_first(seed: int, count: int, often: float) -> None:
    """Against a dictionary in the order of use; where few prompts come often, most uses on record
    are of blocks that were used again."""
    rng, room = np.random.default_rng(seed), 12
    keys = rng.integers(0, 9, count)
    keys[rng.random(count) < often] %= 2
    chains = [[int(k) * 4 + j for j in range(rng.integers(1, 5))] for k in keys]
    first = np.cumsum([0, *map(len, chains)])
    flat = [x for chain in chains for x in chain]
    prompt = [16 * len(chain) + 5 for chain in chains]
    workload = make_workload(np.arange(count) * 5.0, prompt, [1] * count, first, flat, 16)
    found = replay(Cluster((Replica(toy_tables(), cache=room),)), workload, [0] * count).requests
    kept: OrderedDict[int, None] = OrderedDict()
    for i, chain in enumerate(chains):
        known = next((j for j, x in enumerate(chain) if x not in kept), len(chain))
        assert found.ints[f.Q_HIT, i] == 16 * known
        for x in reversed(chain):
            kept.pop(x, None)
            while len(kept) >= room:
                kept.popitem(last=False)
            kept[x] = None


def test_sticky_finds_what_is_cached() -> None:
    workload = synthesize(Synthetic(count=300, rate=5.0, sessions=0.8, shared=4), 1)
    cluster = Cluster(tuple(Replica(toy_tables(), cache=2_000) for _ in range(4)))
    hits = {name: summarize(simulate(cluster, workload, name)).cache_hits for name in ROUTERS}
    assert hits["sticky"] > 1.3 * hits["round-robin"]
    assert hits["cache-work"] > 1.2 * hits["round-robin"]


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_replica_that_dies_loses_what_it_has_and_gets_nothing_until_it_is_back() -> None:
    workload = make_workload(np.arange(100) * 0.05, [200] * 100, [100] * 100)
    failures = ((1.0, 0, False), (3.0, 0, True))
    cluster = equal_cluster(toy_tables(), 2)
    found = simulate(cluster, workload, "least-outstanding", Conditions(failures=failures)).requests
    at_first = found.ints[f.Q_REPLICA] == 0
    arrival = found.times[f.Q_ARRIVAL]
    down = (arrival > 1.0) & (arrival < 3.0)
    assert not (at_first & down).any()
    assert (at_first & (arrival > 3.0)).any()
    lost = found.ints[f.Q_LOST] == 3
    assert lost.any()
    assert (at_first[lost] & (arrival[lost] <= 1.0)).all()


def test_a_replica_that_dies_as_a_request_comes_does_not_get_it() -> None:
    workload = make_workload([0.0, 1.0], [20, 20], [1, 1])
    cluster = equal_cluster(toy_tables(), 2)
    for at, replica in ((0.5, 1), (1.0, 1), (1.5, 0)):
        conditions = Conditions(failures=((at, 0, False),))
        found = simulate(cluster, workload, "vidur-lor", conditions).requests
        assert found.ints[f.Q_REPLICA, 1] == replica


def test_queues_have_an_end_and_so_has_patience() -> None:
    workload = make_workload(np.zeros(30), [500] * 30, [20] * 30)
    short = summarize(simulate(Cluster((Replica(toy_tables()),), queue=5), workload, "random"))
    assert short.turned_away > 0
    tired = summarize(
        simulate(Cluster((Replica(toy_tables()),), patience=0.02), workload, "random")
    )
    assert tired.gave_up > 0
    assert tired.dropped == tired.gave_up
    assert tired.slo <= 1.0 - tired.dropped / 30 + 1e-9


# --- reports --------------------------------------------------------------------------------------


def test_a_report_by_hand() -> None:
    workload = make_workload([0.0, 100.0], [8, 8], [1, 3])
    tables = toy_tables()
    played = replay(equal_cluster(tables, 2), workload, [0, 0])
    first = 1e-3 * (tables.linear[8] + tables.prefill[0, 8])
    decode = 1e-3 * (tables.linear[8] + tables.decode[1, 1])
    ttft, tpot, whole = latencies(played)
    assert ttft.tolist() == pytest.approx([first, first])
    assert np.isnan(tpot[0])
    assert tpot[1] == pytest.approx(decode)
    assert whole.tolist() == pytest.approx([first, first + 2 * decode])
    report = summarize(played, Objective(ttft=1.0, tpot=decode / 2))
    assert report.slo == 0.5
    assert report.shares == (1.0, 0.0)
    assert report.fairness == pytest.approx(0.5)
    assert report.throughput == pytest.approx(2 / (100.0 + first + 2 * decode))


# --- traces ---------------------------------------------------------------------------------------


def test_formats_of_traces(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:01:51.1632340,374,44\n2023-11-16 18:01:52.6632340,396,109\n"
    )
    vidur = tmp_path / "vidur.csv"
    vidur.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n2.0,10,3\n1.5,20,4\n")
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]}\n'
        '{"timestamp": 250, "input_length": 700, "output_length": 6, "hash_ids": [7]}\n'
    )
    found = load_workload(azure)
    assert found.arrival.tolist() == pytest.approx([0.0, 1.5])
    assert (found.prompt.tolist(), found.output.tolist()) == ([374, 396], [44, 109])
    assert load_workload(vidur).prompt.tolist() == [20, 10]
    cached = load_workload(mooncake)
    assert cached.hashes.tolist() == [0, 1, 0]
    assert (cached.first.tolist(), cached.prefix_block) == ([0, 2, 3], 512)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "expected the columns"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\nx,1,2\n", "line 2"),
        ('{"timestamp": 0}\n', "line 1"),
    ],
)
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_workload(path)
    with pytest.raises(InputError, match="no such file"):
        load_workload(tmp_path / "nothing")
    with pytest.raises(InputError, match="not a file of tables"):
        load_tables(path)


def test_synthetic_requests_have_the_rate_and_lengths_they_are_given() -> None:
    found = synthesize(Synthetic(count=20_000, rate=5.0), 3)
    assert found.rate == pytest.approx(5.0, rel=0.03)
    assert np.log(found.prompt).mean() == pytest.approx(6.63, abs=0.15)
    bursty = synthesize(Synthetic(count=20_000, rate=5.0, burst=0.8), 3)
    assert bursty.rate == pytest.approx(5.0, rel=0.01)

    def fano(times: np.ndarray) -> float:
        counts = np.histogram(times, bins=int(times[-1] // 60))[0]
        return float(counts.var() / counts.mean())

    assert fano(found.arrival) < 2.0
    assert fano(bursty.arrival) > 10.0


def test_a_turn_of_a_conversation_begins_with_all_that_was_said() -> None:
    found = synthesize(Synthetic(count=200, rate=5.0, sessions=0.7, prefix_block=64), 0)
    chains = [tuple(found.hashes[a:b]) for a, b in zip(found.first, found.first[1:], strict=False)]
    for i, chain in enumerate(chains):
        assert len(chain) == found.prompt[i] // 64
    again = sum(bool(c) and c[0] in {d[0] for d in chains[:i] if d} for i, c in enumerate(chains))
    assert again > 0.5 * len(chains)


def test_conversations_by_hand() -> None:
    """Blocks of 10, and two system prompts of 20. The third prompt goes on with the first one's
    conversation, which is 55 tokens long by then, the fifth with the second's; a question is an
    eighth of a prompt, and at least 8."""
    sizes, first, names = conversations(
        np.array([25, 40, 16, 30, 80]),
        np.array([10, 5, 20, 4, 1]),
        np.array([[0.9, 0.0], [0.9, 0.0], [0.1, 0.0], [0.9, 0.0], [0.1, 0.0]]),
        np.array([1, 0, 1, 1, 0]),
        *(0.5, 2, 20, 10),
    )
    assert sizes.tolist() == [45, 60, 63, 50, 75]
    chains = [names[a:b].tolist() for a, b in pairwise(first)]
    assert chains == [
        [0, 1, 2, 3],  # and 4 is written
        [5, 6, 7, 8, 9, 10],
        [0, 1, 2, 3, 4, 11],  # and 12 and 13 are
        [0, 1, 14, 15, 16],
        [5, 6, 7, 8, 9, 10, 17],
    ]


def test_a_wandering_rate_by_hand() -> None:
    """log rate ℓ: 0.5·2 at first, then e^(-1/4)·ℓ + 0.5·√(1 - e^(-1/2))·0.5; mean rate 1."""
    times = arrival_times(np.array([1.0, 2.0]), np.array([0.5, -1.0, 2.0]), 0.5, 4.0)
    level = math.exp(-0.25) + 0.25 * math.sqrt(1 - math.exp(-0.5))
    first = math.exp(0.125 - 1.0)
    assert times.tolist() == pytest.approx([first, first + 2 * math.exp(0.125 - level)])


def test_scaled_attention_by_hand() -> None:
    """An H100 beside an A100: from token to token by memory time (.1699 / .2659), over prompts by
    arithmetic (5.49e-4 / 2.003e-3); one 70B on four devices holds half the heads of 32."""
    a100, h100, large = (
        closed_form(name) for name in ("llama-2-7b-a100", "llama-2-7b-h100", "llama-2-70b-a100-tp4")
    )
    np.testing.assert_allclose(h100.decode[1:], a100.decode[1:] * 0.1699 / 0.2659, rtol=3e-3)
    np.testing.assert_allclose(h100.prefill[1:], a100.prefill[1:] * 5.49e-4 / 2.003e-3, rtol=3e-3)
    np.testing.assert_allclose(large.prefill, 0.5 * a100.prefill, rtol=1e-12)


@pytest.mark.parametrize("name", FORMS)
def test_closed_forms_are_tables(name: str) -> None:
    tables = closed_form(name)
    assert (np.diff(tables.linear[8:513:8]) > 0).all()
    assert tables.blocks == FORMS[name].blocks


def test_the_closed_form_by_hand() -> None:
    """Llama-2-7B at 512 tokens: ((.2659 + .601)^5.52 + (1.0255)^5.52)^(1/5.52)."""
    low, high = 0.2659 + 1.174e-3 * 512, 2.003e-3 * 512
    assert closed_form("llama-2-7b-a100").linear[512] == pytest.approx(
        (low**5.52 + high**5.52) ** (1 / 5.52)
    )
