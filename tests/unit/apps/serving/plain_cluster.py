"""A replica with all of its rules in plain Python, iteration by iteration, to compare with."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keel.apps.serving import fields as f
from keel.apps.serving.cluster import Cluster
from keel.apps.serving.observations import update_pace
from keel.apps.serving.simulation import SimulationResult
from keel.apps.serving.tables import Tables
from keel.apps.serving.workload import Workload, make_workload

BLOCK = 16
TURNED_AWAY, GAVE_UP, FAILED = 1, 2, 3


@dataclass(eq=False)
class Call:
    """One request."""

    arrival: float
    prompt: int
    output: int
    names: list[int]
    block: int
    prefill: int = 0
    processed: int = 0
    held: int = 0
    hit: int = 0
    restarts: int = 0
    lost: int = 0
    started: bool = False
    first: float = math.nan
    end: float = math.nan

    @property
    def writes(self) -> bool:
        """The prompt is read: its end has written the first token."""
        return self.processed > self.prefill


def calls_of(workload: Workload) -> list[Call]:
    chains = [
        workload.hashes[a:b].tolist()
        for a, b in zip(workload.first, workload.first[1:], strict=False)
    ]
    columns = zip(workload.arrival, workload.prompt, workload.output, chains, strict=True)
    return [
        Call(float(a), int(p), int(o), chain, workload.prefix_block, prefill=int(p))
        for a, p, o, chain in columns
    ]


def blocks_of(tokens: int) -> int:
    return math.ceil(tokens / BLOCK)


def seconds(tables: Tables, batch: list[tuple[Call, int]]) -> float:
    """Of one iteration: calls, and how many tokens of each."""
    total = 8 * math.ceil(sum(tokens for _, tokens in batch) / 8)
    last = len(tables.linear) - 1
    spent = float(tables.linear[min(total, last)]) * max(1.0, total / last)
    writing = [x.processed for x, _ in batch if x.writes]
    if writing:
        entry = min(math.ceil(int(np.mean(writing)) / 64), 64)
        factor = 1.1 if tables.grouped and len(writing) > 1 else 1.0
        spent += factor * float(tables.decode[len(writing), entry])
    reading = [(x, tokens) for x, tokens in batch if not x.writes]
    if reading:
        entry = min(sum(math.ceil(x.processed / 64) for x, _ in reading), 64)
        size = round(math.sqrt(sum(tokens**2 for _, tokens in reading)))
        factor = 1.1 if tables.grouped and len(reading) > 1 else 1.0
        while size > 512:
            spent += factor * float(tables.prefill[entry, 512])
            entry, size = min(entry + 8, 64), size - 512
        spent += factor * float(tables.prefill[entry, size])
    return spent * tables.layers * 1e-3


@dataclass(eq=False)
class PlainReplica:
    """What `keel.apps.serving.kernels` does, with lists, and without stretches."""

    cluster: Cluster
    number: int
    queue: list[Call] = field(default_factory=list)
    running: list[Call] = field(default_factory=list)
    batch: list[tuple[Call, int]] = field(default_factory=list)
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    up: bool = True
    end: float = math.inf
    spent: float = 0.0
    unread: int = 0
    pace: float = 0.0
    busy: float = 0.0
    tokens: int = 0
    finished: int = 0

    def __post_init__(self) -> None:
        replica = self.cluster.replicas[self.number]
        self.tables, self.speed, self.room = replica.tables, replica.speed, replica.cache
        self.blocks = self.free = replica.blocks or replica.tables.blocks
        self.watermark = int(self.cluster.watermark * self.blocks)

    def send(self, x: Call, now: float) -> None:
        too_large = blocks_of(x.prompt + x.output) > self.blocks - self.watermark
        if not self.up or len(self.queue) >= self.cluster.queue or too_large:
            x.lost, x.end = (TURNED_AWAY if self.up else FAILED), now
            return
        self.queue.append(x)
        if not self.batch:
            self.begin(now)

    def advance(self, until: float) -> None:
        while self.batch and self.end <= until:
            now = self.end
            self.complete(now)
            self.begin(now)

    def begin(self, now: float) -> None:
        while self.queue and not self.queue[0].started:
            if now - self.queue[0].arrival <= self.cluster.patience:
                break
            x = self.queue.pop(0)
            x.lost, x.end = GAVE_UP, now
        if self.cluster.order == "vllm":
            self.form_prompts_first()
        else:
            self.form()
        self.unread = 0
        if not self.batch:
            return
        everybody = [*(x for x, _ in self.batch), *self.running]
        self.unread = sum(max(0, x.prefill - x.processed) for x in everybody)
        self.spent = seconds(self.tables, self.batch) / self.speed
        if self.pace == 0.0 and any(x.writes for x, _ in self.batch):
            self.pace = self.spent
        self.end = now + self.spent
        self.busy += self.spent
        self.tokens += sum(tokens for _, tokens in self.batch)

    def form(self) -> None:
        """Sarathi: all that write, then prompts that were begun, then new ones."""
        reading = self.take_writers()
        used, aside = len(self.batch), []
        for x in reading:
            more = min(x.prefill - x.processed, self.cluster.chunk - used)
            if more > 0:
                self.batch.append((x, more))
                used += more
            else:
                aside.append(x)
        self.running = sorted([*aside, *self.running], key=lambda x: x.arrival)
        while self.queue and len(self.batch) + len(self.running) < self.cluster.cap:
            x = self.queue[0]
            more = min(x.prefill - self.known(x), self.cluster.chunk - used)
            if self.free - blocks_of(x.prefill) < self.watermark or more <= 0:
                break
            self.admit(x, more)
            used += more

    def form_prompts_first(self) -> None:
        """vLLM: whole prompts alone, padded to at most 4096 tokens; or all that write."""
        longest = 0
        while self.queue and len(self.batch) + len(self.running) < self.cluster.cap:
            x = self.queue[0]
            longest = max(longest, x.prefill)
            if self.free - blocks_of(x.prefill) < self.watermark:
                break
            if self.batch and longest * (len(self.batch) + 1) > 4096:
                break
            self.admit(x, x.prefill - self.known(x))
        if not self.batch:
            reading = self.take_writers()
            self.running = sorted([*reading, *self.running], key=lambda x: x.arrival)

    def admit(self, x: Call, tokens: int) -> None:
        self.queue.pop(0)
        x.processed = x.hit = self.known(x)
        x.started = True
        x.held = blocks_of(x.prefill)
        self.free -= x.held
        self.batch.append((x, tokens))

    def take_writers(self) -> list[Call]:
        """Into the batch; who gets no block pushes the last one out, or goes itself."""
        reading = []
        while self.running and len(self.batch) < self.cluster.cap:
            x = self.running.pop(0)
            if not x.writes:
                reading.append(x)
                continue
            while self.free < 1 and self.running:
                self.restart(self.running.pop())
            if self.free < 1:
                self.restart(x)
                continue
            if x.processed > x.held * BLOCK:
                x.held += 1
                self.free -= 1
            self.batch.append((x, 1))
        return reading

    def restart(self, x: Call) -> None:
        x.prefill, x.processed = x.processed, 0
        x.restarts += 1
        self.free += x.held
        x.held = 0
        self.queue.insert(0, x)

    def known(self, x: Call) -> int:
        """Tokens of a prompt that are cached; its last one is always read."""
        if x.restarts:
            return 0
        count = next((i for i, name in enumerate(x.names) if name not in self.cached), len(x.names))
        return min(count * x.block, x.prompt - 1)

    def keep(self, names: list[int]) -> None:
        """The prompt's blocks, the first ones used last; what was not used longest goes."""
        for name in reversed(names[: self.room]):
            self.cached.pop(name, None)
            while len(self.cached) >= self.room:
                self.cached.popitem(last=False)
            self.cached[name] = None

    def complete(self, now: float) -> None:
        if any(x.writes for x, _ in self.batch):
            self.pace = update_pace(self.pace, self.spent)
        for x, tokens in self.batch:
            x.processed += tokens
            if x.processed == x.prefill:
                x.processed += 1
                if math.isnan(x.first):
                    x.first = now
                    self.keep(x.names)
            if x.processed == x.prompt + x.output:
                x.end = now
                self.free += x.held
                x.held = 0
                self.finished += 1
            else:
                self.running.append(x)
        self.batch = []

    def fail(self, now: float) -> None:
        for x in [*(x for x, _ in self.batch), *self.running, *self.queue]:
            x.lost, x.end, x.held = FAILED, now, 0
        self.queue, self.running, self.batch = [], [], []
        self.free, self.up, self.unread = self.blocks, False, 0
        self.cached.clear()


