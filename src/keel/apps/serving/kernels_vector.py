"""Compiled kernels for many clusters at once, with one routing decision in each.

Arrays are those of `keel.apps.serving.arrays` with an axis for clusters in front; a cluster's own
are views of them.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import numpy as np

from keel.apps.serving import fields as f
from keel.apps.serving.arrays import Plan, Replicas, Requests, Telemetry, View
from keel.apps.serving.compiling import compiled, inner, outer
from keel.apps.serving.kernels import advance
from keel.apps.serving.kernels_route import (
    apply_failures,
    cost_of_choice,
    observe,
    send_and_record,
)
from keel.apps.serving.observations import UNKNOWN_PACE


@inner
def plan_of(c, plans):
    """Return the plan of one cluster."""
    return Plan(
        plans.kind[c], plans.speed[c], plans.blocks[c], plans.watermark[c], plans.cache[c],
        plans.chunk, plans.cap, plans.order, plans.queue, plans.patience,
    )  # fmt: skip


@inner
def single_plan(c, r, plans):
    """Return the plan of one replica of one cluster."""
    one = slice(r, r + 1)
    return Plan(
        plans.kind[c, one], plans.speed[c, one], plans.blocks[c, one], plans.watermark[c, one],
        plans.cache[c, one], plans.chunk, plans.cap, plans.order, plans.queue, plans.patience,
    )  # fmt: skip


@inner
def requests_of(c, batch):
    """Return the requests of one cluster."""
    return Requests(
        batch.ints[c], batch.times[c], batch.first[c], batch.hashes[c], batch.prefix_block
    )


@inner
def replicas_of(c, batch):
    """Return the replicas of one cluster."""
    return Replicas(
        batch.ints[c], batch.times[c], batch.running[c], batch.batch[c], batch.tokens[c],
        batch.stamp[c], batch.ring[c],
    )  # fmt: skip


@inner
def view_of(c, batch):
    """Return the view of one cluster's router."""
    return View(batch.ints[c], batch.times[c], batch.turn[c])


@inner
def telemetry_of(c, batch):
    """Return the telemetry of one cluster."""
    return Telemetry(
        batch.interval[c],
        batch.dropped[c],
        batch.known_speeds[c],
        batch.mean_output[c],
        batch.seed[c],
    )


@outer
def write_observation(now, prompt, view, replicas, request, mask):
    """Write the features of `keel.apps.serving.observations`."""
    count = len(view.ints[f.V_UP])
    paces, known, total, up_count = 0.0, 0, 0.0, 0
    for r in range(count):
        mask[r] = view.ints[f.V_UP, r] == 1
        if not mask[r]:
            continue
        up_count += 1
        total += view.ints[f.V_WAITING, r] + view.ints[f.V_RUNNING, r] + view.ints[f.V_SENT, r]
        if view.times[f.V_PACE, r] > 0.0:
            paces += math.log(view.times[f.V_PACE, r])
            known += 1
    typical = paces / known if known else UNKNOWN_PACE
    for r in range(count):
        outstanding = view.ints[f.V_WAITING, r] + view.ints[f.V_RUNNING, r] + view.ints[f.V_SENT, r]
        pace = math.log(view.times[f.V_PACE, r]) if view.times[f.V_PACE, r] > 0.0 else typical
        pace -= UNKNOWN_PACE
        tokens = view.ints[f.V_UNREAD, r] + view.ints[f.V_SENT_TOKENS, r]
        to_read = prompt - view.ints[f.V_HIT, r]
        replicas[r, 0] = math.log1p(outstanding)
        replicas[r, 1] = math.log1p(view.ints[f.V_RUNNING, r])
        replicas[r, 2] = math.log1p(tokens / 512.0)
        replicas[r, 3] = view.times[f.V_MEMORY, r]
        replicas[r, 4] = pace
        replicas[r, 5] = view.ints[f.V_HIT, r] / prompt
        replicas[r, 6] = math.log1p(to_read / 512.0)
        replicas[r, 7] = math.log1p(view.ints[f.V_SENT, r])
        replicas[r, 8] = math.log1p(max(0.0, now - view.times[f.V_REPORTED, r]))
        replicas[r, 9] = math.log1p(outstanding) + pace
        replicas[r, 10] = math.log1p((tokens + to_read) / 512.0) + pace
    if not mask.any():
        mask[:] = True
    request[0] = math.log1p(prompt / 512.0)
    request[1] = math.log1p(total / max(1, up_count))


