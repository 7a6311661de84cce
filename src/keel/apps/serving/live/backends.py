"""State of the backends as the router knows it: their load, and whether they answer."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
from yarl import URL

from keel.apps.serving import fields as f
from keel.apps.serving.arrays import View, blank_view
from keel.apps.serving.live.failure_attribution import FailureRecord
from keel.apps.serving.live.prompts import CHARACTERS, PIECE, Prefixes, Prompt
from keel.apps.serving.observations import update_pace
from keel.errors import InputError

log = logging.getLogger("keel.route")

LENGTH_RATE = 0.1
"""Rate of the moving average of answer lengths: ten answers."""
FIRST_PAUSE, LONGEST_PAUSE, CALM = 0.25, 10.0, 30.0
"""Seconds between the first probes, between later ones, and until a failure is forgotten."""
PATIENCE = 2.0
"""Timeout in seconds of a probe or a poll."""
MISSED = 3
"""Missed polls after which a report is too old to be used."""


@dataclass(frozen=True)
class BackendReport:
    """Load that a server reported."""

    at: float
    running: int
    waiting: int
    memory: float


_SAMPLE = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})?\s+(\S+)")


def read_report(text: str, at: float) -> BackendReport | None:
    """Parse Prometheus text by vLLM's names; several engines behind one address are summed."""
    samples: dict[str, list[float]] = {}
    for line in text.splitlines():
        if sample := _SAMPLE.match(line):
            try:
                samples.setdefault(sample[1], []).append(float(sample[2]))
            except ValueError:
                continue
    try:
        running = int(sum(samples["num_requests_running"]))
        waiting = int(sum(samples["num_requests_waiting"]))
        memory = samples.get("kv_cache_usage_perc") or samples.get("gpu_cache_usage_perc") or [0.0]
        return BackendReport(at, running, waiting, min(1.0, max(0.0, sum(memory) / len(memory))))
    except (KeyError, ValueError, OverflowError):
        return None


@dataclass
class Backend:
    """Server, with the counts of the requests that this router has in flight there."""

    url: str
    kv_tokens: int
    up: bool = True
    waiting: int = 0
    """requests without a first byte"""
    running: int = 0
    to_read: int = 0
    """tokens of those that wait, probably cached ones not counted"""
    held: int = 0
    """tokens, read and written, of everything in flight"""
    pace: float = 0.0
    """seconds between two tokens of a stream, lately; 0: not known"""
    written: float = 256.0
    """tokens a request writes, lately"""
    reported: BackendReport | None = None
    sent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=10_000))
    """when, and tokens to read, since the report"""
    failed: float = -np.inf
    pause: float = 0.0
    record: FailureRecord = field(default_factory=FailureRecord)
    """failures since its last answer"""

    def __post_init__(self) -> None:
        self.prefixes = Prefixes(max(1, self.kv_tokens * CHARACTERS // PIECE))

    @property
    def in_flight(self) -> int:
        """Number of requests in flight."""
        return self.waiting + self.running

    def update(self, report: BackendReport) -> None:
        """Take over a report; it includes the requests that were sent before it."""
        self.reported = report
        while self.sent and self.sent[0][0] <= report.at:
            self.sent.popleft()

    def next_pause(self, now: float) -> float:
        """Return the seconds until the first probe: 0, and doubling for repeated failures."""
        again = now - self.failed < CALM
        self.pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, 2.0 * self.pause)) if again else 0.0
        self.failed = now
        return self.pause


class InFlightRequest:
    """Request at a backend; updates the backend's counts until it has ended."""

    def __init__(self, backend: Backend, prompt: Prompt, now: float) -> None:
        self.backend, self.held = backend, prompt.tokens
        self.to_read = prompt.tokens - backend.prefixes.hit(prompt)
        self.begun, self.last, self.written = False, now, 0
        backend.waiting += 1
        backend.to_read += self.to_read
        backend.held += self.held
        backend.prefixes.add(prompt)
        if backend.reported is not None:
            backend.sent.append((now, self.to_read))

    def begin(self) -> None:
        """Count the request as running: its first byte has come."""
        if not self.begun:
            self.begun = True
            self.backend.waiting -= 1
            self.backend.to_read -= self.to_read
            self.backend.running += 1

    def stream(self, chunk: bytes, now: float, waited: float) -> None:
        """Count the events of a stream, and update the backend's pace.

        Args:
            chunk: The bytes that have come.
            now: Time in seconds.
            waited: Seconds spent waiting for the backend. A gap that was mostly spent waiting for
                the client says nothing about the server.
        """
        events = max(1, chunk.count(b"\n\n"))
        gap, known = now - self.last, self.written > 0 and b"[DONE]" not in chunk
        if known and gap > 0.0 and waited > 0.5 * gap:
            self.backend.pace = update_pace(self.backend.pace, gap / events)
        self.last = now
        self.written += events
        self.held += events
        self.backend.held += events

    def end(self) -> None:
        """Remove the request from the backend's counts, however it ended."""
        self.begin()
        self.backend.running -= 1
        self.backend.held -= self.held
        if self.written:
            self.backend.written += LENGTH_RATE * (self.written - self.backend.written)


