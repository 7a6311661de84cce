"""Compiled kernels of heuristic routers, and of the simulation of a trace with one of them.

All routers have the same information: reports, which may be old, and the requests they have sent
since. The router's own index of prefixes is a cache like that of the replicas, filled when a
request is sent.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import numpy as np

from keel.apps.serving import fields as f
from keel.apps.serving.compiling import compiled, inner, outer
from keel.apps.serving.kernels import advance, blocks_now, fail, send
from keel.apps.serving.kernels_cache import cache_prefix, clear_prefixes, prefix_hit

(
    RANDOM, ROUND_ROBIN, LEAST, LEAST_BY_SPEED, TWO, WORK, LOCAL, STICKY, CACHE_WORK,
    CACHE_WORK_BY_SPEED, VIDUR,
) = range(11)  # fmt: skip


@outer
def report(r, now, plan, requests, replicas, view):
    """Write a replica's report into the view; it includes the requests sent before."""
    view.ints[f.V_WAITING, r] = replicas.ints[f.R_WAITING, r]
    view.ints[f.V_RUNNING, r] = replicas.ints[f.R_ASIDE, r] + replicas.ints[f.R_SIZE, r]
    view.ints[f.V_UNREAD, r] = replicas.ints[f.R_WAITING_TOKENS, r] + replicas.ints[f.R_READING, r]
    view.times[f.V_MEMORY, r] = 1.0 - blocks_now(r, now, requests, replicas) / plan.blocks[r]
    view.times[f.V_PACE, r] = replicas.times[f.R_PACE, r]
    view.times[f.V_REPORTED, r] = now
    view.ints[f.V_SENT, r] = view.ints[f.V_SENT_TOKENS, r] = 0


@inner
def splitmix64(x):
    """Hash an integer to a pseudo-random number in [0, 1) (SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return np.float64(x >> np.uint64(11)) / 9007199254740992.0


@inner
def is_lost(r, tick, telemetry):
    """Return whether the report of a replica was lost."""
    name = np.uint64(telemetry.seed * 1_000_003 + tick * 257 + r + 1)
    return splitmix64(name * np.uint64(0x9E3779B97F4A7C15)) < telemetry.dropped


@outer
def last_report(r, count, now, telemetry):
    """Return the time of the last report that was not lost, until `now`; −1 before the first.

    Replicas report in turn, not all at once.
    """
    phase = telemetry.interval * r / count
    tick = math.floor((now - phase) / telemetry.interval)
    while tick >= 0 and is_lost(r, tick, telemetry):
        tick -= 1
    return phase + tick * telemetry.interval if tick >= 0 else -1.0


@outer
def observe(q, clock, plan, telemetry, requests, replicas, index, view):
    """Advance all replicas to the arrival of a request, and update the router's view."""
    now = requests.times[f.Q_ARRIVAL, q]
    for r in range(len(replicas.ints[f.R_HEAD])):
        if telemetry.interval > 0.0:
            when = last_report(r, len(replicas.ints[f.R_HEAD]), now, telemetry)
            if when > view.times[f.V_REPORTED, r]:
                advance(r, when, clock, plan, requests, replicas)
                report(r, when, plan, requests, replicas, view)
            advance(r, now, clock, plan, requests, replicas)
        else:
            advance(r, now, clock, plan, requests, replicas)
            report(r, now, plan, requests, replicas, view)
        view.ints[f.V_UP, r] = replicas.ints[f.R_UP, r]
        view.ints[f.V_HIT, r] = prefix_hit(r, q, requests, index)


@outer
def send_and_record(q, r, clock, plan, requests, replicas, index, view):
    """Send a request, and record it in the router's view and prefix index."""
    send(q, r, clock, plan, requests, replicas)
    cache_prefix(r, q, requests, index)
    view.ints[f.V_SENT, r] += 1
    view.ints[f.V_SENT_TOKENS, r] += requests.ints[f.Q_PROMPT, q] - view.ints[f.V_HIT, r]


@inner
def next_uniform(dice):
    """Return the next random number in [0, 1); the same on every machine."""
    dice[0] = dice[0] + np.uint64(0x9E3779B97F4A7C15)
    return splitmix64(dice[0])


