"""Backend side of the reverse proxy: sends requests to backends, and answers back.

A request can be sent to another backend as long as nothing of an answer is promised to the client,
so the first bytes of a body are waited for before its headers go out: a server that accepts a
request and dies before the first token costs no client an answer. Failures are attributed to
backends or to requests in `failure_attribution`.
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from dataclasses import dataclass

import aiohttp
import numpy as np
from aiohttp import web
from yarl import URL

from keel.apps.serving.live.backends import Backend, HealthMonitor, InFlightRequest, view_of
from keel.apps.serving.live.failure_attribution import (
    QUARANTINE,
    UNREACHABLE,
    Failure,
    Quarantine,
    attribute_failures,
    fingerprint,
    request_at_fault,
    shared_failures,
)
from keel.apps.serving.live.guarded_policy import GuardedPolicy, Mask
from keel.apps.serving.live.headers import OF_THE_ROUTER, end_to_end
from keel.apps.serving.live.metrics import Metrics
from keel.apps.serving.live.parsing import PromptParser
from keel.apps.serving.live.prompts import Prompt
from keel.apps.serving.proxy_options import Options

log = logging.getLogger("keel.route")

AUTOMATIC = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that the client library would add where the client sent none."""
ONCE = frozenset(("PATCH",))
"""Methods that may not be sent twice (RFC 9110); of POST, completions change nothing."""
ELSEWHERE = frozenset((502, 503))
"""Answers that another backend may do better than."""
KEPT_ALIVE = 3.0
"""Seconds that an idle connection stays open: fewer than servers allow, so that we close it."""
LARGE = 1 << 20
"""Bytes of a body that is sent in pieces: written at once, it would hold up the event loop."""


@dataclass(frozen=True)
class Call:
    """Request of a client, read to its end."""

    request: web.Request
    body: bytes

    async def fingerprint(self) -> bytes:
        """Return the fingerprint of the request."""
        return await fingerprint(self.request.method, self.request.raw_path, self.body)


@dataclass(frozen=True)
class Refusal:
    """Answer of the router to a client that no backend has answered."""

    status: int
    why: str


class BrokenAnswer(Exception):
    """Error of a backend that broke off within a body."""