def plain_cluster(cluster: Cluster) -> list[PlainReplica]:
    return [PlainReplica(cluster, number) for number in range(len(cluster))]


def plain_replay(
    cluster: Cluster,
    workload: Workload,
    chosen: Iterable[int],
    failures: Iterable[tuple[float, int, bool]] = (),
) -> tuple[list[PlainReplica], list[Call]]:
    """A whole trace to replicas that were chosen before."""
    replicas, calls, waiting = plain_cluster(cluster), calls_of(workload), sorted(failures)

    def strike(now: float) -> None:
        while waiting and waiting[0][0] <= now:
            when, number, back = waiting.pop(0)
            replicas[number].advance(when)
            if back:
                replicas[number].up = True
            else:
                replicas[number].fail(when)

    for x, number in zip(calls, chosen, strict=True):
        strike(x.arrival)
        replicas[number].advance(x.arrival)
        replicas[number].send(x, x.arrival)
    strike(math.inf)
    for replica in replicas:
        replica.advance(math.inf)
    return replicas, calls


def extra_cost(replica: PlainReplica, x: Call, weights: tuple[float, float, float]) -> float:
    """What everything at a replica costs more from now on if a call is sent there."""
    now = x.arrival

    def cost(with_it: bool) -> float:
        then, own = copy.deepcopy((replica, x))
        there = [*(y for y, _ in then.batch), *then.running, *then.queue]
        no_token_yet = {id(y) for y in (*there, own) if math.isnan(y.first)}
        if with_it:
            then.send(own, now)
            there.append(own)
        then.advance(math.inf)
        total = 0.0
        for y in there:
            total += weights[0] * (y.end - now) + weights[2] * (y.lost > 0)
            if id(y) in no_token_yet:
                total += weights[1] * ((y.end if math.isnan(y.first) else y.first) - now)
        return total

    return cost(with_it=True) - cost(with_it=False)


