"""Arrays that the simulator's kernels work on: one cluster, by request or by replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from keel.apps.serving import fields as f
from keel.apps.serving.tables import Tables
from keel.errors import InputError

BLOCK = 16
"""Tokens in a block of the KV cache."""
NONE = -1

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Clock(NamedTuple):
    """Iteration times of all kinds of replicas, stacked."""

    linear: Floats
    """`[K, 1025]`"""
    decode: Floats
    """`[K, 129, 65]`"""
    prefill: Floats
    """`[K, 65, 513]`"""
    layers: Ints
    """`[K]`"""
    grouped: Ints


class Plan(NamedTuple):
    """Configuration of a cluster; `[R]` each."""

    kind: Ints
    """index of its tables in `Clock`"""
    speed: Floats
    """speed factor: times are divided by it"""
    blocks: Ints
    """blocks of the KV cache"""
    watermark: Ints
    """blocks that must stay free when a request is admitted"""
    cache: Ints
    """capacity of the prefix cache in blocks; 0: none"""
    chunk: int
    """most tokens of an iteration"""
    cap: int
    """most sequences of an iteration"""
    order: int
    """0: Sarathi's chunks; 1: vLLM's, prompts first and alone"""
    queue: int
    """requests that may wait at a replica; more are turned away"""
    patience: float
    """seconds after which a waiting request gives up"""


PER_REPLICA = ("kind", "speed", "blocks", "watermark", "cache")
"""Fields of a plan with a number for each replica."""


class Requests(NamedTuple):
    """Requests in the order of their arrival.

    The rows of `ints` and `times` are named in `keel.apps.serving.fields`:

    * `Q_PROMPT`, `Q_OUTPUT`: tokens to read, and that will be written, which no router knows;
    * `Q_PREFILL`: tokens to read now, more after a restart; `Q_PROCESSED`: tokens processed so far;
    * `Q_HELD`: blocks of KV cache; `Q_NEXT`: next request in its queue; `Q_REPLICA`: its replica;
    * `Q_HIT`: tokens of its prompt that were in the prefix cache; `Q_RESTARTS`;
    * `Q_LOST`: 0; 1: turned away, 2: gave up, 3: its replica failed;
    * `Q_ARRIVAL`, `Q_STARTED` (first admitted), `Q_FIRST_TOKEN`, `Q_FINISHED`: NaN until then.
    """

    ints: Ints
    """`[Q_INTS, N]`"""
    times: Floats
    """`[Q_TIMES, N]`"""
    first: Ints
    """`[N + 1]`: where the prefix blocks of each begin in `hashes`"""
    hashes: Ints
    """`[H]`: names of prefix blocks, request after request"""
    prefix_block: int
    """tokens of one of them"""


class Replicas(NamedTuple):
    """State of the replicas.

    The rows of `ints` and `times` are named in `keel.apps.serving.fields`:

    * `R_HEAD`, `R_TAIL` of the queue; `R_WAITING` requests in it, `R_WAITING_TOKENS` to read;
      `R_READING`: tokens to read of those that were admitted, as the iteration under way began;
    * `R_ASIDE`: requests in `running`; `R_SIZE`: of the batch, 0 when idle;
    * `R_MORE`: equal iterations of the stretch under way beside its last;
    * `R_FREE`: blocks of KV cache; `R_UP`: 1, or 0 after a failure;
    * `R_DONE_TOKENS` read and written so far, `R_FINISHED` requests;
    * `R_ROOM`: prefix blocks that may be kept, `R_CACHED`: that are; `R_RING_FROM`,
      `R_RING_COUNT`: of `ring`; `R_TICKS`: uses so far; `R_NAMES`: different blocks in the trace;
    * `R_END` of the stretch under way, `R_BEGUN`: its begin, `R_SECONDS` of an iteration of it;
    * `R_BUSY`: seconds; `R_PACE`: seconds from one token of a sequence to its next, lately.
    """

    ints: Ints
    """`[R_INTS, R]`"""
    times: Floats
    """`[R_TIMES, R]`"""
    running: Ints
    """`[R, cap]`: admitted, and not in the iteration under way"""
    batch: Ints
    """`[R, cap]`: in the iteration under way"""
    tokens: Ints
    """`[R, cap]`: tokens of each sequence in the iteration under way"""
    stamp: Ints
    """`[R, U]`: when a prefix block was last used; 0: it is not cached"""
    ring: Ints
    """`[R, L, 2]`: uses in their order: block and stamp"""


class View(NamedTuple):
    """Knowledge of a router: reports of the replicas, and the requests it has sent since.

    The rows are named in `keel.apps.serving.fields`:

    * `V_WAITING`, `V_RUNNING`, `V_UNREAD` (tokens of prompts), `V_MEMORY` (share of the KV cache
      in use), `V_PACE`: as reported, at the time `V_REPORTED`;
    * `V_SENT`: requests since then, `V_SENT_TOKENS` of their prompts, probably cached ones not
      counted;
    * `V_UP`; `V_HIT`: tokens of the request at hand that are probably in its prefix cache.
    """

    ints: Ints
    """`[V_INTS, R]`"""
    times: Floats
    """`[V_TIMES, R]`"""
    turn: Ints
    """`[1]`: position of round robin"""


class Telemetry(NamedTuple):
    """Reporting of the replicas."""

    interval: float
    """seconds between reports; 0: always up to date"""
    dropped: float
    """share of reports that get lost"""
    known_speeds: int
    """1: routers know the speeds of the replicas"""
    mean_output: float
    """tokens a router expects a request to write"""
    seed: int
    """decides which reports get lost"""


class Weights(NamedTuple):
    """Costs of seconds and of lost requests: a weighted sum of objectives."""

    end: float = 1.0
    """cost of a second of any request until its end"""
    first: float = 0.0
    """additional cost of a second until its first token"""
    lost: float = 30.0
    """cost of a request that is turned away, gives up, or was at a replica that failed"""


def make_weights(end: float, first: float, lost: float) -> Weights:
    """Return checked weights; raise an `InputError` for negative ones."""
    weights = Weights(float(end), float(first), float(lost))
    if not all(0.0 <= x < np.inf for x in weights) or weights.end + weights.first == 0.0:
        raise InputError(
            f"weights: expected numbers from 0, and that of the end or of the first token above 0, "
            f"got {end:g}, {first:g}, {lost:g}"
        )
    return weights


def plan_of_replica(plan: Plan, r: int) -> Plan:
    """Return the plan of a cluster of one of the replicas alone."""
    own = {name: getattr(plan, name)[r : r + 1].copy() for name in PER_REPLICA}
    return plan._replace(**own)


def blank_view(count: int) -> View:
    """Return the view of a router before the first report, for `count` replicas."""
    ints = np.zeros((f.V_INTS, count), dtype=np.int64)
    ints[f.V_UP] = 1
    return View(ints, np.zeros((f.V_TIMES, count)), np.zeros(1, dtype=np.int64))


def make_clock(tables: Sequence[Tables]) -> Clock:
    """Stack the tables of K kinds of replicas."""
    return Clock(
        linear=np.stack([t.linear for t in tables]),
        decode=np.stack([t.decode for t in tables]),
        prefill=np.stack([t.prefill for t in tables]),
        layers=np.array([t.layers for t in tables]),
        grouped=np.array([int(t.grouped) for t in tables]),
    )


def idle_replicas(plan: Plan, universe: int) -> Replicas:
    """Return the state of replicas before the first request.

    Args:
        plan: Configuration of R replicas.
        universe: Number of different prefix blocks.
    """
    count, cap = len(plan.kind), plan.cap
    ring_length = int(4 * plan.cache.max(initial=0) + 8)
    ints = np.zeros((f.R_INTS, count), dtype=np.int64)
    ints[[f.R_HEAD, f.R_TAIL]] = NONE
    ints[f.R_UP] = 1
    ints[f.R_FREE], ints[f.R_ROOM], ints[f.R_NAMES] = plan.blocks, plan.cache, universe

    def zeros(*shape: int) -> Ints:
        return np.zeros((count, *shape), dtype=np.int64)

    return Replicas(
        ints=ints,
        times=np.zeros((f.R_TIMES, count)),
        running=zeros(cap),
        batch=zeros(cap),
        tokens=zeros(cap),
        stamp=zeros(max(1, universe)),
        ring=zeros(ring_length, 2),
    )
