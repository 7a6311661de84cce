"""Servers that write tokens like a replica, or fail in a way that a test asks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from keel.apps.serving.live.backends import make_backends
from keel.apps.serving.live.guarded_policy import GuardedPolicy, Guards, ScoreFunction
from keel.apps.serving.live.server import Options, Router

COMPLETIONS = "/v1/completions"


class Toy:
    """One server; `mode` may be changed while it runs.

    `ok` streams tokens; `busy` answers 503, `gateway` 502; `hang` never answers; `reset` hangs up
    without a word; `empty` hangs up after the headers; `broken` hangs up after two tokens;
    `garbage` answers something that is no HTTP; `quiet` sends headers and nothing else; `stall` is
    silent after two tokens. A request with the word `poison` is answered by `poison_mode` if there
    is one.
    """

    def __init__(self, name: str, tokens: int = 4, gap: float = 0.0) -> None:
        self.name, self.tokens, self.gap, self.mode = name, tokens, gap, "ok"
        self.poison_mode = ""
        self.port, self.asked, self.bodies, self.headers = 0, 0, [], {}
        self.left = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.report = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._complete)
        self.runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        await self.runner.cleanup()

    def event(self, k: int) -> bytes:
        return f"data: {json.dumps({'server': self.name, 'token': k})}\n\n".encode()

    def stream(self) -> bytes:
        return b"".join(self.event(k) for k in range(self.tokens)) + b"data: [DONE]\n\n"

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.mode == "busy" else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.report)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        self.headers = request.headers
        self.bodies.append(await request.read())
        assert request.transport is not None
        mode = self.poison_mode if b"poison" in self.bodies[-1] and self.poison_mode else self.mode
        if mode == "busy":
            return web.Response(status=503, text=f"{self.name} is busy")
        if mode == "gateway":
            return web.Response(status=502, text=f"{self.name} has lost its engine")
        if mode == "hang":
            await asyncio.sleep(30.0)
        if mode == "garbage":
            request.transport.write(b"this is no HTTP\r\n\r\n")
            request.transport.close()
            return web.Response()
        if mode == "reset":
            request.transport.abort()
            return web.Response()
        if request.method != "POST":
            return web.json_response(
                {"server": self.name, "path": request.raw_path, "method": request.method},
                headers={"X-Own": "kept"},
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if mode == "quiet":
            await asyncio.sleep(30.0)
        if mode == "empty":
            await asyncio.sleep(0.02)
            request.transport.abort()
            return response
        try:
            for k in range(self.tokens):
                if mode == "stall" and k == 2:
                    await asyncio.sleep(30.0)
                if mode == "broken" and k == 2:
                    await asyncio.sleep(0.02)
                    request.transport.abort()
                    return response
                await response.write(self.event(k))
                await asyncio.sleep(self.gap)
                await self.may_go_on.wait()
        except (ConnectionError, asyncio.CancelledError):
            self.left.set()
            raise
        await response.write(b"data: [DONE]\n\n")
        return response


Test = Callable[[], Coroutine[Any, Any, None]]


def live(test: Test) -> Callable[[], None]:
    """Run a test in a loop of its own, for half a minute at most."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 30.0))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def prefer(*scores: float) -> ScoreFunction:
    """A policy that wants the same, whatever it sees."""
    return lambda replicas, request: np.array(scores, dtype=np.float32)


class Routed:
    """A router that listens, and a client of it."""

    def __init__(self, router: Router, address: str, client: aiohttp.ClientSession) -> None:
        self.router, self.address, self.client = router, address, client

    async def ask(self, prompt: str = "hello", path: str = COMPLETIONS) -> tuple[int, bytes]:
        async with self.client.post(self.address + path, json={"prompt": prompt}) as answer:
            return answer.status, await answer.read()

    async def listen(self, heard: list[bytes]) -> None:
        """Every chunk as it comes."""
        async with self.client.post(self.address + COMPLETIONS, json={"prompt": "x"}) as answer:
            async for chunk in answer.content.iter_any():
                heard.append(chunk)

    async def who(self, prompt: str = "hello") -> str:
        status, body = await self.ask(prompt)
        assert status == 200, body
        return str(json.loads(body.split(b"\n")[0].removeprefix(b"data: "))["server"])

    async def get(self, path: str) -> tuple[int, str]:
        async with self.client.get(self.address + path) as answer:
            return answer.status, await answer.text()

    async def until(self, toy: Toy, up: bool) -> None:
        own = next(x for x in self.router.backends if x.url == toy.url)
        for _ in range(500):
            if own.up == up:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{toy.name} never came to up={up}")


@contextlib.asynccontextmanager
async def toys(*names: str, **settings: Any) -> AsyncIterator[list[Toy]]:
    """That run."""
    made = [Toy(name, **settings) for name in names]
    for toy in made:
        await toy.start()
    try:
        yield made
    finally:
        for toy in made:
            await toy.stop()


@contextlib.asynccontextmanager
async def routed(
    servers: Sequence[Toy],
    policy: ScoreFunction | None = None,
    guards: Guards | None = None,
    reference: str = "least-outstanding",
    **options: Any,
) -> AsyncIterator[Routed]:
    """Guards are far away, unless a test brings its own; so is the deadline on a busy machine."""
    guards = guards or Guards(max_kl=100.0, max_share=1.0, deadline=1.0)
    backends = make_backends([toy.url for toy in servers], 100_000)
    guarded_policy = GuardedPolicy(len(backends), policy, reference, guards, seed=0)
    router = Router(backends, guarded_policy, Options(**{"grace": 1.0, **options}))
    router.open()
    await router.probe_backends()
    runner = router.runner()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as client:
            yield Routed(router, f"http://127.0.0.1:{runner.addresses[0][1]}", client)
    finally:
        await runner.cleanup()
        await router.close()