class Forwarder:
    """Sends requests to backends and their answers back; create it inside of a running loop.

    Args:
        backends: The servers.
        guarded_policy: Chooses a backend for each prompt.
        options: Settings of the proxy.
        metrics: Counters to increment.
    """

    def __init__(
        self,
        backends: list[Backend],
        guarded_policy: GuardedPolicy,
        options: Options,
        metrics: Metrics,
    ) -> None:
        self.backends, self.guarded_policy, self.options = backends, guarded_policy, options
        self.metrics, self.quarantine, self.parser = metrics, Quarantine(), PromptParser()
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_ALIVE),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=options.connect_seconds,
                sock_read=options.silent_seconds,
            ),
            auto_decompress=False,
            skip_auto_headers=AUTOMATIC,
        )
        self.monitor = HealthMonitor(backends, self.session)
        guarded_policy.warm_up()

    async def start_monitoring(self) -> None:
        """Probe the backends, and start polling them for reports."""
        await self.monitor.probe_all()
        if self.options.poll > 0.0:
            self.monitor.poll_every(self.options.poll)

    async def close(self) -> None:
        """Release everything, after the last response."""
        await self.monitor.close()
        await self.parser.close()
        await self.session.close()

    async def forward(self, call: Call) -> web.StreamResponse | Refusal:
        """Return the answer of a backend, already sent to the client, or why there is none.

        Args:
            call: The request, read to its end.
        """
        begun = time.perf_counter()
        prompt = await self.parser.read(call.body) if call.request.method == "POST" else None
        if len(self.quarantine) and await call.fingerprint() in self.quarantine:
            return Refusal(502, f"failed on two backends; not sent again for {QUARANTINE:g} s")
        failures: dict[int, Failure] = {}
        while (r := self._pick(prompt, failures)) is not None:
            if failures:
                last = self.backends[next(reversed(failures))]
                self.metrics.count("retries_total", backend=last.url)
            else:
                self.metrics.overhead_seconds.add(time.perf_counter() - begun)
            response, failure = await self._attempt(call, r, prompt, failures)
            if failure is None:
                assert response is not None
                return response
            failures[r] = failure
            self._suspect(self.backends[r], failure)
            if response is None and self._may_go_on(call, failures):
                continue
            await self._settle(call, failures, served=False)
            if response is not None:
                return response
            return Refusal(failure.status, f"the backend {failure.kind}")
        return Refusal(503, "no backend answers")

    def _left(self, failures: dict[int, Failure]) -> Mask:
        """Return the backends that may be tried; after a failure, those that have failed least."""
        up = np.array([own.up and r not in failures for r, own in enumerate(self.backends)])
        if not failures or not up.any():
            return up
        suspected = np.array([own.record.suspicions for own in self.backends])
        return np.asarray(up & (suspected == suspected[up].min()))

    def _may_go_on(self, call: Call, failures: dict[int, Failure]) -> bool:
        """Return whether another backend may be tried after these failures."""
        last = failures[next(reversed(failures))]
        repeatable = call.request.method not in ONCE or not last.sent
        return (
            last.again
            and repeatable
            and len(failures) <= self.options.retries
            and not request_at_fault(list(failures.values()))
            and bool(self._left(failures).any())
        )

    def _pick(self, prompt: Prompt | None, failures: dict[int, Failure]) -> int | None:
        """Pick a backend: by the policy for prompts, by least load for everything else."""
        allowed = self._left(failures)
        if not allowed.any():
            return None
        if prompt is None:
            return min(np.flatnonzero(allowed).tolist(), key=lambda r: self.backends[r].in_flight)
        begun, now = time.perf_counter(), time.monotonic()
        view = view_of(self.backends, prompt, now, self.options.poll)
        output = sum(own.written for own in self.backends) / len(self.backends)
        decision = self.guarded_policy(view, prompt.tokens, now, allowed, output)
        self.metrics.decision_seconds.add(time.perf_counter() - begun)
        by = "reference" if decision.fallback else "policy"
        self.metrics.count("decisions_total", backend=self.backends[decision.backend].url, by=by)
        if decision.fallback:
            self.metrics.count("fallbacks_total", reason=decision.fallback)
        return decision.backend

    async def _attempt(
        self, call: Call, r: int, prompt: Prompt | None, failures: dict[int, Failure]
    ) -> tuple[web.StreamResponse | None, Failure | None]:
        """Try one backend; a refusal that no other may improve on is passed on and returned."""
        backend = self.backends[r]
        flight = InFlightRequest(backend, prompt, time.monotonic()) if prompt is not None else None
        answer, refusal = None, None
        try:
            answer = await self._send(call, backend)
            if answer.status in ELSEWHERE:
                refusal = Failure(f"answered {answer.status}", answer.status)
                if self._may_go_on(call, {**failures, r: refusal}):
                    return None, refusal
            first = await answer.content.readany()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError) as error:
            return None, failure_of(error, promised=answer is not None)
        else:
            if refusal is None:
                await self._settle(call, failures, served=True)
            return await self._pass_on(call, answer, first, backend, flight), refusal
        finally:
            if answer is not None:
                answer.close()  # a connection whose answer was read to its end is kept
            if flight is not None:
                flight.end()

    async def _send(self, call: Call, backend: Backend) -> aiohttp.ClientResponse:
        request, body = call.request, call.body
        return await self.session.request(
            request.method,
            URL(backend.url + request.raw_path, encoded=True),
            headers=end_to_end(request.headers, OF_THE_ROUTER),
            data=(io.BytesIO(body) if len(body) >= LARGE else body) if body else None,
            allow_redirects=False,
        )

    async def _pass_on(
        self,
        call: Call,
        answer: aiohttp.ClientResponse,
        chunk: bytes,
        backend: Backend,
        flight: InFlightRequest | None,
    ) -> web.StreamResponse:
        """Send an answer on from its first bytes; what breaks now breaks for the client as well."""
        response = web.StreamResponse(
            status=answer.status, reason=answer.reason, headers=end_to_end(answer.headers)
        )
        timed = flight if answer.content_type == "text/event-stream" else None
        if flight is not None:
            flight.begin()
        waited = 0.0
        try:
            await response.prepare(call.request)
            while chunk:
                requested_at = time.monotonic()
                if timed is not None:
                    timed.stream(chunk, requested_at, waited)
                await response.write(chunk)
                requested_at = time.monotonic()
                chunk = await _next(answer)
                waited = time.monotonic() - requested_at
            if answer.status < 500:
                backend.record.answer()
            await response.write_eof()
        except BrokenAnswer:
            self.metrics.count("broken_total", backend=backend.url)
            if call.request.transport is not None:
                call.request.transport.close()
            failure = Failure("broke off in the middle of a response", 502, again=False)
            self._suspect(backend, failure)
            self._blame(backend, failure, await call.fingerprint())
        except ConnectionError:
            log.debug("a client hung up")
        return response

    def _suspect(self, backend: Backend, failure: Failure) -> None:
        """Take out a backend that cannot be reached; check the health of any other at once."""
        if failure.kind == UNREACHABLE:
            self.monitor.take_out(backend, failure.kind)
        elif failure.sent:
            backend.record.suspicions += 1
            self.monitor.check(backend)

    async def _settle(self, call: Call, failures: dict[int, Failure], served: bool) -> None:
        """Count failures against backends, or against the request."""
        if not failures:
            return
        request_id, tried = await call.fingerprint(), list(failures.values())
        for (r, failure), key in zip(
            failures.items(), attribute_failures(tried, served, request_id), strict=True
        ):
            if key is not None:
                self._blame(self.backends[r], failure, key)
        if not served and request_at_fault(tried):
            self.metrics.count("request_faults_total")
            log.warning(
                "a request has failed on two backends: %s", ", ".join(shared_failures(tried))
            )
            if call.body:
                self.quarantine.add(request_id)

    def _blame(self, backend: Backend, failure: Failure, key: object) -> None:
        if backend.record.fail(key):
            self.monitor.take_out(backend, failure.kind)


def failure_of(error: Exception, promised: bool) -> Failure:
    """Return how an attempt has failed of which the client has seen nothing.

    Args:
        error: What sending the request or waiting for the first byte has raised.
        promised: The headers of an answer had come. A backend that is silent after them is at
            work: the request is not sent to another one as well.
    """
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return Failure(UNREACHABLE, 502, sent=False)
    if isinstance(error, ValueError):  # of a path or a header that cannot be written
        return Failure("cannot be sent this request", 400, sent=False, again=False)
    if isinstance(error, asyncio.TimeoutError):
        return Failure("was silent for too long", 504, again=not promised)
    if isinstance(error, aiohttp.ClientResponseError):
        return Failure("gave an answer that is no HTTP", 502)
    return Failure("broke the connection", 502)


async def _next(answer: aiohttp.ClientResponse) -> bytes:
    """Return the bytes that have come since; none at the end."""
    try:
        return await answer.content.readany()
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        raise BrokenAnswer from error