@outer
def cost_between(q, weights, requests, since, until):
    """Return the total cost of requests 0 … q between two times.

    Request q was sent at the first of them, and may have been turned away in the same moment.
    """
    total = 0.0
    for i in range(q, -1, -1):
        begin, end = max(since, requests.times[f.Q_ARRIVAL, i]), requests.times[f.Q_FINISHED, i]
        if end < since or (end == since and i < q):
            continue
        if requests.ints[f.Q_LOST, i] and end <= until:
            total += weights.lost
        end = until if math.isnan(end) or end > until else end
        first = requests.times[f.Q_FIRST_TOKEN, i]
        first = end if math.isnan(first) or first > end else first
        total += weights.end * (end - begin) + weights.first * max(0.0, first - begin)
    return total


@outer
def observe_cluster(c, at, clock, plans, telemetries, failures, next_failure, requests, replicas,
                    index, views, observations):  # fmt: skip
    """Advance a cluster to the arrival of the request at hand, and write its observation."""
    q, plan = at[c], plan_of(c, plans)
    own, own_replicas = requests_of(c, requests), replicas_of(c, replicas)
    own_index, view = replicas_of(c, index), view_of(c, views)
    now, prompt = own.times[f.Q_ARRIVAL, q], own.ints[f.Q_PROMPT, q]
    next_failure[c] = apply_failures(
        now, next_failure[c], failures[c], clock, plan, own, own_replicas, own_index
    )
    observe(q, clock, plan, telemetry_of(c, telemetries), own, own_replicas, own_index, view)
    features, request, mask = observations
    write_observation(now, prompt, view, features[c], request[c], mask[c])


@compiled
def observe_clusters(part, at, clock, plans, telemetries, failures, next_failure, requests,
                     replicas, index, views, observations):  # fmt: skip
    """Call `observe_cluster` for the clusters of `part`."""
    for c in part:
        observe_cluster(c, at, clock, plans, telemetries, failures, next_failure, requests,
                        replicas, index, views, observations)  # fmt: skip


@compiled
def step_clusters(part, action, weights, cost, at, clock, plans, telemetries, failures,
                  next_failure, requests, replicas, index, views, observations):  # fmt: skip
    """Send the requests at hand, and observe the next ones, in the clusters of `part`.

    `cost` is that of all requests of a cluster between the two arrivals; after the last request,
    until all have ended.
    """
    for c in part:
        q, plan = at[c], plan_of(c, plans)
        own, own_replicas = requests_of(c, requests), replicas_of(c, replicas)
        own_index, view = replicas_of(c, index), view_of(c, views)
        send_and_record(q, action[c], clock, plan, own, own_replicas, own_index, view)
        now = own.times[f.Q_ARRIVAL, q]
        if q + 1 < len(own.times[f.Q_ARRIVAL]):
            at[c] = q + 1
            observe_cluster(c, at, clock, plans, telemetries, failures, next_failure, requests,
                            replicas, index, views, observations)  # fmt: skip
            cost[c] = cost_between(q, weights, own, now, own.times[f.Q_ARRIVAL, q + 1])
            continue
        next_failure[c] = apply_failures(
            np.inf, next_failure[c], failures[c], clock, plan, own, own_replicas, own_index
        )
        for r in range(len(own_replicas.ints[f.R_HEAD])):
            advance(r, np.inf, clock, plan, own, own_replicas)
        until = now
        for i in range(len(own.times[f.Q_ARRIVAL])):
            until = max(until, own.times[f.Q_FINISHED, i])
        cost[c] = cost_between(q, weights, own, now, until)


@compiled
def counterfactual_costs(part, weights, at, clock, plans, requests, future, replicas, spare, cost):
    """Write the cost of each choice to all requests of its replica, `cost` `[C, R]`."""
    for c in part:
        q = at[c]
        own, own_replicas = requests_of(c, requests), replicas_of(c, replicas)
        then, alone = requests_of(c, future), replicas_of(c, spare)
        for r in range(len(own_replicas.ints[f.R_HEAD])):
            if own_replicas.ints[f.R_UP, r] == 0:
                cost[c, r] = weights.lost
                continue
            single = single_plan(c, r, plans)
            cost[c, r] = cost_of_choice(
                q, r, weights, clock, single, own, then, own_replicas, alone
            )
