"""Compiled kernels that simulate the replicas of a cluster, iteration by iteration.

A replica is a queue, a list of what runs, and an iteration under way. The rules are those of
Sarathi's chunked prefill as Vidur simulates it: all that decode write one token each, then prompts
that were begun are read on, then waiting requests are admitted, up to `chunk` tokens. Iterations in
which all decode and none can be admitted last equally long for up to 64 of them: such a stretch
is one step, which a request that comes meanwhile cuts short.

`clock`, `plan`, `requests` and `replicas` are those of `keel.apps.serving.arrays`.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import numpy as np

from keel.apps.serving import fields as f
from keel.apps.serving.arrays import BLOCK, NONE
from keel.apps.serving.compiling import compiled, inner, outer
from keel.apps.serving.kernels_batch import (
    FAILED,
    TURNED_AWAY,
    blocks_of,
    form,
    form_prompts_first,
    give_up,
    pop_front,
    prompt_is_read,
    push_back,
)
from keel.apps.serving.kernels_cache import cache_prefix, clear_prefixes
from keel.apps.serving.observations import PACE_DOWN, PACE_UP

GRAIN, MOST_KV = 64, 4096
SHARED_KEYS = 1.1
"""Cost factor of several sequences at once where queries share keys."""
MILLI = 1e-3


@inner
def linear_time(kind, tokens, clock):
    """Return the time of everything but attention; beyond the table in proportion."""
    rounded = (tokens + 7) // 8 * 8
    last = clock.linear.shape[1] - 1
    if rounded <= last:
        return clock.linear[kind, rounded]
    return clock.linear[kind, last] * rounded / last


@inner
def prefill_time(kind, kv, read, several, clock):
    """Return the attention time of prefill; long reads in parts of the table's longest."""
    last = clock.prefill.shape[2] - 1
    row = min(kv, MOST_KV) // GRAIN
    spent = 0.0
    while read > last:
        spent += clock.prefill[kind, row, last]
        row = min(row + last // GRAIN, MOST_KV // GRAIN)
        read -= last
    spent += clock.prefill[kind, row, read]
    return spent * SHARED_KEYS if several and clock.grouped[kind] else spent


@inner
def duration(r, tokens, clock, plan, requests, replicas):
    """Return the seconds of the batch, and its composition.

    That is the number of decoding sequences, the sum of their KV, and the unread tokens of the
    prompts.
    """
    kind = plan.kind[r]
    decoding = total = kv = prompts = unread = 0
    squares = 0.0
    for j in range(replicas.ints[f.R_SIZE, r]):
        q = replicas.batch[r, j]
        if prompt_is_read(q, requests):
            decoding += 1
            total += requests.ints[f.Q_PROCESSED, q]
        else:
            prompts += 1
            unread += requests.ints[f.Q_PREFILL, q] - requests.ints[f.Q_PROCESSED, q]
            kv += (requests.ints[f.Q_PROCESSED, q] + GRAIN - 1) // GRAIN * GRAIN
            squares += replicas.tokens[r, j] ** 2
    spent = linear_time(kind, tokens, clock)
    if decoding:
        mean = min((total // decoding + GRAIN - 1) // GRAIN, MOST_KV // GRAIN)
        attention = clock.decode[kind, decoding, mean]
        spent += attention * SHARED_KEYS if decoding > 1 and clock.grouped[kind] else attention
    if prompts:
        read = round(math.sqrt(squares))
        spent += prefill_time(kind, kv, read, prompts > 1, clock)
    return clock.layers[kind] * spent * MILLI / plan.speed[r], decoding, total, unread


@inner
def stretch(r, total, requests, replicas):
    """Return how many more iterations are like this one, in which all sequences decode.

    That holds while none finishes, the mean KV cache stays between two entries of the table, and
    there is memory for all. They are simulated at once; a request that comes meanwhile cuts them
    short.
    """
    size = replicas.ints[f.R_SIZE, r]
    mean = total // size
    entry = min((mean + GRAIN - 1) // GRAIN, MOST_KV // GRAIN)
    times = entry * GRAIN - mean + 1 if entry * GRAIN < MOST_KV else 1 << 30
    for j in range(size):
        q = replicas.batch[r, j]
        tokens = requests.ints[f.Q_PROMPT, q] + requests.ints[f.Q_OUTPUT, q]
        times = min(times, tokens - requests.ints[f.Q_PROCESSED, q])
    more = times - 1
    if more < 1:
        return 0
    blocks = 0
    for j in range(size):
        q = replicas.batch[r, j]
        over = requests.ints[f.Q_PROCESSED, q] + more - requests.ints[f.Q_HELD, q] * BLOCK
        if over > 0:
            blocks += blocks_of(over)
    if blocks > replicas.ints[f.R_FREE, r] - 1:
        return 0
    for j in range(size):
        q = replicas.batch[r, j]
        requests.ints[f.Q_PROCESSED, q] += more
        needed = blocks_of(requests.ints[f.Q_PROCESSED, q])
        requests.ints[f.Q_HELD, q] = max(requests.ints[f.Q_HELD, q], needed)
    replicas.ints[f.R_FREE, r] -= blocks
    return more


@outer
def cut(r, now, requests, replicas):
    """End a stretch with the iteration that is under way now."""
    begun, seconds = replicas.times[f.R_BEGUN, r], replicas.times[f.R_SECONDS, r]
    done = math.floor((now - begun) / seconds)
    less = replicas.ints[f.R_MORE, r] - done
    if less < 1:
        return
    for j in range(replicas.ints[f.R_SIZE, r]):
        q = replicas.batch[r, j]
        requests.ints[f.Q_PROCESSED, q] -= less
        held = max(
            blocks_of(requests.ints[f.Q_PREFILL, q]), blocks_of(requests.ints[f.Q_PROCESSED, q])
        )
        replicas.ints[f.R_FREE, r] += requests.ints[f.Q_HELD, q] - held
        requests.ints[f.Q_HELD, q] = held
    replicas.ints[f.R_MORE, r] = done
    replicas.times[f.R_END, r] = begun + (done + 1) * seconds
    replicas.times[f.R_BUSY, r] -= less * seconds
    replicas.ints[f.R_DONE_TOKENS, r] -= less * replicas.ints[f.R_SIZE, r]


@outer
def blocks_now(r, now, requests, replicas):
    """Return the number of free blocks, also in the middle of a stretch."""
    free = replicas.ints[f.R_FREE, r]
    if replicas.ints[f.R_SIZE, r] == 0 or replicas.ints[f.R_MORE, r] == 0:
        return free
    done = math.floor((now - replicas.times[f.R_BEGUN, r]) / replicas.times[f.R_SECONDS, r])
    less = replicas.ints[f.R_MORE, r] - done
    if less < 1:
        return free
    for j in range(replicas.ints[f.R_SIZE, r]):
        q = replicas.batch[r, j]
        then = blocks_of(requests.ints[f.Q_PROCESSED, q] - less)
        free += requests.ints[f.Q_HELD, q] - max(blocks_of(requests.ints[f.Q_PREFILL, q]), then)
    return free


@inner
def can_admit(r, requests, replicas, plan):
    """Return whether the first waiting request could be admitted."""
    q = replicas.ints[f.R_HEAD, r]
    if q == NONE or replicas.ints[f.R_SIZE, r] + replicas.ints[f.R_ASIDE, r] >= plan.cap:
        return False
    need = blocks_of(requests.ints[f.Q_PREFILL, q])
    return replicas.ints[f.R_FREE, r] - need >= plan.watermark[r]


@outer
def begin(r, now, clock, plan, requests, replicas):
    """Begin the next iteration and all that are like it; stay idle if there is no work."""
    give_up(r, now, requests, replicas, plan)
    if plan.order == 0:
        tokens = form(r, now, requests, replicas, plan)
    else:
        tokens = form_prompts_first(r, now, requests, replicas, plan)
    size = replicas.ints[f.R_SIZE, r]
    replicas.ints[f.R_READING, r] = 0
    if size == 0:
        return
    seconds, decoding, total, unread = duration(r, tokens, clock, plan, requests, replicas)
    for j in range(replicas.ints[f.R_ASIDE, r]):
        q = replicas.running[r, j]
        unread += max(0, requests.ints[f.Q_PREFILL, q] - requests.ints[f.Q_PROCESSED, q])
    replicas.ints[f.R_READING, r] = unread
    more = 0
    if decoding == size:
        undisturbed = replicas.ints[f.R_HEAD, r] == NONE or plan.patience == math.inf
        if plan.order != 0 and can_admit(r, requests, replicas, plan):
            undisturbed = False  # the next iteration admits a request that was restarted
        if replicas.ints[f.R_ASIDE, r] == 0 and undisturbed:
            more = stretch(r, total, requests, replicas)
    if decoding and replicas.times[f.R_PACE, r] == 0.0:
        replicas.times[f.R_PACE, r] = seconds
    replicas.times[f.R_BEGUN, r], replicas.times[f.R_SECONDS, r] = now, seconds
    replicas.ints[f.R_MORE, r] = more
    replicas.times[f.R_END, r] = now + (more + 1) * seconds
    replicas.times[f.R_BUSY, r] += (more + 1) * seconds
    replicas.ints[f.R_DONE_TOKENS, r] += tokens + more * size


@inner
def complete(r, requests, replicas):
    """End the iteration under way: count its tokens, and finish requests."""
    now, left, decoding = replicas.times[f.R_END, r], replicas.ints[f.R_ASIDE, r], False
    for j in range(replicas.ints[f.R_SIZE, r]):
        q = replicas.batch[r, j]
        decoding = decoding or prompt_is_read(q, requests)
        requests.ints[f.Q_PROCESSED, q] += replicas.tokens[r, j]
        if requests.ints[f.Q_PROCESSED, q] == requests.ints[f.Q_PREFILL, q]:
            requests.ints[f.Q_PROCESSED, q] += 1
            if math.isnan(requests.times[f.Q_FIRST_TOKEN, q]):
                requests.times[f.Q_FIRST_TOKEN, q] = now
                cache_prefix(r, q, requests, replicas)
        tokens = requests.ints[f.Q_PROMPT, q] + requests.ints[f.Q_OUTPUT, q]
        if requests.ints[f.Q_PROCESSED, q] == tokens:
            requests.times[f.Q_FINISHED, q] = now
            replicas.ints[f.R_FREE, r] += requests.ints[f.Q_HELD, q]
            requests.ints[f.Q_HELD, q] = 0
            replicas.ints[f.R_FINISHED, r] += 1
        else:
            replicas.running[r, left] = q
            left += 1
    replicas.ints[f.R_ASIDE, r] = left
    replicas.ints[f.R_SIZE, r] = 0
    if decoding:
        seconds, pace = replicas.times[f.R_SECONDS, r], replicas.times[f.R_PACE, r]
        decay = PACE_DOWN if seconds < pace else PACE_UP
        if replicas.ints[f.R_MORE, r]:
            decay = decay ** (replicas.ints[f.R_MORE, r] + 1)
        replicas.times[f.R_PACE, r] = decay * pace + (1.0 - decay) * seconds


@outer
def advance(r, until, clock, plan, requests, replicas):
    """Advance a replica to a time: every iteration that begins before it has begun."""
    while replicas.ints[f.R_SIZE, r] and replicas.times[f.R_END, r] <= until:
        now = replicas.times[f.R_END, r]
        complete(r, requests, replicas)
        begin(r, now, clock, plan, requests, replicas)


@outer
def send(q, r, clock, plan, requests, replicas):
    """Send a request to a replica at its arrival; an idle replica begins at once."""
    requests.ints[f.Q_REPLICA, q] = r
    now = requests.times[f.Q_ARRIVAL, q]
    need = blocks_of(requests.ints[f.Q_PROMPT, q] + requests.ints[f.Q_OUTPUT, q])
    down, full = replicas.ints[f.R_UP, r] == 0, replicas.ints[f.R_WAITING, r] >= plan.queue
    if down or full or need > plan.blocks[r] - plan.watermark[r]:
        requests.ints[f.Q_LOST, q] = FAILED if down else TURNED_AWAY
        requests.times[f.Q_FINISHED, q] = now
        return
    push_back(r, q, requests, replicas)
    if replicas.ints[f.R_SIZE, r] == 0:
        begin(r, now, clock, plan, requests, replicas)
    elif replicas.ints[f.R_MORE, r]:
        cut(r, now, requests, replicas)


@outer
def fail(r, now, plan, requests, replicas):
    """Fail a replica: all its requests and caches are lost."""
    for j in range(replicas.ints[f.R_SIZE, r]):
        lose(replicas.batch[r, j], now, requests)
    for j in range(replicas.ints[f.R_ASIDE, r]):
        lose(replicas.running[r, j], now, requests)
    while replicas.ints[f.R_HEAD, r] != NONE:
        lose(pop_front(r, requests, replicas), now, requests)
    replicas.ints[f.R_SIZE, r] = replicas.ints[f.R_ASIDE, r] = 0
    replicas.ints[f.R_FREE, r] = plan.blocks[r]
    replicas.ints[f.R_UP, r] = replicas.ints[f.R_READING, r] = 0
    clear_prefixes(r, replicas)


@inner
def lose(q, now, requests):
    """Mark a request of a failed replica as lost."""
    requests.ints[f.Q_LOST, q] = FAILED
    requests.times[f.Q_FINISHED, q] = now
    requests.ints[f.Q_HELD, q] = 0


@compiled
def replay(chosen, clock, plan, requests, replicas):
    """Replay a trace with given choices of replicas, to the end of the last request."""
    for q in range(len(requests.times[f.Q_ARRIVAL])):
        r = chosen[q]
        advance(r, requests.times[f.Q_ARRIVAL, q], clock, plan, requests, replicas)
        send(q, r, clock, plan, requests, replicas)
    for r in range(len(replicas.ints[f.R_HEAD])):
        advance(r, np.inf, clock, plan, requests, replicas)
