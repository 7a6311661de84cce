"""A replica: by hand, and against a plain simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_toys import one_by_one, toy_tables

from keel.apps.serving import fields as f
from keel.apps.serving.cluster import Cluster, Replica, equal_cluster
from keel.apps.serving.simulation import replay
from keel.apps.serving.workload import make_workload
from keel.errors import InputError


def alone(workload, **replica):
    tables = replica.pop("tables", toy_tables())
    return replay(Cluster((Replica(tables, **replica),)), workload, [0] * len(workload)).requests


def test_one_request_by_hand() -> None:
    """600 tokens are read as 512 and 88; the second part ends with the first token, so of three
    tokens two are decoded, at 601 and 602 tokens of KV cache (entry 10)."""
    found = alone(make_workload([1.0], [600], [3]))
    tables = toy_tables()
    first = tables.linear[512] + tables.prefill[0, 512]
    second = tables.linear[88] + tables.prefill[8, 88]
    decode = tables.linear[8] + tables.decode[1, 10]
    assert found.times[f.Q_FIRST_TOKEN, 0] == pytest.approx(1.0 + 1e-3 * (first + second))
    expected = 1.0 + 1e-3 * (first + second + 2 * decode)
    assert found.times[f.Q_FINISHED, 0] == pytest.approx(expected)


def test_speed_divides_times() -> None:
    workload = make_workload([0.0, 0.001], [300, 700], [20, 5])
    slow, fast = (alone(workload, speed=s).times[f.Q_FINISHED] for s in (1.0, 4.0))
    first = alone(make_workload([0.0], [300], [20]), speed=4.0).times[f.Q_FINISHED]
    assert first[0] == pytest.approx(
        alone(make_workload([0.0], [300], [20])).times[f.Q_FINISHED][0] / 4.0
    )
    assert (fast < slow).all()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(1e-4, 0.3), st.integers(1, 1500), st.integers(1, 300)),
        min_size=1,
        max_size=14,
    ),
    st.sampled_from([130, 180, 4_000]),
    st.booleans(),
)
def test_it_is_the_plain_simulation(
    drawn: list[tuple[float, int, int]], blocks: int, grouped: bool
) -> None:
    """Stretches of equal iterations, cut by arrivals, with memory that runs out: as one by one."""
    arrival = np.cumsum([gap for gap, _, _ in drawn])
    workload = make_workload(arrival, [p for _, p, _ in drawn], [o for _, _, o in drawn])
    tables = toy_tables(grouped)
    found = alone(workload, tables=tables, blocks=blocks)
    expected = one_by_one(tables, workload, blocks)
    assert found.ints[f.Q_RESTARTS].tolist() == [x["restarts"] for x in expected]
    np.testing.assert_allclose(
        found.times[f.Q_FIRST_TOKEN], [x["first"] for x in expected], rtol=1e-9
    )
    np.testing.assert_allclose(found.times[f.Q_FINISHED], [x["end"] for x in expected], rtol=1e-9)


@pytest.mark.parametrize(("blocks", "most"), [(40, 8), (40, 128), (30, 16)])
def test_little_memory_and_short_iterations_are_as_in_the_plain_simulation(
    blocks: int, most: int
) -> None:
    """Some requests restart again and again while others come, and prompts are read bit by bit."""
    rng = np.random.default_rng(blocks + most)
    arrival = np.cumsum(rng.uniform(1e-4, 5e-2, 10))
    workload = make_workload(arrival, rng.integers(20, 90, 10), rng.integers(30, 90, 10))
    tables = toy_tables()
    cluster = Cluster((Replica(tables, blocks=blocks),), chunk=most, cap=most)
    found = replay(cluster, workload, [0] * 10).requests
    expected = one_by_one(tables, workload, blocks, most, most)
    assert found.ints[f.Q_RESTARTS].tolist() == [x["restarts"] for x in expected]
    ends = [x["end"] for x in expected]
    np.testing.assert_allclose(found.times[f.Q_FINISHED], ends, rtol=1e-9)


def test_memory_runs_out_and_the_last_restarts() -> None:
    """Both hold 100 tokens (7 blocks) and would end with 12: 17 blocks are not enough. The first
    one is never in the way of itself."""
    workload = make_workload([0.0, 0.0], [100, 100], [80, 80])
    found = alone(workload, blocks=17)
    assert found.ints[f.Q_RESTARTS, 0] == 0
    assert found.ints[f.Q_RESTARTS, 1] >= 1
    assert found.times[f.Q_FINISHED, 1] > found.times[f.Q_FINISHED, 0]


def test_what_can_never_fit_is_turned_away() -> None:
    found = alone(make_workload([0.0], [4_000], [200]), blocks=200)
    assert found.ints[f.Q_LOST].tolist() == [1]


def test_a_whole_prompt_that_is_longer_than_the_table_is_read_in_parts() -> None:
    """700 tokens at once: attention of 512, then of 188 beside them; and all is done."""
    tables = toy_tables()
    cluster = Cluster((Replica(tables),), order="vllm")
    found = replay(cluster, make_workload([0.0], [700], [1]), [0])
    attention = tables.prefill[0, 512] + tables.prefill[8, 188]
    expected = 1e-3 * (tables.linear[704] + attention)
    assert found.requests.times[f.Q_FINISHED, 0] == pytest.approx(expected)
    assert (found.replicas.ints[f.R_SIZE, 0], found.replicas.ints[f.R_ASIDE, 0]) == (0, 0)


def test_prompts_first_in_the_order_of_vllm() -> None:
    """A prompt that comes while another decodes stops it for one iteration, whole."""
    tables = toy_tables()
    workload = make_workload([0.0, 0.02], [400, 400], [50, 5])
    cluster = Cluster((Replica(tables),), order="vllm")
    found = replay(cluster, workload, [0, 0]).requests
    chunked = replay(Cluster((Replica(tables),)), workload, [0, 0]).requests
    read = 1e-3 * (tables.linear[400] + tables.prefill[0, 400])
    waits = found.times[f.Q_FIRST_TOKEN, 1] - 0.02
    assert read <= waits < read + 2e-3
    assert waits < chunked.times[f.Q_FIRST_TOKEN, 1] - 0.02 + 1e-3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Cluster(()), "at least one replica"),
        (lambda: Replica(toy_tables(), speed=0.0), "speed"),
        (lambda: equal_cluster(toy_tables(), 2, chunk=4_000), "chunk"),
        (lambda: replay(equal_cluster(toy_tables(), 2), make_workload([0.0], [1], [1]), [2]),
         "from 0 to 1"),
        (lambda: make_workload([1.0, 0.0], [1, 1], [1, 1]), "in their order"),
        (lambda: make_workload([0.0], [0], [1]), "at least one token"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
