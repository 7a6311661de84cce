"""The live router against real servers on this machine: nothing is mocked but the replicas."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from children import default_signals
from live_toys import COMPLETIONS, Toy, live, prefer, routed, toys

from keel.apps.serving import fields as f
from keel.apps.serving import kernels_route, kernels_vector
from keel.apps.serving.arrays import Telemetry, View, blank_view
from keel.apps.serving.live.backends import (
    Backend,
    BackendReport,
    InFlightRequest,
    make_backends,
    read_report,
    view_of,
)
from keel.apps.serving.live.guarded_policy import (
    GuardedPolicy,
    Guards,
    heuristic_costs,
    observe,
    reference_probs,
)
from keel.apps.serving.live.prompts import Prefixes, Prompt, read_prompt
from keel.apps.serving.observations import REPLICA, REQUEST
from keel.apps.serving.simulation import ROUTERS
from keel.cli import main
from keel.cli.route import Route
from keel.errors import InputError

# What the policy sees


def random_view(rng: np.random.Generator, count: int) -> View:
    view = blank_view(count)
    view.ints[:] = rng.integers(0, 30, view.ints.shape)
    view.ints[f.V_UNREAD] *= 100
    view.ints[f.V_UP] = rng.integers(0, 2, count)
    view.times[:] = rng.random(view.times.shape)
    view.times[f.V_PACE] *= rng.integers(0, 2, count)
    return view


@pytest.mark.parametrize("count", [1, 4, 13])
def test_the_policy_sees_what_it_was_trained_on(count: int) -> None:
    rng = np.random.default_rng(count)
    for _ in range(20):
        view, prompt, now = random_view(rng, count), int(rng.integers(30, 5_000)), 0.7
        replicas = np.zeros((count, len(REPLICA)), dtype=np.float32)
        request, mask = np.zeros(len(REQUEST), dtype=np.float32), np.zeros(count, dtype=bool)
        kernels_vector.write_observation.py_func(now, prompt, view, replicas, request, mask)
        own = observe(view, prompt, now)
        np.testing.assert_allclose(own[0], replicas, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(own[1], request, rtol=1e-6)


def test_references_are_the_simulators_heuristics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_route, "speed_of", kernels_route.speed_of.py_func)
    rng = np.random.default_rng(0)
    for name in ("least-outstanding", "least-by-speed", "token-work", "local-count", "sticky",
                 "cache-work", "cache-work-by-speed"):  # fmt: skip
        view, prompt = random_view(rng, 6), 700
        told = Telemetry(0.0, 0.0, 0, 256.0, 0)
        requests = type("Requests", (), {"ints": np.full((f.Q_INTS, 1), prompt)})
        kind = list(ROUTERS).index(name)
        expected = [
            kernels_route.heuristic_cost.py_func(kind, r, 0, None, told, requests, view)
            for r in range(6)
        ]
        np.testing.assert_allclose(heuristic_costs(name, view, prompt, 256.0), expected, rtol=1e-12)


def test_odds_of_references_by_hand() -> None:
    view = blank_view(4)
    view.ints[f.V_RUNNING] = [2, 1, 1, 0]
    up = np.array([True, True, True, False])

    def odds(name: str) -> list[float]:
        return reference_probs(name, view, 10, 256.0, up).tolist()

    assert odds("least-outstanding") == [0.0, 0.5, 0.5, 0.0]
    assert odds("round-robin") == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])
    # Nine pairs: the first wins against itself alone, the others split the rest.
    assert odds("power-of-two") == pytest.approx([1 / 9, 4 / 9, 4 / 9, 0.0])


def test_a_prompt_is_read_from_every_kind_of_body() -> None:
    def tokens(asked: object) -> int:
        return read_prompt(json.dumps(asked).encode()).tokens

    assert tokens({"prompt": "x" * 400}) == 100
    assert tokens({"prompt": ["x" * 40, "y" * 40]}) == 20
    assert tokens({"prompt": [5, 6, 7]}) == 3
    assert tokens({"messages": [{"role": "user", "content": "x" * 396}]}) == 100
    part = {"type": "image_url", "image_url": {"url": "data:" + "A" * 10_000}}
    content = [{"type": "text", "text": "x" * 396}, part]
    assert tokens({"messages": [{"role": "user", "content": content}]}) == 100
    assert tokens({}) == tokens({"prompt": None}) == 1
    assert read_prompt(b"\xff" * 40).tokens == 10
    assert read_prompt(b"[" * 100_000).tokens == 25_000


def test_prefixes_are_chains_and_the_oldest_go_first() -> None:
    first = read_prompt(json.dumps({"prompt": "a" * 256 + "b" * 256 + "c" * 256}).encode())
    same_begin = read_prompt(json.dumps({"prompt": "a" * 256 + "B" * 256 + "c" * 256}).encode())
    other_model = json.dumps({"model": "m", "prompt": "a" * 768}).encode()
    known = Prefixes(4)
    known.add(first)
    assert known.hit(first) == first.tokens - 1  # the last token is always read
    assert known.hit(same_begin) == 64  # the third piece is equal, its chain is not
    assert known.hit(read_prompt(other_model)) == 0
    known.add(same_begin)  # five pieces in four places: the end of the older one goes
    assert known.hit(same_begin) == same_begin.tokens - 1
    assert known.hit(first) == 128


def test_flights_keep_the_counts_of_a_backend_right() -> None:
    backend = Backend("http://b:1", 1_000)
    prompt = Prompt(100)
    one, other = InFlightRequest(backend, prompt, 0.0), InFlightRequest(backend, prompt, 0.0)
    assert (backend.waiting, backend.running, backend.to_read, backend.held) == (2, 0, 200, 200)
    one.begin()
    one.stream(b"data: 1\n\n", 1.0, 1.0)
    one.stream(b"data: 2\n\ndata: 3\n\n", 1.2, 0.2)
    assert backend.pace == pytest.approx(0.1)  # two events in 0.2 s
    one.stream(b"data: 4\n\n", 9.0, 0.1)  # the client was slow, not the server
    assert backend.pace == pytest.approx(0.1)
    assert (backend.waiting, backend.running, backend.to_read, backend.held) == (1, 1, 100, 204)
    view = view_of([backend], prompt, 1.0)
    assert view.times[:, 0].tolist() == pytest.approx([0.204, 0.1, 1.0])
    one.end()
    other.end()
    assert (backend.in_flight, backend.to_read, backend.held) == (0, 0, 0)


REPORT = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="0"} 3.0
vllm:num_requests_running{model_name="m",engine="1"} 4.0
vllm:num_requests_waiting{model_name="m"} 2.0
vllm:kv_cache_usage_perc{model_name="m"} 0.25
"""


