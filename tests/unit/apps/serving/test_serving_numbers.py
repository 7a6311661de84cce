"""The simulator's numbers by hand: paces of stretches, cached tokens, and reports in turn."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_toys import one_by_one, toy_tables

from keel.apps.serving import fields as f
from keel.apps.serving.cluster import Cluster, Replica
from keel.apps.serving.kernels_vector import write_observation
from keel.apps.serving.observations import REPLICA
from keel.apps.serving.settings import Scenario, draw_scenario, make_setting
from keel.apps.serving.simulation import Conditions, replay
from keel.apps.serving.vector_clusters import VectorClusters
from keel.apps.serving.workload import Workload, make_workload

TABLES = toy_tables()
READ = 1e-3 * (TABLES.linear[16] + TABLES.decode[1, 1] + TABLES.prefill[0, 10])
"""Seconds of an iteration in which one request writes and ten tokens of another are read."""
ONE, TWO = (1e-3 * (TABLES.linear[8] + TABLES.decode[n, 1]) for n in (1, 2))
"""Seconds of an iteration in which one request writes, or two, with up to 64 tokens each."""
LONGER = 1e-3 * (TABLES.linear[8] + TABLES.decode[1, 2])
"""The same of one request with 65 to 128 tokens."""


def pace_of(workload: Workload) -> float:
    found = replay(Cluster((Replica(TABLES),)), workload, [0] * len(workload))
    return float(found.replicas.times[f.R_PACE, 0])


# --- the pace of a stretch ------------------------------------------------------------------------


def test_a_pace_rises_by_a_hundredth_with_every_iteration_of_a_stretch() -> None:
    """60 tokens are read, which writes the first of 14. Four more stand at 61 to 64 tokens of KV
    cache, and set the pace; nine at 65 to 73, which take longer, move it by 1 − 0.99⁹."""
    kept = 0.99**9
    assert LONGER > ONE
    assert pace_of(make_workload([0.0], [60], [14])) == pytest.approx(
        kept * ONE + (1 - kept) * LONGER, rel=1e-12
    )


def test_a_pace_falls_by_a_fifth_with_every_iteration_of_a_stretch() -> None:
    """The second request is read while the first one writes its second token: that sets the pace.
    One iteration writes for both, then the first is through, and six write for the second alone."""
    assert ONE < TWO < READ
    both = 0.8 * READ + 0.2 * TWO
    kept = 0.8**6
    assert pace_of(make_workload([0.0, 0.0], [10, 10], [3, 8])) == pytest.approx(
        kept * both + (1 - kept) * ONE, rel=1e-12
    )


def test_a_stretch_that_is_cut_counts_the_iterations_that_were_made() -> None:
    """As above, but a request of a single token comes in the third of the nine longer iterations:
    three are made of that stretch, one reads ten tokens beside, and five are left."""
    read = 1e-3 * (TABLES.linear[64] + TABLES.prefill[0, 60])
    beside = 1e-3 * (TABLES.linear[16] + TABLES.decode[1, 2] + TABLES.prefill[0, 10])
    workload = make_workload([0.0, read + 4 * ONE + 2.5 * LONGER], [60, 10], [14, 1])
    pace = ONE
    for kept, spent in ((0.99**3, LONGER), (0.99, beside), (0.99**5, LONGER)):
        assert spent > pace
        pace = kept * pace + (1 - kept) * spent
    assert pace_of(workload) == pytest.approx(pace, rel=1e-12)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.floats(1e-4, 0.1), st.integers(1, 700), st.integers(1, 200)),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([130, 4_000]),
)
def test_paces_seconds_and_tokens_are_those_of_the_plain_simulation(
    drawn: list[tuple[float, int, int]], blocks: int
) -> None:
    """Iteration by iteration, the pace follows every gap between two tokens."""
    arrival = np.cumsum([gap for gap, _, _ in drawn])
    workload = make_workload(arrival, [p for _, p, _ in drawn], [o for _, _, o in drawn])
    cluster = Cluster((Replica(TABLES, blocks=blocks),))
    found = replay(cluster, workload, [0] * len(workload)).replicas
    told: dict[str, float] = {}
    one_by_one(TABLES, workload, blocks, told=told)
    assert found.times[f.R_PACE, 0] == pytest.approx(told["pace"], rel=1e-9)
    assert found.times[f.R_BUSY, 0] == pytest.approx(told["busy"], rel=1e-9)
    assert found.ints[f.R_DONE_TOKENS, 0] == told["tokens"]


# --- batches --------------------------------------------------------------------------------------


def test_prompts_that_are_read_together_count_by_the_root_of_their_squares() -> None:
    """Two prompts of one token come while a third is read: √(1 + 1) rounds to 1."""
    first = 1e-3 * (TABLES.linear[64] + TABLES.prefill[0, 60])
    both = 1e-3 * (TABLES.linear[8] + TABLES.prefill[0, 1])
    workload = make_workload([0.0, first / 3, first / 2], [60, 1, 1], [1, 1, 1])
    ends = replay(Cluster((Replica(TABLES),)), workload, [0] * 3).requests.times[f.Q_FINISHED]
    assert ends.tolist() == pytest.approx([first, first + both, first + both])


@pytest.mark.parametrize("order", ["sarathi", "vllm"])
def test_memory_is_filled_up_to_its_watermark(order: str) -> None:
    """Of 40 blocks 12 are left free: 447 tokens and the one that is written fill the other 28."""
    cluster = Cluster((Replica(TABLES, blocks=40),), order=order, watermark=0.3)  # type: ignore[arg-type]
    requests = replay(cluster, make_workload([0.0, 1.0], [447, 448], [1, 1]), [0, 0]).requests
    assert requests.ints[f.Q_LOST].tolist() == [0, 1]
    spent = 1e-3 * (TABLES.linear[448] + TABLES.prefill[0, 447])
    assert requests.times[f.Q_FINISHED].tolist() == pytest.approx([spent, 1.0])


# --- cached tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["sarathi", "vllm"])
@pytest.mark.parametrize(
    ("prompt", "names", "hit"),
    [
        (100, [0, 1, 2, 3, 4, 5], 96),
        (96, [0, 1, 2, 3, 4, 5], 95),  # its last token is read, though all of it is known
        (100, [0, 1, 9, 3, 4, 5], 32),  # what comes after a block that is not known is not known
        (100, [9, 1, 2, 3, 4, 5], 0),
    ],
)
def test_tokens_that_are_cached_are_blocks_at_the_begin_of_a_prompt(
    order: str, prompt: int, names: list[int], hit: int
) -> None:
    """The second request shares blocks of 16 with the first; what is left of it is read at once,
    against a KV cache of as many entries of 64 as hold what was known."""
    workload = make_workload(
        [0.0, 10.0], [100, prompt], [2, 2], [0, 6, 12], [0, 1, 2, 3, 4, 5, *names], 16
    )
    cluster = Cluster((Replica(TABLES, cache=20),), order=order)  # type: ignore[arg-type]
    found = replay(cluster, workload, [0, 0]).requests
    assert found.ints[f.Q_HIT].tolist() == [0, hit]
    rest = prompt - hit
    entry = math.ceil(hit / 64)
    spent = 1e-3 * (TABLES.linear[math.ceil(rest / 8) * 8] + TABLES.prefill[entry, rest])
    assert found.times[f.Q_FIRST_TOKEN, 1] == pytest.approx(10.0 + spent)


def test_a_cache_holds_the_first_blocks_of_a_prompt_that_is_longer() -> None:
    """Of six blocks, four: the begin of a prompt is what others share."""
    workload = make_workload([0.0, 10.0], [100, 100], [2, 2], [0, 6, 12], [*range(6)] * 2, 16)
    found = replay(Cluster((Replica(TABLES, cache=4),)), workload, [0, 0])
    assert found.requests.ints[f.Q_HIT].tolist() == [0, 64]
    assert found.replicas.ints[f.R_CACHED, 0] == 4


# --- what a router sees ---------------------------------------------------------------------------


def seen(view: SimpleNamespace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Replicas, request and mask at time 4 for a prompt of 512 tokens."""
    count = view.ints.shape[1]
    replicas, request, mask = np.zeros((count, 11)), np.zeros(2), np.zeros(count, bool)
    getattr(write_observation, "py_func", write_observation)(
        4.0, 512, view, replicas, request, mask
    )
    return replicas, request, mask