def random_workload(
    seed: int,
    count: int = 10,
    *,
    gap: float = 0.01,
    prompt: int = 300,
    output: int = 40,
    block: int = 16,
) -> Workload:
    """Prompts of up to `prompt` tokens; those of a kind share some of their first blocks."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(gap, count))
    prompts, outputs = rng.integers(1, prompt, count), rng.integers(1, output, count)
    kinds, shared = rng.integers(0, 3, count), rng.integers(0, 9, count)
    chains = [
        [int(kind) * 100 + k if k < both else 1000 * i + k for k in range(int(length) // block)]
        for i, (kind, both, length) in enumerate(zip(kinds, shared, prompts, strict=True))
    ]
    first = np.cumsum([0, *map(len, chains)])
    names = np.unique(np.array([x for chain in chains for x in chain]), return_inverse=True)[1]
    return make_workload(arrival, prompts, outputs, first, names, block)


def column(calls: list[Call], name: str) -> list[Any]:
    return [getattr(x, name) for x in calls]


def expect_same(played: SimulationResult, calls: list[Call]) -> None:
    ints, times = played.requests.ints, played.requests.times
    for row, name in ((f.Q_LOST, "lost"), (f.Q_RESTARTS, "restarts"), (f.Q_HIT, "hit")):
        assert ints[row].tolist() == column(calls, name), name
    for row, name in ((f.Q_FIRST_TOKEN, "first"), (f.Q_FINISHED, "end")):
        np.testing.assert_allclose(times[row], column(calls, name), rtol=1e-9, err_msg=name)
