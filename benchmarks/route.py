"""`keel route` under load: what it costs, and what it loses when servers fail.

    python -m benchmarks.route [--policy RUN] [--reference NAME] [--rate 100] [--seconds 20]

Four servers that imitate replicas, and the router, each in a process of its own. Midway one server
is killed and one becomes five times as slow. Every tenth request also goes straight to a server
that stays well: latency added by the router is the difference, before anything fails. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from keel.apps.serving import Scorer, load_scorer
from keel.apps.serving.live.backends import make_backends
from keel.apps.serving.live.guarded_policy import GuardedPolicy, Guards
from keel.apps.serving.live.running import serve
from keel.apps.serving.live.server import Options, Router
from keel.apps.serving.observations import REPLICA, REQUEST

SERVERS, TOKENS, READING, GAP, SLOWER = 4, 10, 0.02, 0.005, 5.0
KILLED, SLOWED = 1, 2
HIDDEN = 64
PROMPT = "Tell me of a ship and what is under it. " * 40


def server(say: Connection) -> None:
    """One replica: reads for 20 ms, then a token every 5 ms; a signal makes it slow."""

    async def run() -> None:
        slower = 1.0

        def slow_down() -> None:
            nonlocal slower
            slower = SLOWER

        async def complete(request: web.Request) -> web.StreamResponse:
            await request.read()
            await asyncio.sleep(READING * slower)
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(request)
            for k in range(TOKENS):
                await answer.write(f"data: {k}\n\n".encode())
                await asyncio.sleep(GAP * slower)
            await answer.write(b"data: [DONE]\n\n")
            return answer

        app = web.Application()
        app.router.add_post("/v1/completions", complete)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, slow_down)
        say.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    asyncio.run(run())


def by_delay() -> Scorer:
    """A policy of a trained one's size that prefers few requests and a fast pace."""
    rng = np.random.default_rng(0)

    def noise(*shape: int) -> Any:
        return (1e-4 * rng.standard_normal(shape)).astype(np.float32)

    item, second, score = noise(len(REPLICA), HIDDEN), noise(HIDDEN, HIDDEN), noise(HIDDEN, 1)
    item[REPLICA.index("delay"), 0] = second[0, 0] = 1.0
    score[0, 0] = -4.0
    bias = noise(HIDDEN)
    bias[0] = 4.0  # a fast and idle one is below zero, which the network cuts off
    return Scorer(item, bias, noise(len(REQUEST), HIDDEN), second, noise(HIDDEN), score, noise(1))


def router(say: Connection, urls: list[str], policy: Path | None, reference: str) -> None:
    """With the guards of the command."""
    scorer = by_delay() if policy is None else load_scorer(policy)
    guarded_policy = GuardedPolicy(len(urls), scorer, reference, Guards())
    proxy = Router(make_backends(urls, 100_000), guarded_policy, Options())
    asyncio.run(serve(proxy, "127.0.0.1", 0, say.send))


@dataclass(frozen=True)
class Answer:
    """Seconds since it was sent; NaN: it never came."""

    sent: float
    first: float
    whole: float
    direct: bool
    status: str

    @property
    def lost(self) -> bool:
        return self.status != "200"


async def ask(client: aiohttp.ClientSession, url: str, direct: bool, start: float) -> Answer:
    """One request, to its last byte."""
    begun = time.perf_counter()
    try:
        async with client.post(f"{url}/v1/completions", json={"prompt": PROMPT}) as answer:
            await answer.content.readany()
            first = time.perf_counter() - begun
            await answer.read()
            whole, status = time.perf_counter() - begun, str(answer.status)
    except aiohttp.ClientPayloadError:
        first, whole, status = np.nan, np.nan, "broke off after its first byte"
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        first, whole, status = np.nan, np.nan, type(error).__name__
    return Answer(begun - start, first, whole, direct, status)