def test_what_a_router_sees_by_hand() -> None:
    """Paces of e and 1/e times what is usual: 1 and -1, and 0 for the second replica, which tells
    none. It is down: the seven requests of the first are 3½ for each that lives."""
    view = SimpleNamespace(ints=np.zeros((f.V_INTS, 3), int), times=np.zeros((f.V_TIMES, 3)))
    view.ints[f.V_UP] = [1, 0, 1]
    view.ints[f.V_WAITING], view.ints[f.V_RUNNING, 0], view.ints[f.V_SENT, 0] = [3, 1, 0], 2, 2
    view.ints[f.V_UNREAD, 0], view.ints[f.V_SENT_TOKENS, 0], view.ints[f.V_HIT, 0] = 400, 112, 128
    view.times[f.V_MEMORY, 0], view.times[f.V_REPORTED, 0] = 0.25, 1.0
    view.times[f.V_PACE] = [0.02 * math.e, 0.0, 0.02 / math.e]
    replicas, request, mask = seen(view)
    two, three, four, five, eight = map(math.log, (2, 3, 4, 5, 8))
    both = math.log(1 + (400 + 112 + 384) / 512)
    busy = [eight, three, two, 0.25, 1, 0.25, math.log(1.75), three, four, eight + 1, both + 1]
    assert replicas[0].tolist() == pytest.approx(busy)
    down = [two, 0, 0, 0, 0, 0, two, 0, five, two, two]
    assert replicas[1].tolist() == pytest.approx(down, abs=1e-12)
    assert replicas[2].tolist() == pytest.approx([0, 0, 0, 0, -1, 0, two, 0, five, -1, two - 1])
    assert request.tolist() == pytest.approx([two, math.log(4.5)])
    assert mask.tolist() == [True, False, True]


