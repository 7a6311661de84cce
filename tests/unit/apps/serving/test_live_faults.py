"""Whose fault it is: bad requests do not take backends out, bad backends go."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from live_toys import Routed, Toy, live, prefer, routed, toys

from keel.apps.serving.live.failure_attribution import (
    BUSY,
    QUARANTINE,
    Failure,
    FailureRecord,
    Quarantine,
    attribute_failures,
    fingerprint,
    request_at_fault,
)
from keel.apps.serving.live.forwarding import failure_of

BROKE = Failure("broke the connection", 502)
SILENT = Failure("was silent for too long", 504)
UNREACHABLE = Failure("cannot be reached", 502, sent=False)


def ups(router: Routed) -> list[bool]:
    return [own.up for own in router.router.backends]


# The rule by itself


def test_two_failures_of_one_kind_are_the_requests_fault() -> None:
    assert not request_at_fault([BROKE])
    assert not request_at_fault([BROKE, SILENT])
    assert not request_at_fault([UNREACHABLE, UNREACHABLE])  # nobody has seen it
    assert request_at_fault([BROKE, SILENT, BROKE])
    assert not request_at_fault([Failure(BUSY, 503)] * 2)  # they speak of themselves


def test_a_failure_counts_against_a_backend_unless_another_failed_alike() -> None:
    assert attribute_failures([BROKE], False, b"x") == [b"x"]
    assert attribute_failures([BROKE, SILENT], False, b"x") == [b"x", b"x"]
    assert attribute_failures([BROKE, SILENT, BROKE], False, b"x") == [None, b"x", None]
    assert attribute_failures([UNREACHABLE, BROKE], False, b"x") == [None, b"x"]
    (first,) = attribute_failures([BROKE], True, b"x")
    (second,) = attribute_failures([BROKE], True, b"x")
    assert first != second  # served elsewhere: the same request counts again


def test_a_backend_is_judged_over_different_requests() -> None:
    record = FailureRecord()
    assert [record.fail(b"x") for _ in range(10)] == [False] * 10
    assert not record.fail(b"y")
    record.answer()
    assert [record.fail(x) for x in (b"x", b"y", b"z")] == [False, False, True]


def test_a_quarantine_ends() -> None:
    now = [0.0]
    quarantine = Quarantine(lambda: now[0])
    quarantine.add(b"x")
    assert b"x" in quarantine
    assert b"y" not in quarantine
    now[0] = QUARANTINE
    assert b"x" not in quarantine
    assert len(quarantine) == 0


@live
async def test_fingerprints_tell_requests_apart() -> None:
    body = bytes(2 << 20)
    same = [await fingerprint("POST", "/a", body) for _ in range(2)]
    others = [
        await fingerprint("POST", "/a", body + b"x"),
        await fingerprint("POST", "/b", body),
        await fingerprint("PUT", "/a", body),
        await fingerprint("POST", "/a\udcff", body),
    ]
    assert same[0] == same[1]
    assert len({*same, *others}) == 5


# Requests that break backends


@pytest.mark.parametrize(
    ("mode", "status"), [("garbage", 502), ("reset", 502), ("empty", 502), ("hang", 504)]
)
def test_a_poison_request_meets_two_backends_and_takes_none_out(mode: str, status: int) -> None:
    async def test() -> None:
        silent = 0.3 if mode == "hang" else 30.0
        async with (
            toys("a", "b", "c", "d") as servers,
            routed(servers, retries=3, silent_seconds=silent) as router,
        ):
            for toy in servers:
                toy.poison_mode = mode
            assert (await router.ask("poison"))[0] == status
            assert sum(toy.asked for toy in servers) == 2
            assert ups(router) == [True] * 4
            # The client tries again, as many libraries do: no other backend sees it.
            again, body = await router.ask("poison")
            assert (again, sum(toy.asked for toy in servers)) == (502, 2)
            assert "failed on two backends" in json.loads(body)["error"]["message"]
            assert {await router.who(f"fine {k}") for k in range(3)} <= set("abcd")
            assert router.router.metrics.value("request_faults_total") == 1
            assert ups(router) == [True] * 4

    live(test)()


@live
async def test_many_poison_requests_take_nobody_out() -> None:
    async with toys("a", "b", "c") as servers, routed(servers) as router:
        for toy in servers:
            toy.poison_mode = "garbage"
        statuses = [(await router.ask(f"poison {k}"))[0] for k in range(12)]
        assert statuses == [502] * 12
        assert ups(router) == [True] * 3


@live
async def test_a_poison_request_that_kills_leaves_the_rest_of_the_fleet() -> None:
    async with (
        toys("a", "b", "c", "d") as servers,
        routed(servers, prefer(4.0, 3.0, 2.0, 1.0), retries=3) as router,
    ):
        for toy in servers:
            toy.poison_mode = "reset"
        assert (await router.ask("poison"))[0] == 502
        await servers[0].stop()
        await servers[1].stop()
        assert (await router.ask("poison"))[0] == 502
        assert [toy.asked for toy in servers] == [1, 1, 0, 0]
        assert await router.who() == "c"
        assert ups(router)[2:] == [True, True]


@live
async def test_backends_that_are_busy_are_not_the_requests_fault() -> None:
    async with toys("a", "b", "c") as servers, routed(servers, prefer(3.0, 2.0, 1.0)) as router:
        for toy in servers[:2]:
            toy.poison_mode = "busy"
        assert await router.who("poison") == "c"  # 503 speaks of the backend: a third one is asked
        servers[2].poison_mode = "busy"
        status, body = await router.ask("poison again")
        assert (status, body[1:]) == (503, b" is busy")
        assert ups(router) == [True] * 3


@live
async def test_two_answers_of_502_are_the_requests_fault_and_the_second_is_passed_on() -> None:
    async with toys("a", "b", "c") as servers, routed(servers, prefer(3.0, 2.0, 1.0)) as router:
        for toy in servers:
            toy.poison_mode = "gateway"
        assert await router.ask("poison") == (502, b"b has lost its engine")
        assert [toy.asked for toy in servers] == [1, 1, 0]
        assert [own.record.failures for own in router.router.backends] == [set()] * 3


@pytest.mark.parametrize(
    ("error", "kind", "status", "sent", "again"),
    [
        (aiohttp.ServerDisconnectedError(), "broke the connection", 502, True, True),
        (aiohttp.ClientPayloadError(), "broke the connection", 502, True, True),
        (ConnectionResetError(), "broke the connection", 502, True, True),
        (aiohttp.ServerTimeoutError(), "was silent for too long", 504, True, True),
        (aiohttp.ConnectionTimeoutError(), "cannot be reached", 502, False, True),
        (aiohttp.InvalidURL("http://"), "cannot be sent this request", 400, False, False),
        (ValueError("a header"), "cannot be sent this request", 400, False, False),
    ],
)  # fmt: skip
def test_failures_by_what_was_raised(
    error: Exception, kind: str, status: int, sent: bool, again: bool
) -> None:
    assert failure_of(error, promised=False) == Failure(kind, status, sent, again)


@live
async def test_a_request_that_cannot_be_sent_is_nobodys_fault() -> None:
    async with toys("a", "b") as servers, routed(servers) as router:

        async def send(call: object, backend: object) -> aiohttp.ClientResponse:
            raise aiohttp.InvalidURL("http://")

        router.router.forwarder._send = send  # type: ignore[method-assign]
        assert (await router.ask())[0] == 400
        assert ups(router) == [True, True]
        assert [own.record.failures for own in router.router.backends] == [set(), set()]


# Backends that break requests


@live
async def test_a_backend_that_fails_what_another_serves_is_out_after_three() -> None:
    async with toys("a", "b") as (a, b), routed([a, b], prefer(1.0, 0.0)) as router:
        a.mode = "reset"
        outs: list[str] = []
        monitor = router.router.forwarder.monitor
        monitor.take_out = lambda backend, why: outs.append(why)  # type: ignore[method-assign]
        for _ in range(2):
            assert await router.who() == "b"
        assert outs == []
        assert await router.who() == "b"  # one and the same request: another has served it
        assert outs == ["broke the connection"]
        assert (a.asked, b.asked) == (3, 3)


@live
async def test_an_answer_between_failures_clears_them() -> None:
    async with toys("a", "b") as (a, b), routed([a, b], prefer(1.0, 0.0)) as router:
        for _ in range(4):
            a.mode = "reset"
            assert [await router.who() for _ in range(2)] == ["b", "b"]
            a.mode = "ok"
            assert await router.who() == "a"
        assert ups(router) == [True, True]


@live
async def test_two_broken_backends_do_not_hide_behind_each_other() -> None:
    async with (
        toys("a", "b", "c", "d") as servers,
        routed(servers, prefer(4.0, 3.0, 2.0, 1.0)) as router,
    ):
        servers[0].mode = servers[1].mode = "reset"
        statuses = [(await router.ask(f"{k}"))[0] for k in range(12)]
        assert statuses[0] == 502  # the first request cannot be told from a bad one
        assert statuses[1:] == [200] * 11


@live
async def test_a_backend_whose_health_fails_is_out_after_one_request() -> None:
    async with toys("a", "b") as (a, b), routed([a, b], prefer(1.0, 0.0)) as router:
        a.mode = "busy"  # /health says the same
        assert await router.who() == "b"
        await router.until(a, up=False)
        a.mode = "ok"
        await router.until(a, up=True)


@live
async def test_breaks_in_the_middle_count_for_different_requests_only() -> None:
    async with toys("a") as (a,), routed([a]) as router:
        outs: list[str] = []
        monitor = router.router.forwarder.monitor
        monitor.take_out = lambda backend, why: outs.append(why)  # type: ignore[method-assign]
        a.mode = "broken"
        for prompt in ("x", "x", "x", "x", "y"):
            with pytest.raises(aiohttp.ClientPayloadError):
                await router.ask(prompt)
        assert outs == []
        with pytest.raises(aiohttp.ClientPayloadError):
            await router.ask("z")
        assert outs == ["broke off in the middle of a response"]


# Silence


@contextlib.asynccontextmanager
async def falling_silent(mode: str) -> AsyncIterator[tuple[Toy, Toy, Routed]]:
    """Two servers, and a router that prefers the first, which falls silent as `mode` says."""
    async with (
        toys("a", "b") as (a, b),
        routed([a, b], prefer(1.0, 0.0), silent_seconds=0.3) as router,
    ):
        a.mode = mode
        yield a, b, router


@live
async def test_silence_before_any_answer_is_tried_elsewhere() -> None:
    async with falling_silent("hang") as (a, b, router):
        assert await router.who() == "b"
        assert (a.asked, b.asked) == (1, 1)


@live
async def test_silence_after_the_headers_is_not_sent_again() -> None:
    async with falling_silent("quiet") as (a, b, router):
        status, body = await router.ask()
        assert status == 504
        assert "silent for too long" in json.loads(body)["error"]["message"]
        assert (a.asked, b.asked) == (1, 0)
        assert ups(router) == [True, True]


@live
async def test_silence_within_an_answer_ends_it() -> None:
    async with falling_silent("stall") as (_, b, router):
        with pytest.raises(aiohttp.ClientPayloadError):
            await router.ask()
        assert b.asked == 0
        assert ups(router) == [True, True]