async def load(
    routed: str, direct: str, rate: float, seconds: float, strike: Any
) -> tuple[list[Answer], str]:
    """At a steady rate; `strike()` midway. Answers, and what the router tells of itself."""
    timeout = aiohttp.ClientTimeout(total=30.0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
        for url in (routed, direct):
            await ask(client, url, False, 0.0)
        start, tasks, struck = time.perf_counter(), [], False
        for k in range(int(rate * seconds)):
            due = start + k / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if not struck and k >= rate * seconds / 2.0:
                struck = True
                strike()
            tasks.append(asyncio.ensure_future(ask(client, routed, False, start)))
            if k % 10 == 5:
                tasks.append(asyncio.ensure_future(ask(client, direct, True, start)))
        found = await asyncio.gather(*tasks)
        async with client.get(f"{routed}/keel/metrics") as told:
            return list(found), await told.text()


def quantiles(values: Iterable[float]) -> dict[str, float]:
    """In milliseconds."""
    known = np.array([x for x in values if x == x])
    return {f"p{q}": round(1e3 * float(np.percentile(known, q)), 2) for q in (50, 99)}


def minus(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: round(one[name] - other[name], 2) for name in one}


def counted(text: str, name: str) -> dict[str, float]:
    """Samples of a metric, by their labels."""
    rows = [x.rsplit(" ", 1) for x in text.splitlines() if x.startswith(f"keel_route_{name}")]
    return {row[0].removeprefix(f"keel_route_{name}"): float(row[1]) for row in rows}


def quantile(text: str, name: str, share: float) -> float:
    """Of a histogram, in milliseconds: evenly spread within its class, as Prometheus has it."""
    classes = counted(text, f"{name}_bucket")
    wanted, low, before = share * max(classes.values()), 0.0, 0.0
    for label, count in classes.items():
        high = float(re.sub(r"[^0-9.e+-]", "", label.replace("+Inf", "1.0").replace("le=", "")))
        if count >= wanted:
            return round(1e3 * (low + (high - low) * (wanted - before) / (count - before)), 3)
        low, before = high, count
    return float("nan")


def summary(answers: list[Answer], text: str, half: float) -> dict[str, Any]:
    own = [x for x in answers if not x.direct]
    calm = [x for x in own if x.sent < half - 1.0]
    direct = [x for x in answers if x.direct and x.sent < half - 1.0]
    told: dict[str, Any] = {
        "requests": len(own),
        "lost": sum(x.lost for x in own),
        "lost_why": dict(Counter(x.status for x in own if x.lost)),
        "retried": int(sum(counted(text, "retries_total").values())),
        "fallbacks": counted(text, "fallbacks_total"),
        "decisions": counted(text, "decisions_total"),
        "decision_ms": {f"p{q}": quantile(text, "decision_seconds", q / 100) for q in (50, 99)},
        "overhead_ms": {f"p{q}": quantile(text, "overhead_seconds", q / 100) for q in (50, 99)},
        "load_average": round(os.getloadavg()[0], 1),
    }
    for name in ("first", "whole"):
        routed = quantiles(getattr(x, name) for x in calm)
        straight = quantiles(getattr(x, name) for x in direct)
        told[f"{name}_ms"] = {
            "routed": routed, "direct": straight, "added": minus(routed, straight),
            "routed_after_failures": quantiles(getattr(x, name) for x in own if x.sent >= half),
        }  # fmt: skip
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--reference", default="least-by-speed")
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    started, urls = [], []

    def start(target: Any, *args: Any) -> str:
        hear, say = spawn.Pipe(duplex=False)
        process = spawn.Process(target=target, args=(say, *args), daemon=True)
        process.start()
        started.append(process)
        return str(hear.recv())

    try:
        urls = [start(server) for _ in range(SERVERS)]
        where = start(router, urls, given.policy, given.reference)

        def strike() -> None:
            started[KILLED].kill()
            os.kill(started[SLOWED].pid, signal.SIGUSR1)

        answers, text = asyncio.run(load(where, urls[0], given.rate, given.seconds, strike))
    finally:
        for process in started:
            process.kill()
            process.join()
    print(json.dumps(summary(answers, text, given.seconds / 2.0), indent=1))


if __name__ == "__main__":
    main()