def test_reports_by_vllms_names() -> None:
    assert read_report(REPORT, 1.0) == BackendReport(1.0, 7, 2, 0.25)
    older = REPORT.replace("kv_cache", "gpu_cache")
    assert read_report(older, 1.0) == BackendReport(1.0, 7, 2, 0.25)
    assert read_report("up 1\nvllm:num_requests_running nonsense\n", 1.0) is None


def test_a_report_counts_until_it_is_old() -> None:
    backend = Backend("http://b:1", 1_000)
    backend.update(BackendReport(1.0, 7, 2, 0.25))
    InFlightRequest(backend, Prompt(50), 1.5)
    view = view_of([backend], Prompt(10), 2.0, poll=1.0)
    assert view.ints[:, 0].tolist() == [2, 7, 0, 1, 50, 1, 0]
    assert view.times[:, 0].tolist() == [0.25, 0.0, 1.0]
    backend.update(BackendReport(1.8, 8, 2, 0.25))  # has seen that request
    assert view_of([backend], Prompt(10), 2.0, poll=1.0).ints[f.V_SENT, 0] == 0
    late = view_of([backend], Prompt(10), 9.0, poll=1.0)
    assert late.ints[:2, 0].tolist() == [1, 0]
    assert late.times[f.V_REPORTED, 0] == 9.0


