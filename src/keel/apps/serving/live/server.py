"""The reverse proxy: every request to one backend, its answer back as it comes.

A request can be sent again elsewhere as long as the client has seen nothing of an answer, so the
first bytes of a body are waited for before its headers go out: a server that accepts a request and
dies before the first token has cost no one an answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

import aiohttp
import numpy as np
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from keel.apps.serving.live.backends import Backend, Flight, Watch, view_of
from keel.apps.serving.live.choosing import Chooser
from keel.apps.serving.live.metrics import Metrics, gauges
from keel.apps.serving.live.prompts import Prompt, prompt_of
from keel.errors import InputError

log = logging.getLogger("keel.route")
silence = logging.getLogger("keel.route.http")
silence.disabled = True  # the HTTP library quotes what it cannot parse

HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
     "te", "trailer", "transfer-encoding", "upgrade")
)  # fmt: skip
OF_THE_ROUTER = frozenset(("host", "content-length", "expect"))
"""Headers of a request that the router writes itself."""
AUTOMATIC = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that the client library would add where the client sent none."""
ONCE = frozenset(("PATCH",))
"""Methods that may not be sent twice (RFC 9110); of POST, completions change nothing."""
ELSEWHERE = frozenset((502, 503))
"""Answers that another backend may do better than."""
KEPT_ALIVE = 3.0
"""Seconds that an idle connection is kept: less than servers do, who else close it under us."""


