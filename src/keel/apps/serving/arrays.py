"""The simulator's numbers as its loops take them: of one cluster, by request or by replica."""

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
    """Tables of all kinds of replicas, one after the other."""

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
    """What a cluster is made of; `[R]` each."""

    kind: Ints
    """which tables"""
    speed: Floats
    """times divide by it"""
    blocks: Ints
    """of the KV cache"""
    watermark: Ints
    """blocks that admitting a request must leave"""
    cache: Ints
    """prefix blocks kept for later requests; 0: none"""
    chunk: int
    """tokens of an iteration"""
    cap: int
    """sequences of an iteration"""
    order: int
    """0: Sarathi's chunks; 1: vLLM's, prompts first and alone"""
    queue: int
    """requests that may wait at a replica; more are turned away"""
    patience: float
    """seconds after which a waiting request gives up"""


class Requests(NamedTuple):
    """In the order of their arrival. The rows of `ints` and `times` are named in
    `keel.apps.serving.fields`:

    * `Q_PROMPT`, `Q_OUTPUT`: tokens to read, and that will be written, which no router knows;
    * `Q_PREFILL`: tokens to read now, which are more after a restart; `Q_PROCESSED`: of all so far;
    * `Q_HELD`: blocks of KV cache; `Q_NEXT`: who waits behind it; `Q_REPLICA`: where it was sent;
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
    """Where replicas stand. The rows of `ints` and `times` are named in
    `keel.apps.serving.fields`:

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
    """`[R, cap]`: how many of each"""
    stamp: Ints
    """`[R, U]`: when a prefix block was last used; 0: it is not there"""
    ring: Ints
    """`[R, L, 2]`: uses in their order: block and stamp"""


class View(NamedTuple):
    """What a router knows: reports of the replicas, and what it has itself sent since. The rows
    are named in `keel.apps.serving.fields`:

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
    """`[1]`: whose it is, for round robin"""


class Telemetry(NamedTuple):
    """How replicas report."""

    interval: float
    """seconds between reports; 0: they are always up to date"""
    dropped: float
    """share of reports that get lost"""
    known_speeds: int
    """1: routers are told how fast replicas are"""
    mean_output: float
    """tokens a router expects a request to write"""
    seed: int
    """decides which reports get lost"""


class Weights(NamedTuple):
    """What a second, or a lost request, costs: several aims at once."""

    end: float = 1.0
    """a second of any request until its end"""
    first: float = 0.0
    """on top of that, a second until its first token"""
    lost: float = 30.0
    """a request that is turned away, gives up, or was at a replica that failed"""


def make_weights(end: float, first: float, lost: float) -> Weights:
    """Checked."""
    found = Weights(float(end), float(first), float(lost))
    if not all(0.0 <= x < np.inf for x in found) or found.end + found.first == 0.0:
        raise InputError(
            f"weights: expected numbers from 0, and that of the end or of the first token above 0, "
            f"got {end:g}, {first:g}, {lost:g}"
        )
    return found


def blank_view(count: int) -> View:
    """Before the first report."""
    ints = np.zeros((f.V_INTS, count), dtype=np.int64)
    ints[f.V_UP] = 1
    return View(ints, np.zeros((f.V_TIMES, count)), np.zeros(1, dtype=np.int64))


def make_clock(tables: Sequence[Tables]) -> Clock:
    """Put tables one after the other."""
    return Clock(
        linear=np.stack([t.linear for t in tables]),
        decode=np.stack([t.decode for t in tables]),
        prefill=np.stack([t.prefill for t in tables]),
        layers=np.array([t.layers for t in tables]),
        grouped=np.array([int(t.grouped) for t in tables]),
    )


def idle_replicas(plan: Plan, universe: int) -> Replicas:
    """Before the first request; `universe` is how many different prefix blocks there are."""
    count, cap = len(plan.kind), plan.cap
    room = int(4 * plan.cache.max(initial=0) + 8)
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
        ring=zeros(room, 2),
    )