# Guards


def decide(guarded_policy: GuardedPolicy, times: int) -> list[str]:
    view, up = blank_view(guarded_policy.count), np.ones(guarded_policy.count, dtype=bool)
    return [guarded_policy(view, 10, 0.0, up).fallback for _ in range(times)]


def test_a_policy_far_from_the_reference_is_overruled(caplog: pytest.LogCaptureFixture) -> None:
    guards = Guards(max_kl=0.5, max_share=1.0, deadline=1.0)
    guarded_policy = GuardedPolicy(4, prefer(9.0, 0.0, 0.0, 0.0), guards=guards, seed=0)
    with caplog.at_level(logging.WARNING, "keel.route"):
        found = decide(guarded_policy, 100)
    assert found == [""] * 19 + ["kl"] * 81  # from the twentieth decision on
    assert guarded_policy.kl() == pytest.approx(np.log(4.0), abs=0.01)
    assert [x.message for x in caplog.records] == [
        "FALLING BACK to least-outstanding: the policy is farther from the reference than --max-kl"
    ]
    guarded_policy.policy = prefer(0.0, 0.0, 0.0, 0.0)
    assert decide(guarded_policy, 400)[-1] == ""  # well again when the window has forgotten
    assert guarded_policy.falling_back() == ()


def test_the_share_of_a_backend_is_bounded() -> None:
    guards = Guards(max_kl=100.0, max_share=0.6, deadline=1.0)
    guarded_policy = GuardedPolicy(4, prefer(9.0, 0.0, 0.0, 0.0), guards=guards, seed=0)
    found = decide(guarded_policy, 600)
    assert set(found) == {"", "share"}
    assert guarded_policy.decisions.shares()[0] == pytest.approx(0.6, abs=0.02)
    assert guarded_policy.episodes == {"share": 1}  # to and fro at the bound is one episode


def test_a_single_living_backend_may_have_it_all() -> None:
    guarded_policy = GuardedPolicy(2, prefer(9.0, 0.0), guards=Guards(deadline=1.0))
    view, up = blank_view(2), np.array([True, False])
    found = {guarded_policy(view, 10, 0.0, up).fallback for _ in range(100)}
    assert found == {""}


def failing(replicas: object, request: object) -> Any:
    raise RuntimeError("sick")


def slow(replicas: object, request: object) -> Any:
    time.sleep(0.003)
    return np.zeros(4, dtype=np.float32)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (None, "no_policy"),
        (failing, "error"),
        (slow, "slow"),
        (prefer(np.nan, 0.0, 0.0, 0.0), "not_finite"),
        (prefer(np.inf, 0.0, 0.0, 0.0), "not_finite"),
        (prefer(1.0, 2.0), "error"),
    ],
)
def test_a_sick_policy_is_overruled_and_soon_rests(policy: Any, reason: str) -> None:
    calls = 0

    def counted(replicas: Any, request: Any) -> Any:
        nonlocal calls
        calls += 1
        return policy(replicas, request)

    guarded_policy = GuardedPolicy(4, policy and counted, "round-robin", Guards(deadline=0.002))
    assert decide(guarded_policy, 50) == [reason] * 50
    assert calls == (3 if policy else 0)  # then it rests
    assert guarded_policy.decisions.sum.tolist() == [13.0, 13.0, 12.0, 12.0]


def test_a_policy_is_asked_again_after_its_rest() -> None:
    now = [0.0]
    guarded_policy = GuardedPolicy(4, failing, clock=lambda: now[0])
    decide(guarded_policy, 3)
    guarded_policy.policy = prefer(0.0, 0.1, 0.0, 0.0)
    assert decide(guarded_policy, 1) == ["error"]
    now[0] = 1.1
    assert decide(guarded_policy, 1) == [""]


# Through real sockets


