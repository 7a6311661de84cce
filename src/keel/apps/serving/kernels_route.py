"""Routers that need no learning, and a trace through a cluster with one of them, compiled.

All see the same: reports, which may be old, and what they have sent since. The router's own index
of prefixes is a cache like that of the replicas, filled when a request is sent.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import numpy as np

from keel.apps.serving.compiling import compiled, inner
from keel.apps.serving.kernels import advance, blocks_now, fail, send
from keel.apps.serving.kernels_cache import keep_prefix, prefix_hit

(
    RANDOM, ROUND_ROBIN, LEAST, LEAST_BY_SPEED, TWO, WORK, LOCAL, STICKY, CACHE_WORK, VIDUR,
) = range(10)  # fmt: skip


@inner
def report(r, now, plan, requests, replicas, view):
    """A replica tells where it stands; what was sent before is in it."""
    view.waiting[r] = replicas.waiting[r]
    view.running[r] = replicas.count[r] + replicas.size[r]
    view.waiting_tokens[r] = replicas.waiting_tokens[r]
    view.memory[r] = 1.0 - blocks_now(r, now, requests, replicas) / plan.blocks[r]
    view.pace[r] = replicas.pace[r]
    view.reported[r] = now
    view.sent[r] = view.sent_tokens[r] = 0


@inner
def scattered(x):
    """A whole number, by another that looks like chance (SplitMix64): [0, 1)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return np.float64(x >> np.uint64(11)) / 9007199254740992.0


@inner
def is_lost(r, tick, telemetry):
    """Whether the report of a replica was lost."""
    name = np.uint64(telemetry.seed * 1_000_003 + tick * 257 + r + 1)
    return scattered(name * np.uint64(0x9E3779B97F4A7C15)) < telemetry.dropped


@inner
def last_report(r, count, now, telemetry):
    """When the last report that was not lost was made, before or at `now`; −1 before the first.

    Replicas report in turn, not all at once.
    """
    phase = telemetry.interval * r / count
    tick = math.floor((now - phase) / telemetry.interval)
    while tick >= 0 and is_lost(r, tick, telemetry):
        tick -= 1
    return phase + tick * telemetry.interval if tick >= 0 else -1.0


@inner
def observe(q, clock, plan, telemetry, requests, replicas, index, view):
    """All replicas up to the arrival of a request, and what its router knows then."""
    now = requests.arrival[q]
    for r in range(len(replicas.head)):
        if telemetry.interval > 0.0:
            when = last_report(r, len(replicas.head), now, telemetry)
            if when > view.reported[r]:
                advance(r, when, clock, plan, requests, replicas)
                report(r, when, plan, requests, replicas, view)
            advance(r, now, clock, plan, requests, replicas)
        else:
            advance(r, now, clock, plan, requests, replicas)
            report(r, now, plan, requests, replicas, view)
        view.up[r] = replicas.up[r]
        view.hit[r] = prefix_hit(r, q, requests, index)


@inner
def dispatch(q, r, clock, plan, requests, replicas, index, view):
    """Send a request, and remember it."""
    send(q, r, clock, plan, requests, replicas)
    keep_prefix(r, q, requests, index)
    view.sent[r] += 1
    view.sent_tokens[r] += requests.prompt[q] - view.hit[r]


@inner
def drawn(dice):
    """The next number in [0, 1): the same on every machine."""
    dice[0] = dice[0] + np.uint64(0x9E3779B97F4A7C15)
    return scattered(dice[0])


@inner
def living(view, dice):
    """Any replica that is up; any at all if none is."""
    count = 0
    for r in range(len(view.up)):
        count += view.up[r]
    if count == 0:
        return int(drawn(dice) * len(view.up))
    k = int(drawn(dice) * count)
    for r in range(len(view.up)):
        if view.up[r]:
            if k == 0:
                return r
            k -= 1
    return 0


@inner
def speeds(r, plan, telemetry, view):
    """How fast a replica is, told or guessed from its pace."""
    if telemetry.known_speeds:
        return plan.speed[r]
    return 1.0 / view.pace[r] if view.pace[r] > 0.0 else 0.0


@inner
def score(kind, r, q, plan, telemetry, requests, view):
    """What a router would rather have less of."""
    reported = view.waiting[r] + view.running[r]
    outstanding = reported + view.sent[r]
    if kind in (LEAST, TWO):
        return float(reported)
    if kind == VIDUR:
        return float(view.waiting[r] + view.sent[r])
    if kind == LOCAL:
        return float(outstanding)
    if kind == LEAST_BY_SPEED:
        speed = speeds(r, plan, telemetry, view)
        return (reported + 1) / speed if speed > 0.0 else 0.0
    work = view.waiting_tokens[r] + view.sent_tokens[r] + telemetry.mean_output * outstanding
    if kind == STICKY:
        return outstanding - 1e9 * (view.hit[r] / requests.prompt[q])
    if kind == CACHE_WORK:
        return work + requests.prompt[q] - view.hit[r]
    return float(work)


