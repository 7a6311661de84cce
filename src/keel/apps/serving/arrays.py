"""The simulator's numbers as its loops take them: of one cluster, by request or by replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from keel.apps.serving.tables import Tables

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
    """`[N]` each, in the order of their arrival."""

    arrival: Floats
    prompt: Ints
    output: Ints
    """tokens that will be written; no router knows"""
    first: Ints
    """where its prefix blocks begin in `hashes`"""
    hashes: Ints
    """`[H]`: names of prefix blocks, request after request"""
    prefix_block: int
    """tokens of one of them"""
    # what becomes of them
    prefill: Ints
    """tokens to read, which are more after a restart"""
    processed: Ints
    held: Ints
    """blocks of KV cache"""
    next: Ints
    """who waits behind it"""
    replica: Ints
    """where it was sent"""
    hit: Ints
    """tokens of its prompt that were in the prefix cache"""
    restarts: Ints
    started: Floats
    """when it was first admitted"""
    first_token: Floats
    finished: Floats
    """NaN until then"""
    lost: Ints
    """0; 1: turned away, 2: gave up, 3: its replica failed"""


class Replicas(NamedTuple):
    """Where replicas stand; `[R]` unless it says otherwise."""

    head: Ints
    """of the queue"""
    tail: Ints
    waiting: Ints
    waiting_tokens: Ints
    """of prompts that wait, and of restarted ones all they have to read again"""
    running: Ints
    """`[R, cap]`: admitted, and not in the iteration under way"""
    count: Ints
    batch: Ints
    """`[R, cap]`: in the iteration under way"""
    tokens: Ints
    """`[R, cap]`: how many of each"""
    size: Ints
    """of the batch; 0 when idle"""
    end: Floats
    """of the iteration under way, or of the last of a stretch of equal ones"""
    begun: Floats
    """when the stretch began"""
    seconds: Floats
    """of one of its iterations"""
    more: Ints
    """iterations of the stretch beside the last"""
    free: Ints
    """blocks"""
    up: Ints
    """1, or 0 after a failure"""
    busy: Floats
    """seconds"""
    done_tokens: Ints
    """read and written so far"""
    pace: Floats
    """seconds a token takes while decoding, lately"""
    finished: Ints
    """requests"""
    stamp: Ints
    """`[R, U]`: when a prefix block was last used; 0: it is not there"""
    ring: Ints
    """`[R, L, 2]`: uses in their order: block and stamp"""
    ring_from: Ints
    ring_count: Ints
    room: Ints
    """prefix blocks that may be there"""
    cached: Ints
    """prefix blocks that are there"""
    ticks: Ints
    """uses so far"""


class View(NamedTuple):
    """What a router knows: reports of the replicas, and what it has itself sent since."""

    waiting: Ints
    """`[R]`, as reported"""
    running: Ints
    waiting_tokens: Ints
    memory: Floats
    """share of the KV cache in use"""
    pace: Floats
    """seconds an iteration of decoding takes, lately; 0 before the first"""
    reported: Floats
    """when"""
    sent: Ints
    """requests since then"""
    sent_tokens: Ints
    """of their prompts, without what was expected to be cached"""
    up: Ints
    hit: Ints
    """tokens of the request at hand that a replica probably has in its prefix cache"""
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


def blank_view(count: int) -> View:
    """Before the first report."""
    ints = [np.zeros(count, dtype=np.int64) for _ in range(6)]
    floats = [np.zeros(count) for _ in range(3)]
    return View(
        waiting=ints[0], running=ints[1], waiting_tokens=ints[2], memory=floats[0], pace=floats[1],
        reported=floats[2], sent=ints[3], sent_tokens=ints[4],
        up=np.ones(count, dtype=np.int64), hit=ints[5], turn=np.zeros(1, dtype=np.int64),
    )  # fmt: skip


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
    room = int(4 * plan.cache.max(initial=0) + 8 * max(1, universe > 0))

    def ints(*shape: int, fill: int = 0) -> Ints:
        return np.full(shape or (count,), fill, dtype=np.int64)

    def floats(fill: float = 0.0) -> Floats:
        return np.full(count, fill)

    return Replicas(
        head=ints(fill=NONE), tail=ints(fill=NONE), waiting=ints(), waiting_tokens=ints(),
        running=ints(count, cap), count=ints(), batch=ints(count, cap), tokens=ints(count, cap),
        size=ints(), end=floats(), begun=floats(), seconds=floats(), more=ints(), free=plan.blocks.copy(), up=ints(fill=1), busy=floats(),
        done_tokens=ints(), pace=floats(), finished=ints(),
        stamp=ints(count, max(1, universe)), ring=ints(count, room, 2), ring_from=ints(),
        ring_count=ints(), room=plan.cache.copy(), cached=ints(), ticks=ints(),
    )  # fmt: skip