@live
async def test_a_stream_passes_unbuffered_and_byte_for_byte() -> None:
    async with toys("a") as (a,), routed([a]) as router:
        a.may_go_on.clear()
        where = router.address + COMPLETIONS
        async with router.client.post(where, json={"prompt": "x", "stream": True}) as answer:
            first = await asyncio.wait_for(answer.content.readany(), 5.0)
            assert first == a.event(0)  # while the server still holds the rest back
            assert answer.headers["Content-Type"] == "text/event-stream"
            a.may_go_on.set()
            assert first + await answer.read() == a.stream()
        assert json.loads(a.bodies[0]) == {"prompt": "x", "stream": True}


@live
async def test_any_method_and_path_with_headers_kept() -> None:
    async with toys("a") as (a,), routed([a]) as router:
        sent = {"Authorization": "Bearer k", "Connection": "X-Hop", "X-Hop": "1", "TE": "trailers"}
        path = "/v1/models/a%2Fb?x=%20y&x=2"
        async with router.client.get(
            aiohttp.client.URL(router.address + path, encoded=True), headers=sent
        ) as answer:
            told = await answer.json()
            assert answer.headers["X-Own"] == "kept"
        assert told == {"server": "a", "path": path, "method": "GET"}
        assert a.headers["Authorization"] == "Bearer k"
        assert a.headers["Host"] == a.url.removeprefix("http://")
        assert not {"X-Hop", "TE"} & set(a.headers)
        async with router.client.head(router.address + "/x") as answer:
            assert (answer.status, await answer.read()) == (200, b"")
        async with router.client.delete(router.address + "/x") as answer:
            assert (await answer.json())["method"] == "DELETE"


@live
async def test_the_choice_follows_the_policy() -> None:
    async with toys("a", "b", "c") as servers, routed(servers, prefer(0.0, 2.0, 1.0)) as router:
        assert [await router.who() for _ in range(5)] == ["b"] * 5
        router.router.guarded_policy.policy = lambda replicas, request: (
            -replicas[:, 0]
        )  # outstanding
        servers[0].may_go_on.clear()
        servers[1].may_go_on.clear()
        held = [asyncio.ensure_future(router.who()) for _ in range(2)]
        while sum(own.in_flight for own in router.router.backends) < 2:
            await asyncio.sleep(0.01)
        assert await router.who() == "c"
        for toy in servers:
            toy.may_go_on.set()
        assert sorted(await asyncio.gather(*held)) == ["a", "b"]


@live
async def test_the_pace_and_the_cache_are_learned_from_traffic() -> None:
    async with toys("a", gap=0.02) as (a,), routed([a]) as router:
        await router.ask("x" * 1_024)
        own = router.router.backends[0]
        assert 0.015 < own.pace < 0.2
        assert own.prefixes.hit(read_prompt(json.dumps({"prompt": "x" * 2_048}).encode())) == 256
        assert (own.in_flight, own.held) == (0, 0)


@live
async def test_killed_servers_lose_nothing_that_a_retry_can_save() -> None:
    async with toys("a", "b", "c") as servers, routed(servers, prefer(2.0, 1.0, 0.0)) as router:
        assert await router.who() == "a"
        await servers[0].stop()
        assert [await router.who() for _ in range(5)] == ["b"] * 5
        metrics = router.router.metrics
        assert metrics.value("retries_total", backend=servers[0].url) == 1  # then it was out
        assert [own.up for own in router.router.backends] == [False, True, True]


@pytest.mark.parametrize("mode", ["busy", "reset", "empty", "hang"])
def test_whatever_happens_before_the_first_byte_is_tried_elsewhere(mode: str) -> None:
    async def test() -> None:
        async with (
            toys("a", "b") as (a, b),
            routed([a, b], prefer(1.0, 0.0), silent_seconds=0.3) as router,
        ):
            a.mode = mode
            assert await router.who() == "b"
            assert (a.asked, b.asked) == (1, 1)
            assert router.router.metrics.value("retries_total") == 1

    live(test)()


