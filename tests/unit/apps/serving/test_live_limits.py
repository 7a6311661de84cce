"""What the router lets in: slow clients, many clients, headers, hosts, large bodies."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import time
from collections.abc import Awaitable

import pytest
from live_toys import COMPLETIONS, Routed, live, routed, toys
from multidict import CIMultiDict, CIMultiDictProxy

from keel.apps.serving.live import parsing
from keel.apps.serving.live.headers import check_hosts, end_to_end, host_allowed
from keel.apps.serving.live.parsing import PromptParser, answer_all
from keel.apps.serving.live.prompts import count_by_length, read_prompt
from keel.apps.serving.live.running import allow_descriptors
from keel.errors import InputError

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(router: Routed) -> Streams:
    return await asyncio.open_connection("127.0.0.1", int(router.address.rsplit(":", 1)[1]))


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def ask_raw(router: Routed, request: bytes) -> bytes:
    """The whole answer to bytes; the request must ask for the connection to be closed."""
    reader, writer = await connect(router)
    writer.write(request)
    answer = await reader.read()
    await hang_up(writer)
    return answer


def message(answer: bytes) -> str:
    return str(json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["message"])


# Slow clients


@live
async def test_headers_that_trickle_in_are_answered_408() -> None:
    async with toys("a") as (a,), routed([a], header_seconds=0.3) as router:
        reader, writer = await connect(router)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n")
        answer = asyncio.ensure_future(reader.read())
        for k in range(100):  # a byte now and then does not buy time
            if answer.done():
                break
            writer.write(b"X-%d: 1\r\n" % k)
            await asyncio.sleep(0.05)
        assert (await answer).startswith(b"HTTP/1.1 408 ")
        assert "--header-seconds" in message(await answer)
        await hang_up(writer)
        assert a.asked == 0
        assert router.router.metrics.value("slow_headers_total") == 1


@live
async def test_a_connection_without_any_byte_is_closed() -> None:
    async with toys("a") as (a,), routed([a], header_seconds=0.2) as router:
        reader, writer = await connect(router)
        assert await reader.read() == b""
        await hang_up(writer)


@live
async def test_the_second_request_of_a_connection_has_its_own_header_time() -> None:
    async with toys("a") as (a,), routed([a], header_seconds=0.4) as router:
        reader, writer = await connect(router)
        request = b"GET /x HTTP/1.1\r\nHost: x\r\n"
        for _ in range(3):
            writer.write(request + b"\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"HTTP/1.1 200 " in head
            await asyncio.sleep(0.3)  # idle between requests: longer in all than the limit
        await reader.read(1 << 16)
        writer.write(request)
        assert b"HTTP/1.1 408 " in await reader.read()
        await hang_up(writer)


@live
async def test_a_long_answer_is_not_cut_by_the_header_time() -> None:
    async with (
        toys("a", tokens=6, gap=0.1) as (a,),
        routed([a], header_seconds=0.2, body_seconds=0.2) as router,
    ):
        assert (await router.ask())[1] == a.stream()


@live
async def test_a_body_that_trickles_in_is_answered_408() -> None:
    async with toys("a") as (a,), routed([a], body_seconds=0.3) as router:
        reader, writer = await connect(router)
        writer.write(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\n")
        answer = asyncio.ensure_future(reader.readuntil(b"}}"))
        for _ in range(100):
            if answer.done():
                break
            writer.write(b"x")
            await asyncio.sleep(0.05)
        assert (await answer).startswith(b"HTTP/1.1 408 ")
        assert "--body-seconds" in message(await answer)
        await hang_up(writer)
        assert a.asked == 0


# Many clients


@live
async def test_one_connection_too_many_is_answered_503() -> None:
    async with toys("a") as (a,), routed([a], max_connections=2) as router:
        others = [await connect(router) for _ in range(2)]
        while len(router.router.connections) < 2:
            await asyncio.sleep(0.01)
        request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        refused = await ask_raw(router, request)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 1\r\n" in refused
        assert "--max-connections" in message(refused)
        assert a.asked == 0
        assert router.router.metrics.value("refused_connections_total") == 1
        await hang_up(others[0][1])
        while len(router.router.connections) == 2:
            await asyncio.sleep(0.01)
        assert (await ask_raw(router, request)).startswith(b"HTTP/1.1 200 ")
        await hang_up(others[1][1])


@live
async def test_connections_that_come_at_once_are_counted_one_by_one() -> None:
    async with toys("a") as (a,), routed([a], max_connections=2) as router:
        port = int(router.address.rsplit(":", 1)[1])
        # accepted by the kernel alone: the router meets all of them in one turn of its loop
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        while router.router.connections.lingering + len(router.router.connections) < 20:
            await asyncio.sleep(0.01)
        assert len(router.router.connections) == 2
        assert router.router.metrics.value("refused_connections_total") == 18
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    ("soft", "hard", "allowed", "set_to", "warns"),
    [
        (1024, 4096, True, 3000, False),
        (4096, 4096, True, None, False),
        (1024, 2000, True, 2000, True),
        (1024, -1, True, 3000, False),
        (1024, -1, False, None, True),
    ],
)
def test_the_limit_on_open_files_is_raised_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    allowed: bool,
    set_to: int | None,
    warns: bool,
) -> None:
    resource = pytest.importorskip("resource")
    changes: list[tuple[int, int]] = []

    def change(what: int, limits: tuple[int, int]) -> None:
        if not allowed:
            raise ValueError("current limit exceeds maximum limit")
        changes.append(limits)

    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", change)
    with caplog.at_level(logging.WARNING, "keel.route"):
        allow_descriptors(3000)
    assert changes == ([] if set_to is None else [(set_to, hard)])
    assert ["--max-connections may need 3000" in x.message for x in caplog.records] == [
        True
    ] * warns


@live
async def test_connections_are_counted_in_the_metrics() -> None:
    async with toys("a") as (a,), routed([a]) as router:
        assert "keel_route_connections 1" in (await router.get("/keel/metrics"))[1]


# Headers


def test_every_connection_header_names_headers_that_stop_here() -> None:
    headers = CIMultiDict(
        [("Connection", "X-One, close"), ("X-One", "1"), ("CONNECTION", " x-two ,X-Three"),
         ("X-Two", "2"), ("x-three", "3"), ("Keep-Alive", "5"), ("X-Four", "4"), ("Host", "h")]
    )  # fmt: skip
    assert list(end_to_end(CIMultiDictProxy(headers), frozenset(("host",)))) == ["X-Four"]


@live
async def test_two_connection_headers_are_both_obeyed_in_both_directions() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: X-One\r\nX-One: secret\r\n"
            b"Connection: close, X-Two\r\nX-Two: secret\r\nX-Three: kept\r\n\r\nok"
        )
        writer.close()

    requests: list[bytes] = []
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, toys("a") as (a,), routed([a]) as router:
        port = server.sockets[0].getsockname()[1]
        router.router.backends[0].url = f"http://127.0.0.1:{port}"
        answer = await ask_raw(
            router,
            b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close, X-Up\r\nX-Up: secret\r\n"
            b"Connection: X-Down\r\nX-Down: secret\r\nX-Through: kept\r\n\r\n",
        )
        assert b"X-Through: kept" in requests[-1]
        assert b"X-Three: kept" in answer
        assert b"secret" not in requests[-1]
        assert b"secret" not in answer


@pytest.mark.parametrize(
    ("hosts", "yes"),
    [
        (["router.example"], True),
        (["ROUTER.example:8080"], True),
        (["127.0.0.1:1"], True),
        (["[::1]:8080"], True),
        (["evil.example"], False),
        (["router.example.evil"], False),
        (["evil@router.example"], False),
        (["router.example/x"], False),
        (["router.example:x"], False),
        ([""], False),
        ([], False),
        (["router.example", "router.example"], False),
    ],
)
def test_hosts(hosts: list[str], yes: bool) -> None:
    allowed = check_hosts(["Router.example", "127.0.0.1", "::1"])
    headers = CIMultiDictProxy(CIMultiDict([("Host", host) for host in hosts]))
    assert host_allowed(headers, allowed) == yes
    assert host_allowed(headers, ())


@pytest.mark.parametrize("host", ["http://a", "a:80", "a/b", "*.a", "", "u@a", "[::1]:80"])
def test_what_is_no_host_is_told(host: str) -> None:
    with pytest.raises(InputError, match=r"--allowed-hosts: .* is no host"):
        check_hosts([host])


@live
async def test_requests_for_another_host_are_answered_421() -> None:
    async with toys("a") as (a,), routed([a], allowed_hosts=("router.example",)) as router:
        for path in ("/v1/models", "/keel/metrics", "/keel/health"):
            answer = await ask_raw(
                router,
                f"GET {path} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n".encode(),
            )
            assert answer.startswith(b"HTTP/1.1 421 ")
            assert "--allowed-hosts" in message(answer)
        assert a.asked == 0
        request = b"GET /x HTTP/1.1\r\nHost: router.example:1\r\nConnection: close\r\n\r\n"
        assert (await ask_raw(router, request)).startswith(b"HTTP/1.1 200 ")


# Large bodies

LARGE_BODY = b'{"prompt": "poem", "more": [' + b"12345," * (20_000_000 // 6) + b"1]}"
"""20 MB that keep a JSON parser busy for a while."""


async def longest_gap(work: Awaitable[object]) -> float:
    """Seconds, at most, between two turns of the event loop while `work` is done."""
    longest, last, task = 0.0, time.perf_counter(), asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await task
    return longest


@live
async def test_a_large_body_holds_nobody_up() -> None:
    async def parse_here() -> None:
        json.loads(LARGE_BODY)

    async with toys("a") as (a,), routed([a]) as router:
        assert (await router.ask("x" * 100_000))[0] == 200  # the child starts
        parser, where = router.router.forwarder.parser, router.address + COMPLETIONS
        ends: dict[str, float] = {}

        async def send_large() -> None:
            async with router.client.post(where, data=io.BytesIO(LARGE_BODY)) as answer:
                assert answer.status == 200
            ends["large"] = time.perf_counter()

        async def send_small() -> None:
            while not parser._tasks:
                await asyncio.sleep(0.001)
            assert (await router.ask("small"))[0] == 200
            ends["small"] = time.perf_counter()

        blocked = await longest_gap(parse_here())
        for _ in range(3):  # this machine has pauses that no test caused
            gap = await longest_gap(asyncio.gather(send_large(), send_small()))
            assert ends["small"] < ends["large"]
            if gap < 0.5 * blocked:
                break
        assert gap < 0.5 * blocked
        assert a.bodies[1:].count(LARGE_BODY) >= 1


def test_the_child_gives_the_same_prompts() -> None:
    bodies = [
        json.dumps({"model": "m", "prompt": "a" * 700 + "\ud800" + "b" * 700}).encode(),
        b"no JSON",
        b"",
    ]
    requests = b"".join(parsing.REQUEST.pack(len(body)) + body for body in bodies)
    answers = io.BytesIO()
    answer_all(io.BytesIO(requests), answers)
    assert answers.getvalue() == b"".join(parsing._pack(read_prompt(body)) for body in bodies)


@live
async def test_a_child_that_dies_costs_only_the_estimate() -> None:
    body = b'{"prompt": "' + b"x" * 100_000 + b'"}'
    parser = PromptParser()
    try:
        first = await parser.read(body)
        assert len(first.pieces) == 390
        assert parser._child is not None
        parser._child.kill()
        await parser._child.wait()
        assert await parser.read(body) == count_by_length(body)
        assert await parser.read(body) == first  # by a new child
    finally:
        await parser.close()
    assert parser._child is None


@live
async def test_a_client_that_hangs_up_does_not_disturb_the_next_body() -> None:
    body = b'{"prompt": "' + b"x" * 100_000 + b'"}'
    parser = PromptParser()
    try:
        lost = asyncio.ensure_future(parser.read(body.replace(b"x", b"y")))
        await asyncio.sleep(0.01)
        lost.cancel()
        assert await parser.read(body) == read_prompt(body)
    finally:
        await parser.close()