@dataclass(frozen=True)
class Options:
    """Of the proxy."""

    retries: int = 2
    """other backends to try"""
    connect_seconds: float = 2.0
    silent_seconds: float = 300.0
    """without any byte from a backend, before an answer or within it"""
    max_body: int = 32 << 20
    """bytes of a request"""
    poll: float = 0.0
    """seconds between reports of the backends; 0: none"""
    grace: float = 30.0
    """seconds for responses under way when the router stops"""

    def __post_init__(self) -> None:
        for name in ("retries", "poll", "grace"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(f"--{name}: expected 0 or more, got {getattr(self, name)}")
        for name in ("connect_seconds", "silent_seconds", "max_body"):
            if not getattr(self, name) > 0:
                flag = name.replace("_", "-")
                raise InputError(f"--{flag}: expected more than 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Failure:
    """An attempt of which the client has seen nothing."""

    why: str
    status: int
    unsent: bool = False
    """the backend has not seen the request either"""


class Router:
    """One proxy and all it knows; `start` it inside of a running loop."""

    def __init__(self, backends: list[Backend], chooser: Chooser, options: Options) -> None:
        self.backends, self.chooser, self.options = backends, chooser, options
        self.metrics = Metrics()
        self.app = web.Application(client_max_size=options.max_body)
        self.app.router.add_get("/keel/metrics", self._tell_metrics)
        self.app.router.add_get("/keel/health", self._tell_health)
        self.app.router.add_route("*", "/{path:.*}", self._handle)

    async def start(self) -> None:
        """Get ready, and look who is there."""
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_ALIVE),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=self.options.connect_seconds,
                sock_read=self.options.silent_seconds,
            ),
            auto_decompress=False,
            skip_auto_headers=AUTOMATIC,
        )
        self.watch = Watch(self.backends, self.session)
        self.chooser.warm_up()
        await self.watch.first_look()
        if self.options.poll > 0.0:
            self.watch.poll_every(self.options.poll)

    async def close(self) -> None:
        """After the last response."""
        await self.watch.close()
        await self.session.close()

    def runner(self) -> web.AppRunner:
        """The server to be; a client that hangs up ends its request at the backend as well."""
        return web.AppRunner(
            self.app,
            access_log=None,
            logger=silence,
            auto_decompress=False,
            handler_cancellation=True,
            shutdown_timeout=self.options.grace,
        )

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._forward(request)
        except Exception as error:  # the message may quote the request
            log.error("a request failed inside of the router: %s", type(error).__name__)
            return self._refuse(500, "failed at this request")

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if not request.raw_path.startswith("/") or request.path.startswith("/keel/"):
            return self._refuse(404, "there is no such path")
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return self._refuse(413, f"bodies end at {self.options.max_body} bytes (--max-body)")
        except (web.RequestPayloadError, ConnectionError):
            return self._refuse(400, "the body broke off")
        begun = time.perf_counter()
        prompt = await prompt_of(body) if request.method == "POST" else None
        tried: set[int] = set()
        failure = Failure("no backend answers", 503)
        while (r := self._pick(prompt, tried)) is not None:
            tried.add(r)
            if len(tried) == 1:
                self.metrics.overhead_seconds.add(time.perf_counter() - begun)
            left = len(tried) <= self.options.retries and bool(self._allowed(tried).any())
            again = left and request.method not in ONCE
            found = await self._attempt(request, body, self.backends[r], prompt, again)
            if not isinstance(found, Failure):
                self.metrics.count("responses_total", status=str(found.status))
                return found
            failure = Failure(f"the backend {found.why}", found.status)
            self.watch.take_out(self.backends[r], found.why)
            if not (again or (left and found.unsent)):
                break
            self.metrics.count("retries_total", backend=self.backends[r].url)
        return self._refuse(failure.status, failure.why)

    def _allowed(self, tried: set[int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return np.array([own.up and r not in tried for r, own in enumerate(self.backends)])

    def _pick(self, prompt: Prompt | None, tried: set[int]) -> int | None:
        """The policy decides on prompts; everything else goes where least is going on."""
        allowed = self._allowed(tried)
        if not allowed.any():
            return None
        if prompt is None:
            return min(np.flatnonzero(allowed).tolist(), key=lambda r: self.backends[r].in_flight)
        begun, now = time.perf_counter(), time.monotonic()
        view = view_of(self.backends, prompt, now, self.options.poll)
        output = sum(own.written for own in self.backends) / len(self.backends)
        decision = self.chooser(view, prompt.tokens, now, allowed, output)
        self.metrics.decision_seconds.add(time.perf_counter() - begun)
        by = "reference" if decision.fallback else "policy"
        self.metrics.count("decisions_total", backend=self.backends[decision.where].url, by=by)
        if decision.fallback:
            self.metrics.count("fallbacks_total", reason=decision.fallback)
        return decision.where

    async def _attempt(
        self,
        request: web.Request,
        body: bytes,
        backend: Backend,
        prompt: Prompt | None,
        again: bool,
    ) -> web.StreamResponse | Failure:
        """At one backend; `again`: it may be tried elsewhere, so a refusal is kept back."""
        flight = Flight(backend, prompt, time.monotonic()) if prompt is not None else None
        answer = None
        try:
            answer = await self.session.request(
                request.method,
                URL(backend.url + request.raw_path, encoded=True),
                headers=_kept(request.headers, OF_THE_ROUTER),
                data=body or None,
                allow_redirects=False,
            )
            if answer.status in ELSEWHERE and again:
                return Failure(f"answered {answer.status}", answer.status)
            first = await answer.content.readany()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            return Failure("cannot be reached", 502, unsent=True)
        except asyncio.TimeoutError:
            return Failure("was silent for too long", 504)
        except (aiohttp.ClientError, OSError):
            return Failure("broke the connection", 502)
        else:
            return await self._pass_on(request, answer, first, backend, flight)
        finally:
            if answer is not None:
                answer.close()  # a connection whose answer was read to its end is kept
            if flight is not None:
                flight.end()

    async def _pass_on(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        chunk: bytes,
        backend: Backend,
        flight: Flight | None,
    ) -> web.StreamResponse:
        """From the first bytes on: what breaks now breaks for the client as well."""
        response = web.StreamResponse(
            status=answer.status, reason=answer.reason, headers=_kept(answer.headers)
        )
        timed = flight if answer.content_type == "text/event-stream" else None
        if flight is not None:
            flight.begin()
        waited = 0.0
        try:
            await response.prepare(request)
            while chunk:
                asked = time.monotonic()
                if timed is not None:
                    timed.stream(chunk, asked, waited)
                await response.write(chunk)
                asked = time.monotonic()
                chunk = await _next(answer)
                waited = time.monotonic() - asked
            await response.write_eof()
        except BrokenAnswer:
            self.metrics.count("broken_total", backend=backend.url)
            self.watch.take_out(backend, "broke off in the middle of a response")
            if request.transport is not None:
                request.transport.close()
        except ConnectionError:
            log.debug("a client hung up")
        return response

    def _refuse(self, status: int, why: str) -> web.Response:
        """As OpenAI's servers do."""
        self.metrics.count("responses_total", status=str(status))
        told = {"error": {"message": f"keel route: {why}", "type": "router", "code": status}}
        headers = {"Retry-After": "1"} if status == 503 else {}
        return web.json_response(told, status=status, headers=headers)

    async def _tell_metrics(self, request: web.Request) -> web.Response:
        kind = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(
            text=self.metrics.render(gauges(self.backends, self.chooser)), headers=kind
        )

    async def _tell_health(self, request: web.Request) -> web.Response:
        up = sum(own.up for own in self.backends)
        told = {"status": "ok" if up else "down", "up": up, "backends": len(self.backends)}
        return web.json_response(told, status=200 if up else 503)


class BrokenAnswer(Exception):
    """A backend broke off within a body."""


async def _next(answer: aiohttp.ClientResponse) -> bytes:
    """What has come since; empty at the end."""
    try:
        return await answer.content.readany()
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        raise BrokenAnswer from error


def _kept(headers: CIMultiDictProxy[str], less: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    """Without those that are between two neighbours only."""
    between = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    gone = HOP_BY_HOP | less | between
    return CIMultiDict((name, x) for name, x in headers.items() if name.lower() not in gone)