@live
async def test_what_breaks_after_the_first_byte_breaks_for_the_client() -> None:
    async with toys("a", "b") as (a, b), routed([a, b], prefer(1.0, 0.0)) as router:
        a.mode = "broken"
        seen: list[bytes] = []
        with pytest.raises(aiohttp.ClientPayloadError):
            await router.listen(seen)
        assert b"".join(seen) == a.event(0) + a.event(1)
        assert b.asked == 0
        assert router.router.metrics.value("broken_total", backend=a.url) == 1
        assert router.router.metrics.value("retries_total") == 0


@live
async def test_what_may_not_happen_twice_is_not_sent_twice() -> None:
    async with toys("a", "b") as (a, b), routed([a, b]) as router:
        a.mode = b.mode = "reset"
        async with router.client.patch(router.address + "/x", data=b"1") as answer:
            assert answer.status == 502
        assert a.asked + b.asked == 1


@live
async def test_a_client_that_hangs_up_ends_its_request_at_the_server() -> None:
    async with toys("a", tokens=1_000, gap=0.01) as (a,), routed([a]) as router:
        answer = await router.client.post(router.address + COMPLETIONS, json={"prompt": "x"})
        await answer.content.readany()
        answer.close()
        await asyncio.wait_for(a.left.wait(), 5.0)
        while router.router.backends[0].in_flight:
            await asyncio.sleep(0.01)
        assert router.router.backends[0].up


@live
async def test_dead_servers_are_left_out_and_come_back() -> None:
    async with toys("a", "b") as (a, b), routed([a, b], prefer(1.0, 0.0)) as router:
        await a.stop()
        assert await router.who() == "b"
        await router.until(a, up=False)
        await a.start()  # at its old port
        await router.until(a, up=True)
        assert await router.who() == "a"


@live
async def test_a_server_that_was_never_there_is_left_out_from_the_start() -> None:
    async with toys("b") as (b,):
        nobody = Toy("a")
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            nobody.port = taken.getsockname()[1]
            async with routed([nobody, b], prefer(1.0, 0.0)) as router:
                assert await router.who() == "b"
                assert router.router.metrics.value("retries_total") == 0


@live
async def test_when_nobody_is_left_the_client_is_told() -> None:
    async with toys("a", "b") as (a, b), routed([a, b]) as router:
        await a.stop()
        await b.stop()
        status, body = await router.ask()
        assert status == 502  # the last of those that were tried
        assert "the backend cannot be reached" in json.loads(body)["error"]["message"]
        status, body = await router.ask()
        assert status == 503
        assert json.loads(body)["error"]["message"] == "keel route: no backend answers"
        assert (await router.get("/keel/health"))[0] == 503
        assert (await router.get("/v1/models"))[0] == 503


@live
async def test_the_last_refusal_reaches_the_client_as_it_is() -> None:
    async with toys("a", "b") as (a, b), routed([a, b]) as router:
        a.mode = b.mode = "busy"
        status, body = await router.ask()
        assert status == 503
        assert body in (b"a is busy", b"b is busy")


@live
async def test_retries_are_counted_out() -> None:
    async with toys("a", "b", "c") as servers, routed(servers, retries=1) as router:
        for toy in servers:
            toy.mode = "reset"
        assert (await router.ask())[0] == 502
        assert sum(toy.asked for toy in servers) == 2


@live
async def test_bodies_have_an_end_and_large_ones_pass() -> None:
    async with toys("a") as (a,), routed([a], max_body=1 << 20) as router:
        assert (await router.ask("x" * 900_000))[0] == 200
        status, body = await router.ask("x" * 1_100_000)
        assert status == 413
        assert "--max-body" in json.loads(body)["error"]["message"]
        assert a.asked == 1