@inner
def random_live_replica(view, dice):
    """Return a random replica that is up; any replica if none is."""
    count = 0
    for r in range(len(view.ints[f.V_UP])):
        count += view.ints[f.V_UP, r]
    if count == 0:
        return int(next_uniform(dice) * len(view.ints[f.V_UP]))
    k = int(next_uniform(dice) * count)
    for r in range(len(view.ints[f.V_UP])):
        if view.ints[f.V_UP, r]:
            if k == 0:
                return r
            k -= 1
    return 0


@inner
def speed_of(r, plan, telemetry, view):
    """Return the speed of a replica: known, or estimated from its pace or the others'."""
    if telemetry.known_speeds:
        return plan.speed[r]
    if view.times[f.V_PACE, r] > 0.0:
        return 1.0 / view.times[f.V_PACE, r]
    paces, known = 0.0, 0
    for other in range(len(view.times[f.V_PACE])):
        if view.times[f.V_PACE, other] > 0.0:
            paces += view.times[f.V_PACE, other]
            known += 1
    return known / paces if known else 1.0


@inner
def heuristic_cost(kind, r, q, plan, telemetry, requests, view):
    """Return the cost that a heuristic minimizes."""
    reported = view.ints[f.V_WAITING, r] + view.ints[f.V_RUNNING, r]
    outstanding = reported + view.ints[f.V_SENT, r]
    if kind in (LEAST, TWO):
        return float(reported)
    if kind == VIDUR:
        return float(view.ints[f.V_WAITING, r] + view.ints[f.V_SENT, r])
    if kind == LOCAL:
        return float(outstanding)
    if kind == LEAST_BY_SPEED:
        return (outstanding + 1) / speed_of(r, plan, telemetry, view)
    work = (
        view.ints[f.V_UNREAD, r]
        + view.ints[f.V_SENT_TOKENS, r]
        + telemetry.mean_output * outstanding
    )
    if kind == STICKY:
        return outstanding - 1e9 * (view.ints[f.V_HIT, r] / requests.ints[f.Q_PROMPT, q])
    if kind == WORK:
        return float(work)
    work += requests.ints[f.Q_PROMPT, q] - view.ints[f.V_HIT, r]
    return work if kind == CACHE_WORK else work / speed_of(r, plan, telemetry, view)


@outer
def choose(kind, q, plan, telemetry, requests, view, dice):
    """Choose the replica for a request; ties are broken at random, except for Vidur's."""
    count = len(view.ints[f.V_UP])
    if kind == RANDOM:
        return random_live_replica(view, dice)
    if kind == ROUND_ROBIN:
        for _ in range(count):
            r = view.turn[0] % count
            view.turn[0] += 1
            if view.ints[f.V_UP, r]:
                return r
        return view.turn[0] % count
    if kind == TWO:
        one, other = random_live_replica(view, dice), random_live_replica(view, dice)
        first = heuristic_cost(kind, one, q, plan, telemetry, requests, view)
        return (
            one
            if first <= heuristic_cost(kind, other, q, plan, telemetry, requests, view)
            else other
        )
    best, least, ties = -1, np.inf, 0
    for r in range(count):
        if view.ints[f.V_UP, r] == 0:
            continue
        cost = heuristic_cost(kind, r, q, plan, telemetry, requests, view)
        if cost < least:
            best, least, ties = r, cost, 1
        elif cost == least and kind != VIDUR:
            ties += 1
            if next_uniform(dice) * ties < 1.0:
                best = r
    return best if best >= 0 else random_live_replica(view, dice)


@outer
def apply_failures(now, at, failures, clock, plan, requests, replicas, index):
    """Apply failures `[F, 3]` (time, replica, 0 down or 1 up) until `now`; return the next."""
    while at < len(failures) and failures[at, 0] <= now and failures[at, 0] < np.inf:
        when, r = failures[at, 0], int(failures[at, 1])
        advance(r, when, clock, plan, requests, replicas)
        if failures[at, 2] == 0.0:
            fail(r, when, plan, requests, replicas)
            clear_prefixes(r, index)
        else:
            replicas.ints[f.R_UP, r] = 1
        at += 1
    return at


@compiled
def simulate(kind, clock, plan, telemetry, failures, requests, replicas, index, view, dice):
    """Simulate a trace with one router, to the end of the last request."""
    at = 0
    for q in range(len(requests.times[f.Q_ARRIVAL])):
        at = apply_failures(
            requests.times[f.Q_ARRIVAL, q], at, failures, clock, plan, requests, replicas, index
        )
        observe(q, clock, plan, telemetry, requests, replicas, index, view)
        r = choose(kind, q, plan, telemetry, requests, view, dice)
        send_and_record(q, r, clock, plan, requests, replicas, index, view)
    apply_failures(np.inf, at, failures, clock, plan, requests, replicas, index)
    for r in range(len(replicas.ints[f.R_HEAD])):
        advance(r, np.inf, clock, plan, requests, replicas)