def test_where_no_replica_is_up_any_may_be_chosen() -> None:
    view = SimpleNamespace(ints=np.zeros((f.V_INTS, 2), int), times=np.zeros((f.V_TIMES, 2)))
    view.ints[f.V_WAITING] = 9
    replicas, request, mask = seen(view)
    assert mask.tolist() == [True, True]
    assert request.tolist() == [math.log(2), 0.0]
    assert replicas[:, 4].tolist() == [0.0, 0.0]  # the pace that is usual


# --- reports --------------------------------------------------------------------------------------


def scene_of(
    arrival: list[float],
    *,
    replicas: int = 4,
    interval: float,
    dropped: float = 0.0,
    prompt: int = 200,
    output: int = 2,
) -> VectorClusters:
    """Requests with the same three blocks of 64 tokens, in a cluster that reports in turn."""
    count = len(arrival)
    setting = make_setting(
        "mixed", replicas=replicas, requests=count, speed=(1.0, 1.0), cache=(9.0, 9.0)
    )
    many = VectorClusters(setting, 1)
    workload = make_workload(
        arrival, [prompt] * count, [output] * count, np.arange(0, 3 * count + 1, 3),
        [0, 1, 2] * count, 64,
    )  # fmt: skip
    conditions = Conditions(interval=interval, dropped=dropped)
    many.begin(0, Scenario(draw_scenario(setting, 0).cluster, workload, conditions), seed=3)
    many.observe(many.all)
    return many


def reported(many: VectorClusters) -> list[float]:
    return many.view.times[0, f.V_REPORTED].tolist()


@pytest.mark.parametrize("unit", [1.0, 2.0])
def test_replicas_report_in_turn(unit: float) -> None:
    """Four of them, once a second: at 0, 0.25, 0.5 and 0.75 seconds after every full one. Before
    its first report a replica is known as it was at the start. Once in two seconds: likewise."""
    many = scene_of([unit * x for x in (0.3, 0.6, 1.0, 10.1)], interval=unit)
    expected = [
        (0.3, [0.0, 0.25, 0.0, 0.0]),
        (0.6, [0.0, 0.25, 0.5, 0.0]),
        (1.0, [1.0, 0.25, 0.5, 0.75]),
        (10.1, [10.0, 9.25, 9.5, 9.75]),
    ]
    for now, times in expected:
        assert reported(many) == pytest.approx([unit * x for x in times])
        age = many.observations[0][0, :, REPLICA.index("age")]
        np.testing.assert_allclose(age, np.log1p(unit * (now - np.array(times))), rtol=1e-5)
        many.step(np.array([0]))


def test_what_was_sent_is_counted_until_the_next_report_without_what_is_cached() -> None:
    """To the third replica at 0.6, 0.7 and 0.8: of the first prompt all 200 tokens count, of the
    others 200 − 3 · 64 = 8. Its report at 1.5 has all of them, and nothing was sent since."""
    many = scene_of([0.6, 0.7, 0.8, 1.49, 1.5], interval=1.0)
    sent = []
    for choice in (2, 2, 2, 0, 0):
        sent.append(
            tuple(int(many.view.ints[0, row, 2]) for row in (f.V_HIT, f.V_SENT, f.V_SENT_TOKENS))
        )
        many.step(np.array([choice]))
    assert sent == [(0, 0, 0), (192, 1, 200), (192, 2, 208), (192, 3, 216), (192, 0, 0)]


def test_a_report_tells_how_it_was_when_it_was_made() -> None:
    """A request that runs at the time of the report and has ended by now is still running in it."""
    ends = scene_of([0.0, 100.0], replicas=1, interval=1.0, output=150)
    ends.step(np.array([0]))
    end = ends.requests.times[0, f.Q_FINISHED, 0]
    assert 0.05 < end % 1.0 < 0.9
    many = scene_of([0.0, math.floor(end) + 0.95], replicas=1, interval=1.0, output=150)
    many.step(np.array([0]))
    assert not math.isnan(many.requests.times[0, f.Q_FINISHED, 0])
    assert reported(many) == [math.floor(end)]
    assert many.view.ints[0, f.V_RUNNING].tolist() == [1]
    assert many.view.times[0, f.V_PACE, 0] > 0.0


def test_a_share_of_reports_is_lost_and_the_one_before_stands() -> None:
    """Ages are whole intervals, and half of the reports come through."""
    many = scene_of([float(x) for x in range(1, 301)], replicas=4, interval=1.0, dropped=0.5)
    fresh = []
    for now in range(1, 300):
        phase = np.arange(4) / 4
        late = now - many.view.times[0, f.V_REPORTED] - np.where(phase > 0, 1.0 - phase, 0.0)
        known = many.view.times[0, f.V_REPORTED] > 0
        np.testing.assert_allclose(late[known], np.round(late[known]), atol=1e-9)
        fresh.append(late[known] < 0.5)
        many.step(np.array([0]))
    assert np.concatenate(fresh).mean() == pytest.approx(0.5, abs=0.05)