def view_of(backends: Sequence[Backend], prompt: Prompt, now: float, poll: float = 0.0) -> View:
    """Return the backends' state as routers see it in the simulator.

    Args:
        backends: R backends.
        prompt: Of the request at hand.
        now: Time in seconds.
        poll: Seconds between reports; without a fresh report the router's own counts are used.
    """
    view = blank_view(len(backends))
    for r, own in enumerate(backends):
        waiting, running, to_read, sent, sent_tokens = own.waiting, own.running, own.to_read, 0, 0
        memory, at, report = min(1.0, own.held / own.kv_tokens), now, own.reported
        if report is not None and now - report.at <= MISSED * poll:
            waiting, running, memory, at = report.waiting, report.running, report.memory, report.at
            sent, sent_tokens = len(own.sent), sum(tokens for _, tokens in own.sent)
            to_read = max(0, to_read - sent_tokens)
        view.ints[f.V_WAITING, r], view.ints[f.V_RUNNING, r] = waiting, running
        view.ints[f.V_UNREAD, r] = to_read
        view.ints[f.V_SENT, r], view.ints[f.V_SENT_TOKENS, r] = sent, sent_tokens
        view.ints[f.V_UP, r], view.ints[f.V_HIT, r] = own.up, own.prefixes.hit(prompt)
        view.times[f.V_MEMORY, r], view.times[f.V_PACE, r] = memory, own.pace
        view.times[f.V_REPORTED, r] = at
    return view


def make_backends(urls: Sequence[str], kv_tokens: int) -> list[Backend]:
    """Make a backend for each address; raise an `InputError` for an invalid or repeated one."""
    if not urls:
        raise InputError("--backends: expected the address of at least one server")
    addresses = [_address(url) for url in urls]
    for url in addresses:
        if addresses.count(url) > 1:
            raise InputError(f"--backends: {url} is there twice")
    return [Backend(url, kv_tokens) for url in addresses]


def _address(text: str) -> str:
    try:
        url = URL(text)
        plain = url.scheme in ("http", "https") and url.host and url.port
        if plain and url.path in ("", "/") and url == url.origin().with_path(url.path):
            return str(url.origin())
    except ValueError:
        pass
    raise InputError(
        f"--backends: {text!r} is no address; expected http://HOST:PORT without path or password"
    )


class HealthMonitor:
    """Health checks: removes failing backends, probes them until they answer, polls for reports."""

    def __init__(self, backends: Sequence[Backend], session: aiohttp.ClientSession) -> None:
        self.backends, self.session = backends, session
        self._tasks: set[asyncio.Task[None]] = set()
        self._checked: set[str] = set()

    def take_out(self, backend: Backend, why: str) -> None:
        """Send no more requests to a backend until it answers again."""
        if backend.up:
            backend.up = False
            backend.record.failures.clear()
            log.warning("%s is out: %s", backend.url, why)
            self._start(self._revive(backend))

    def check(self, backend: Backend) -> None:
        """Probe a backend in the background, and take it out if it does not answer."""
        if backend.up and backend.url not in self._checked:
            self._checked.add(backend.url)
            self._start(self._check(backend))

    async def probe_all(self) -> None:
        """Probe all backends before anything is sent, and take out those that do not answer."""
        answers = await asyncio.gather(*map(self.probe, self.backends))
        for backend, answered in zip(self.backends, answers, strict=True):
            if not answered:
                self.take_out(backend, "does not answer")

    async def probe(self, backend: Backend) -> bool:
        """Return whether a backend answers, if only with 404: not every server has /health."""
        answer = await self._get(f"{backend.url}/health")
        return answer is not None and answer[0] < 500

    def poll_every(self, seconds: float) -> None:
        """Start polling all backends for reports."""
        for backend in self.backends:
            self._start(self._poll(backend, seconds))

    async def close(self) -> None:
        """Cancel all probes and polls."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _check(self, backend: Backend) -> None:
        try:
            if not await self.probe(backend):
                self.take_out(backend, "does not answer /health")
        finally:
            self._checked.discard(backend.url)

    async def _revive(self, backend: Backend) -> None:
        pause = backend.next_pause(time.monotonic())
        while True:
            await asyncio.sleep(pause)
            if await self.probe(backend):
                break
            backend.prefixes.clear()
            pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, 2.0 * pause))
        backend.up = True
        log.warning("%s is back", backend.url)

    async def _poll(self, backend: Backend, seconds: float) -> None:
        while True:
            begun = time.monotonic()
            answer = await self._get(f"{backend.url}/metrics") if backend.up else None
            report = read_report(answer[1], begun) if answer and answer[0] == 200 else None
            if report is not None:
                backend.update(report)
            await asyncio.sleep(max(0.0, begun + seconds - time.monotonic()))

    async def _get(self, url: str) -> tuple[int, str] | None:
        patience = aiohttp.ClientTimeout(total=PATIENCE)
        try:
            async with self.session.get(url, timeout=patience, allow_redirects=False) as answer:
                return answer.status, await answer.text(errors="replace")
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            return None