@live
async def test_an_address_in_the_path_is_not_followed() -> None:
    async with toys("a", "b") as (a, b), routed([a]) as router:
        port = int(router.address.rsplit(":", 1)[1])
        for target in (f"{b.url}/x", f"@127.0.0.1:{b.port}/x"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert re.match(rb"HTTP/1\.[01] 40[04]", await reader.read())
            writer.close()
        assert (a.asked, b.asked) == (0, 0)


@live
async def test_guards_fall_back_and_say_so() -> None:
    guards = Guards(max_kl=0.5, max_share=0.6, deadline=1.0)
    policy = prefer(9.0, 0.0, 0.0)
    async with toys("a", "b", "c") as servers, routed(servers, policy, guards) as router:
        found = Counter([await router.who() for _ in range(40)])
        assert found["a"] < 40
        text = (await router.get("/keel/metrics"))[1]
        assert 'keel_route_fallbacks_total{reason="kl"} 21' in text
        assert 'keel_route_fallback_episodes_total{reason="kl"} 1' in text
        assert 'keel_route_falling_back{reason="kl"} 1' in text
    far = Guards(max_kl=100.0, max_share=0.6, deadline=1.0)
    async with toys("a", "b", "c") as servers, routed(servers, policy, far) as router:
        for _ in range(40):
            await router.who()
        text = (await router.get("/keel/metrics"))[1]
        assert re.search(r'fallbacks_total{reason="share"} [1-9]', text)
        assert 'keel_route_fallback_episodes_total{reason="share"} 1' in text


def test_routing_without_a_policy_is_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "keel.route"):
        assert decide(GuardedPolicy(4), 5) == ["no_policy"] * 5
    assert caplog.records == []


def test_the_log_says_how_the_policy_failed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "keel.route"):
        decide(GuardedPolicy(4, failing), 5)
    assert [x.message for x in caplog.records] == [
        "FALLING BACK to least-outstanding: the policy failed: RuntimeError('sick')"
    ]


@live
async def test_requests_go_on_with_a_sick_policy() -> None:
    async with toys("a", "b") as servers, routed(servers, failing) as router:
        assert len([await router.who() for _ in range(5)]) == 5
        assert router.router.metrics.value("fallbacks_total", reason="error") == 5


@live
async def test_reports_are_polled() -> None:
    async with toys("a", "b") as (a, b):
        a.report = REPORT
        async with routed([a, b], poll=0.05) as router:
            while router.router.backends[0].reported is None:
                await asyncio.sleep(0.01)
            assert router.router.backends[1].reported is None
            assert await router.who() == "b"  # seven are running at the other


SAMPLE = re.compile(r'^[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? -?[0-9.e+-]+$')


@live
async def test_metrics_parse() -> None:
    async with toys("a", "b") as servers, routed(servers, prefer(1.0, 0.0)) as router:
        for _ in range(3):
            await router.who()
        status, text = await router.get("/keel/metrics")
        assert status == 200
        for line in text.splitlines():
            assert line.startswith(("# HELP keel_route_", "# TYPE keel_route_")) or SAMPLE.match(
                line.replace("+Inf", "inf")
            ), line
        a = servers[0].url
        assert f'keel_route_decisions_total{{backend="{a}",by="policy"}} 3' in text
        assert f'keel_route_up{{backend="{a}"}} 1' in text
        assert f'keel_route_in_flight{{backend="{a}"}} 0' in text
        assert f'keel_route_share{{backend="{a}"}} 1.0' in text
        assert "keel_route_decision_seconds_count 3" in text
        assert 'keel_route_overhead_seconds_bucket{le="+Inf"} 3' in text
        assert (await router.get("/keel/health"))[0] == 200
        assert (await router.get("/keel/nothing"))[0] == 404


@live
async def test_bodies_are_never_logged() -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(handler.format(record))  # type: ignore[method-assign]
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        async with toys("a", "b") as (a, b), routed([a, b], failing) as router:
            a.mode = "reset"
            await router.ask("a secret")
            port = int(router.address.rsplit(":", 1)[1])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"a secret that is no request\r\n\r\n")
            assert b" 400 " in await reader.read()
            writer.close()
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    assert seen
    assert not [line for line in seen if "secret" in line]


# The command


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["route", *words]) == 2
    return capsys.readouterr().err


A = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--backends: expected the address of at least one server"),
        (["--backends", "10.0.0.1:80"], "'10.0.0.1:80' is no address"),
        (["--backends", "ftp://a:1"], "is no address"),
        (["--backends", "http://a:1/v1"], "without path"),
        (["--backends", "http://u:p@a:1"], "without path or password"),
        (["--backends", "http://a:99999"], "is no address"),
        (["--backends", A, A + "/"], f"{A} is there twice"),
        (["--backends", A, "--port", "70000"], "--port: expected 0 to 65535"),
        (["--backends", A, "--reference", "least"], "--reference: 'least' is not one of"),
        (["--backends", A, "--max-share", "0"], "--max-share: expected"),
        (["--backends", A, "--max-kl", "nan"], "--max-kl: expected"),
        (["--backends", A, "--deadline-ms", "0"], "--deadline-ms: expected"),
        (["--backends", A, "--window", "3"], "--window: expected at least 20"),
        (["--backends", A, "--retries", "-1"], "--retries: expected"),
        (["--backends", A, "--max-body", "0"], "--max-body: expected"),
        (["--backends", A, "--header-seconds", "0"], "--header-seconds: expected more than 0"),
        (["--backends", A, "--body-seconds", "inf"], "--body-seconds: expected more than 0"),
        (["--backends", A, "--max-connections", "-1"], "--max-connections: expected more than 0"),
        (["--backends", A, "--allowed-hosts", "http://a"], "--allowed-hosts: 'http://a' is no"),
        (["--backends", A, "--allowed-hosts", "a", "b:80"], "--allowed-hosts: 'b:80' is no host"),
        (["--backends", A, "--kv-tokens", "0"], "--kv-tokens: expected"),
        (["--backends", A, "--policy", "nowhere"], "nowhere"),
    ],
)
def test_input_errors(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told in complaint(capsys, *words)


def test_a_run_on_something_else_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SimpleNamespace(path="runs/x", config=SimpleNamespace(env="CartPole-v1"))
    monkeypatch.setattr("keel.training.policy.open_policy", lambda run, checkpoint: other)
    told = complaint(capsys, "--backends", A, "--policy", "runs/x")
    assert "runs/x: was trained on CartPole-v1, not on serving" in told


def test_a_taken_port_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        error = complaint(capsys, "--backends", A, "--port", port)
    assert error.startswith(f"keel: --port {port}: is taken on 127.0.0.1")
    assert len(error.splitlines()) == 1


def test_by_default_only_this_machine_can_ask() -> None:
    assert Route().host == "127.0.0.1"


def test_equal_addresses_are_found_out_however_they_are_written() -> None:
    assert [x.url for x in make_backends(["http://A:80/", "https://a"], 1)] == [
        "http://a", "https://a",
    ]  # fmt: skip
    with pytest.raises(InputError, match="twice"):
        make_backends(["http://a", "http://A:80"], 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_what_is_under_way_and_is_told_in_the_status(number: int) -> None:
    async def test() -> None:
        async with toys("a", tokens=10, gap=0.1) as (a,):
            words = ["route", "--backends", a.url, "--port", "0"]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "keel", *words,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ),
                preexec_fn=default_signals,
            )  # fmt: skip
            try:
                assert process.stdout is not None
                assert process.stderr is not None
                line = (await process.stdout.readline()).decode()
                match = re.match(r"(http://127\.0\.0\.1:\d+) → 1 backend, by least-by-speed", line)
                assert match, line
                async with aiohttp.ClientSession() as client:
                    where = match[1] + COMPLETIONS
                    async with client.post(where, json={"prompt": "x"}) as answer:
                        first = await answer.content.readany()
                        process.send_signal(number)
                        assert first + await answer.read() == a.stream()
                assert await process.wait() == 128 + number
                lines = (await process.stderr.read()).decode().splitlines()
                assert len(lines) == 1
                assert lines[0].endswith("stopping: responses under way are finished")
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    live(test)()