@outer
def copy_replica(r, replicas, spare):
    """Copy the state of a replica into `spare`, without its requests."""
    for k in range(f.R_INTS):
        spare.ints[k, 0] = replicas.ints[k, r]
    for k in range(f.R_TIMES):
        spare.times[k, 0] = replicas.times[k, r]
    for j in range(replicas.ints[f.R_ASIDE, r]):
        spare.running[0, j] = replicas.running[r, j]
    for j in range(replicas.ints[f.R_SIZE, r]):
        spare.batch[0, j], spare.tokens[0, j] = replicas.batch[r, j], replicas.tokens[r, j]
    if replicas.ints[f.R_ROOM, r]:
        for j in range(replicas.ints[f.R_NAMES, r]):
            spare.stamp[0, j] = replicas.stamp[r, j]
        length = replicas.ring.shape[1]
        for j in range(replicas.ints[f.R_RING_COUNT, r]):
            k = (replicas.ints[f.R_RING_FROM, r] + j) % length
            spare.ring[0, k, 0], spare.ring[0, k, 1] = (
                replicas.ring[r, k, 0],
                replicas.ring[r, k, 1],
            )


@outer
def copy_requests(q, requests, future):
    """Copy the requests so far into `future`."""
    for k in range(f.Q_INTS):
        for i in range(q + 1):
            future.ints[k, i] = requests.ints[k, i]
    for k in range(f.Q_TIMES):
        for i in range(q + 1):
            future.times[k, i] = requests.times[k, i]


@inner
def cost_of_one(i, now, weights, requests, future):
    """Return the future cost of a request that has not ended."""
    end = future.times[f.Q_FINISHED, i]
    total = weights.end * (end - now)
    if math.isnan(requests.times[f.Q_FIRST_TOKEN, i]):
        first = future.times[f.Q_FIRST_TOKEN, i]
        total += weights.first * ((end if math.isnan(first) else first) - now)
    return total + weights.lost * (future.ints[f.Q_LOST, i] > 0)


@outer
def cost_of_all(r, q, weights, requests, future):
    """Return the future cost of all requests at a replica.

    The request at hand is included if it was sent there.
    """
    now, total = requests.times[f.Q_ARRIVAL, q], 0.0
    for i in range(q):
        if requests.ints[f.Q_REPLICA, i] == r and math.isnan(requests.times[f.Q_FINISHED, i]):
            total += cost_of_one(i, now, weights, requests, future)
    if not math.isnan(future.times[f.Q_FINISHED, q]):
        total += cost_of_one(q, now, weights, requests, future)
    return total


@compiled
def clairvoyant(weights, clock, plan, plans, requests, future, replicas, spare, failures, index):
    """Simulate a trace with a router that knows all lengths, speeds and caches.

    For every request and replica the replica's future is simulated to its end, with and without
    the request; it is sent where the total cost increases least. `plans` are those of single
    replicas.
    """
    at = 0
    for q in range(len(requests.times[f.Q_ARRIVAL])):
        now = requests.times[f.Q_ARRIVAL, q]
        at = apply_failures(now, at, failures, clock, plan, requests, replicas, index)
        best, least = 0, np.inf
        for r in range(len(replicas.ints[f.R_HEAD])):
            advance(r, now, clock, plan, requests, replicas)
        for r in range(len(replicas.ints[f.R_HEAD])):
            if replicas.ints[f.R_UP, r] == 0:
                continue
            extra = 0.0
            for sign in (-1.0, 1.0):
                copy_requests(q, requests, future)
                copy_replica(r, replicas, spare)
                if sign > 0.0:
                    send(q, 0, clock, plans[r], future, spare)
                advance(0, np.inf, clock, plans[r], future, spare)
                extra += sign * cost_of_all(r, q, weights, requests, future)
            if extra < least:
                best, least = r, extra
        send(q, best, clock, plan, requests, replicas)
    apply_failures(np.inf, at, failures, clock, plan, requests, replicas, index)
    for r in range(len(replicas.ints[f.R_HEAD])):
        advance(r, np.inf, clock, plan, requests, replicas)