@inner
def choose(kind, q, plan, telemetry, requests, view, dice):
    """The replica for a request; ties are broken at random, but for Vidur's."""
    count = len(view.up)
    if kind == RANDOM:
        return living(view, dice)
    if kind == ROUND_ROBIN:
        for _ in range(count):
            r = view.turn[0] % count
            view.turn[0] += 1
            if view.up[r]:
                return r
        return view.turn[0] % count
    if kind == TWO:
        one, other = living(view, dice), living(view, dice)
        first = score(kind, one, q, plan, telemetry, requests, view)
        return one if first <= score(kind, other, q, plan, telemetry, requests, view) else other
    best, least, ties = -1, np.inf, 0
    for r in range(count):
        if view.up[r] == 0:
            continue
        found = score(kind, r, q, plan, telemetry, requests, view)
        if found < least:
            best, least, ties = r, found, 1
        elif found == least and kind != VIDUR:
            ties += 1
            if drawn(dice) * ties < 1.0:
                best = r
    return best if best >= 0 else living(view, dice)


@inner
def strike(now, at, failures, clock, plan, requests, replicas, index):
    """Failures `[F, 3]` (when, which replica, 0 down or 1 up) up to a time; the next of them."""
    while at < len(failures) and failures[at, 0] <= now:
        when, r = failures[at, 0], int(failures[at, 1])
        advance(r, when, clock, plan, requests, replicas)
        if failures[at, 2] == 0.0:
            fail(r, when, plan, requests, replicas)
            index.stamp[r, :] = 0
            index.ring_from[r] = index.ring_count[r] = index.cached[r] = 0
        else:
            replicas.up[r] = 1
        at += 1
    return at


@compiled
def simulate(kind, clock, plan, telemetry, failures, requests, replicas, index, view, dice):
    """A whole trace by one router, to the end of the last request."""
    at = 0
    for q in range(len(requests.arrival)):
        at = strike(requests.arrival[q], at, failures, clock, plan, requests, replicas, index)
        observe(q, clock, plan, telemetry, requests, replicas, index, view)
        r = choose(kind, q, plan, telemetry, requests, view, dice)
        dispatch(q, r, clock, plan, requests, replicas, index, view)
    strike(np.inf, at, failures, clock, plan, requests, replicas, index)
    for r in range(len(replicas.head)):
        advance(r, np.inf, clock, plan, requests, replicas)


@inner
def copy_replica(r, replicas, spare):
    """Everything a replica's future depends on, but for its requests."""
    spare.head[0], spare.tail[0] = replicas.head[r], replicas.tail[r]
    spare.waiting[0], spare.waiting_tokens[0] = replicas.waiting[r], replicas.waiting_tokens[r]
    spare.running[0, :], spare.count[0] = replicas.running[r], replicas.count[r]
    spare.batch[0, :], spare.tokens[0, :] = replicas.batch[r], replicas.tokens[r]
    spare.size[0], spare.end[0] = replicas.size[r], replicas.end[r]
    spare.begun[0], spare.seconds[0] = replicas.begun[r], replicas.seconds[r]
    spare.more[0] = replicas.more[r]
    spare.free[0], spare.up[0], spare.pace[0] = replicas.free[r], replicas.up[r], replicas.pace[r]
    spare.stamp[0, :], spare.cached[0] = replicas.stamp[r], replicas.cached[r]
    spare.ring[0, :, :], spare.room[0] = replicas.ring[r], replicas.room[r]
    spare.ring_from[0], spare.ring_count[0] = replicas.ring_from[r], replicas.ring_count[r]
    spare.ticks[0] = replicas.ticks[r]


@inner
def copy_requests(q, requests, future):
    """What becomes of the requests so far."""
    for i in range(q + 1):
        future.prefill[i], future.processed[i] = requests.prefill[i], requests.processed[i]
        future.held[i], future.next[i] = requests.held[i], requests.next[i]
        future.restarts[i], future.started[i] = requests.restarts[i], requests.started[i]
        future.first_token[i], future.finished[i] = requests.first_token[i], requests.finished[i]
        future.lost[i] = requests.lost[i]


@inner
def cost_of_all(r, q, requests, future):
    """Seconds until the end of everything that is at a replica, the request at hand included."""
    now, total = requests.arrival[q], 0.0
    for i in range(q):
        if requests.replica[i] == r and math.isnan(requests.finished[i]):
            total += future.finished[i] - now
    if not math.isnan(future.finished[q]):
        total += future.finished[q] - now
    return total


@compiled
def foresee(clock, plan, plans, requests, future, replicas, spare, failures, index):
    """A whole trace by one who knows all lengths, speeds and caches.

    For every request and replica the replica's future is played to its end, with and without it;
    the request goes where all that are there lose least. `plans` are those of single replicas.
    """
    at = 0
    for q in range(len(requests.arrival)):
        now = requests.arrival[q]
        at = strike(now, at, failures, clock, plan, requests, replicas, index)
        best, least = 0, np.inf
        for r in range(len(replicas.head)):
            advance(r, now, clock, plan, requests, replicas)
        for r in range(len(replicas.head)):
            if replicas.up[r] == 0:
                continue
            extra = 0.0
            for sign in (-1.0, 1.0):
                copy_requests(q, requests, future)
                copy_replica(r, replicas, spare)
                if sign > 0.0:
                    send(q, 0, clock, plans[r], future, spare)
                advance(0, np.inf, clock, plans[r], future, spare)
                extra += sign * cost_of_all(r, q, requests, future)
            if extra < least:
                best, least = r, extra
        send(q, best, clock, plan, requests, replicas)
    strike(np.inf, at, failures, clock, plan, requests, replicas, index)
    for r in range(len(replicas.head)):
        advance(r, np.inf, clock, plan, requests, replicas)
