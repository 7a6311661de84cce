"""Replicas of a cluster, iteration by iteration, compiled.

A replica is a queue, a list of what runs, and an iteration under way. The rules are those of
Sarathi's chunked prefill as Vidur simulates it: all that decode write one token each, then prompts
that were begun are read on, then waiting requests are admitted, up to `chunk` tokens. Iterations in
which all decode and nobody can be admitted last equally long for up to 64 of them: such a stretch
is one step, which a request that comes meanwhile cuts short.

`clock`, `plan`, `requests` and `replicas` are those of `keel.apps.serving.arrays`.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import numpy as np

from keel.apps.serving.arrays import BLOCK, NONE
from keel.apps.serving.compiling import compiled, inner
from keel.apps.serving.kernels_cache import forget_prefixes, keep_prefix, prefix_hit

GRAIN, MOST_KV = 64, 4096
SHARED_KEYS = 1.1
"""What several sequences at once cost where queries share keys."""
MILLI = 1e-3
PACE_RATE = 0.2
"""How fast the reported pace of decoding follows."""
VLLM_TOKENS = 4096
"""The most a batch of prompts may hold in vLLM's order, padded to the longest."""
TURNED_AWAY, GAVE_UP, FAILED = 1, 2, 3


@inner
def push_back(r, q, requests, replicas):
    """Let a request wait."""
    requests.next[q] = NONE
    if replicas.tail[r] == NONE:
        replicas.head[r] = q
    else:
        requests.next[replicas.tail[r]] = q
    replicas.tail[r] = q
    replicas.waiting[r] += 1
    replicas.waiting_tokens[r] += requests.prefill[q]


@inner
def push_front(r, q, requests, replicas):
    """Let a request wait before all others."""
    requests.next[q] = replicas.head[r]
    if replicas.head[r] == NONE:
        replicas.tail[r] = q
    replicas.head[r] = q
    replicas.waiting[r] += 1
    replicas.waiting_tokens[r] += requests.prefill[q]


@inner
def pop_front(r, requests, replicas):
    """The one that has waited longest."""
    q = replicas.head[r]
    replicas.head[r] = requests.next[q]
    if replicas.head[r] == NONE:
        replicas.tail[r] = NONE
    replicas.waiting[r] -= 1
    replicas.waiting_tokens[r] -= requests.prefill[q]
    return q


@inner
def restart(r, q, requests, replicas):
    """Out of memory: what a request has read and written has to be read again."""
    requests.prefill[q] = requests.processed[q]
    requests.processed[q] = 0
    requests.restarts[q] += 1
    replicas.free[r] += requests.held[q]
    requests.held[q] = 0
    push_front(r, q, requests, replicas)


@inner
def blocks_of(tokens):
    """Blocks of KV cache that hold them."""
    return (tokens + BLOCK - 1) // BLOCK


@inner
def prompt_is_read(q, requests):
    """The end of reading writes the first token, so a sequence that decodes is ahead by one."""
    return requests.processed[q] > requests.prefill[q]


@inner
def add(r, q, tokens, replicas):
    """A request to the batch that is being made."""
    at = replicas.size[r]
    replicas.batch[r, at] = q
    replicas.tokens[r, at] = tokens
    replicas.size[r] = at + 1


@inner
def take_decodes(r, requests, replicas, plan):
    """All that decode into the batch; of those that cannot get a block the last restart.

    Returns how many tokens there are, and where the rest of `running` begins and ends. Prompts that
    are not read yet stay in front of it, compacted: `[0, prompts)`.
    """
    running = replicas.running[r]
    i, end, prompts, tokens = 0, replicas.count[r], 0, 0
    while i < end and replicas.size[r] < plan.cap:
        q = running[i]
        i += 1
        if not prompt_is_read(q, requests):
            running[prompts] = q
            prompts += 1
            continue
        went = False
        while replicas.free[r] < 1:
            if end > i:
                end -= 1
                restart(r, running[end], requests, replicas)
            else:
                restart(r, q, requests, replicas)
                went = True
                break
        if went:
            continue
        if requests.processed[q] > requests.held[q] * BLOCK:
            requests.held[q] += 1
            replicas.free[r] -= 1
        add(r, q, 1, replicas)
        tokens += 1
    return tokens, prompts, i, end


@inner
def read_on(r, tokens, prompts, i, end, requests, replicas, plan):
    """Prompts that were begun; those for which no room is left stay in `running`, by arrival."""
    running, left = replicas.running[r], 0
    for j in range(prompts):
        q = running[j]
        more = min(requests.prefill[q] - requests.processed[q], plan.chunk - tokens)
        if more > 0:
            add(r, q, more, replicas)
            tokens += more
        else:
            running[left] = q
            left += 1
    for j in range(i, end):
        running[left] = running[j]
        left += 1
    for j in range(1, left):  # few, and nearly sorted
        q, k = running[j], j
        while k > 0 and requests.arrival[running[k - 1]] > requests.arrival[q]:
            running[k] = running[k - 1]
            k -= 1
        running[k] = q
    replicas.count[r] = left
    return tokens


@inner
def give_up(r, now, requests, replicas, plan):
    """Requests at the head of the queue that have waited too long; restarted ones stay."""
    while replicas.head[r] != NONE:
        q = replicas.head[r]
        waited = now - requests.arrival[q]
        if waited <= plan.patience or not math.isnan(requests.started[q]):
            break
        pop_front(r, requests, replicas)
        requests.lost[q] = GAVE_UP
        requests.finished[q] = now


@inner
def admit(r, now, tokens, requests, replicas, plan):
    """Waiting requests, first come, first served, while there is room."""
    while replicas.head[r] != NONE:
        q = replicas.head[r]
        if replicas.size[r] + replicas.count[r] >= plan.cap or replicas.size[r] >= plan.cap:
            break
        need = blocks_of(requests.prefill[q])
        if replicas.free[r] - need < plan.watermark[r]:
            break
        known = prefix_hit(r, q, requests, replicas) if requests.restarts[q] == 0 else 0
        more = min(requests.prefill[q] - known, plan.chunk - tokens)
        if more <= 0:
            break
        pop_front(r, requests, replicas)
        requests.processed[q] = requests.hit[q] = known
        if math.isnan(requests.started[q]):
            requests.started[q] = now
        requests.held[q] = need
        replicas.free[r] -= need
        add(r, q, more, replicas)
        tokens += more
    return tokens


@inner
def form(r, now, requests, replicas, plan):
    """The next batch in Sarathi's order; returns its tokens."""
    replicas.size[r] = 0
    tokens, prompts, i, end = take_decodes(r, requests, replicas, plan)
    tokens = read_on(r, tokens, prompts, i, end, requests, replicas, plan)
    return admit(r, now, tokens, requests, replicas, plan)


@inner
def form_prompts_first(r, now, requests, replicas, plan):
    """The next batch in vLLM's order: whole prompts alone if any can be admitted, or all decode."""
    replicas.size[r] = 0
    longest = tokens = 0
    while replicas.head[r] != NONE:
        q = replicas.head[r]
        if replicas.size[r] + replicas.count[r] >= plan.cap:
            break
        need = blocks_of(requests.prefill[q])
        length = max(longest, requests.prefill[q])
        padded = length * (replicas.size[r] + 1)
        if replicas.free[r] - need < plan.watermark[r]:
            break
        if padded > VLLM_TOKENS and replicas.size[r] > 0:
            break
        pop_front(r, requests, replicas)
        known = prefix_hit(r, q, requests, replicas) if requests.restarts[q] == 0 else 0
        requests.processed[q] = requests.hit[q] = known
        if math.isnan(requests.started[q]):
            requests.started[q] = now
        requests.held[q] = need
        replicas.free[r] -= need
        add(r, q, requests.prefill[q] - known, replicas)
        tokens += requests.prefill[q] - known
        longest = length
    if replicas.size[r]:
        return tokens
    tokens, prompts, i, end = take_decodes(r, requests, replicas, plan)
    read_on(r, plan.chunk, prompts, i, end, requests, replicas, plan)
    return tokens


@inner
def linear_time(kind, tokens, clock):
    """Of everything but attention; beyond the table in proportion."""
    rounded = (tokens + 7) // 8 * 8
    last = clock.linear.shape[1] - 1
    if rounded <= last:
        return clock.linear[kind, rounded]
    return clock.linear[kind, last] * rounded / last


@inner
def prefill_time(kind, kv, read, several, clock):
    """Of attention of what is read; long reads in parts of the table's longest."""
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
    """Seconds of the batch, and of what decodes in it the number and the sum of their KV."""
    kind = plan.kind[r]
    decoding = total = kv = prompts = 0
    squares = 0.0
    for j in range(replicas.size[r]):
        q = replicas.batch[r, j]
        if prompt_is_read(q, requests):
            decoding += 1
            total += requests.processed[q]
        else:
            prompts += 1
            kv += (requests.processed[q] + GRAIN - 1) // GRAIN * GRAIN
            squares += replicas.tokens[r, j] ** 2
    spent = linear_time(kind, tokens, clock)
    if decoding:
        mean = min((total // decoding + GRAIN - 1) // GRAIN, MOST_KV // GRAIN)
        attention = clock.decode[kind, decoding, mean]
        spent += attention * SHARED_KEYS if decoding > 1 and clock.grouped[kind] else attention
    if prompts:
        read = round(math.sqrt(squares))
        spent += prefill_time(kind, kv, read, prompts > 1, clock)
    return clock.layers[kind] * spent * MILLI / plan.speed[r], decoding, total


@inner
def stretch(r, total, requests, replicas):
    """How many more iterations are like this one, in which all decode: while nobody finishes, the
    mean KV cache stays between two entries of the table, and there is memory for all. They are
    taken at once; somebody who comes meanwhile cuts them short."""
    size = replicas.size[r]
    mean = total // size
    entry = min((mean + GRAIN - 1) // GRAIN, MOST_KV // GRAIN)
    times = entry * GRAIN - mean + 1 if entry * GRAIN < MOST_KV else 1 << 30
    for j in range(size):
        q = replicas.batch[r, j]
        times = min(times, requests.prompt[q] + requests.output[q] - requests.processed[q])
    more = times - 1
    if more < 1:
        return 0
    blocks = 0
    for j in range(size):
        q = replicas.batch[r, j]
        over = requests.processed[q] + more - requests.held[q] * BLOCK
        if over > 0:
            blocks += blocks_of(over)
    if blocks > replicas.free[r] - 1:
        return 0
    for j in range(size):
        q = replicas.batch[r, j]
        requests.processed[q] += more
        requests.held[q] = max(requests.held[q], blocks_of(requests.processed[q]))
    replicas.free[r] -= blocks
    return more


@inner
def cut(r, now, requests, replicas):
    """End a stretch with the iteration that is under way now."""
    done = int(math.floor((now - replicas.begun[r]) / replicas.seconds[r]))
    less = replicas.more[r] - done
    if less < 1:
        return
    for j in range(replicas.size[r]):
        q = replicas.batch[r, j]
        requests.processed[q] -= less
        held = max(blocks_of(requests.prefill[q]), blocks_of(requests.processed[q]))
        replicas.free[r] += requests.held[q] - held
        requests.held[q] = held
    replicas.more[r] = done
    replicas.end[r] = replicas.begun[r] + (done + 1) * replicas.seconds[r]
    replicas.busy[r] -= less * replicas.seconds[r]
    replicas.done_tokens[r] -= less * replicas.size[r]


@inner
def blocks_now(r, now, requests, replicas):
    """Blocks that are free, in the middle of a stretch as well."""
    free = replicas.free[r]
    if replicas.size[r] == 0 or replicas.more[r] == 0:
        return free
    less = replicas.more[r] - int(math.floor((now - replicas.begun[r]) / replicas.seconds[r]))
    if less < 1:
        return free
    for j in range(replicas.size[r]):
        q = replicas.batch[r, j]
        then = blocks_of(requests.processed[q] - less)
        free += requests.held[q] - max(blocks_of(requests.prefill[q]), then)
    return free


@inner
def begin(r, now, clock, plan, requests, replicas):
    """The next iteration, and all that are like it; idle if there is nothing to do."""
    give_up(r, now, requests, replicas, plan)
    if plan.order == 0:
        tokens = form(r, now, requests, replicas, plan)
    else:
        tokens = form_prompts_first(r, now, requests, replicas, plan)
    size = replicas.size[r]
    if size == 0:
        return
    seconds, decoding, total = duration(r, tokens, clock, plan, requests, replicas)
    more = 0
    if decoding == size:
        nobody = replicas.head[r] == NONE or plan.patience == math.inf
        if replicas.count[r] == 0 and nobody:
            more = stretch(r, total, requests, replicas)
        if replicas.pace[r] == 0.0:
            replicas.pace[r] = seconds
        replicas.pace[r] += PACE_RATE * (seconds - replicas.pace[r])
    replicas.begun[r], replicas.seconds[r], replicas.more[r] = now, seconds, more
    replicas.end[r] = now + (more + 1) * seconds
    replicas.busy[r] += (more + 1) * seconds
    replicas.done_tokens[r] += tokens + more * size


@inner
def complete(r, requests, replicas):
    """The iteration under way has ended: tokens are there, some requests are through."""
    now, left = replicas.end[r], replicas.count[r]
    for j in range(replicas.size[r]):
        q = replicas.batch[r, j]
        requests.processed[q] += replicas.tokens[r, j]
        if requests.processed[q] == requests.prefill[q]:
            requests.processed[q] += 1
            if math.isnan(requests.first_token[q]):
                requests.first_token[q] = now
                keep_prefix(r, q, requests, replicas)
        if requests.processed[q] == requests.prompt[q] + requests.output[q]:
            requests.finished[q] = now
            replicas.free[r] += requests.held[q]
            requests.held[q] = 0
            replicas.finished[r] += 1
        else:
            replicas.running[r, left] = q
            left += 1
    replicas.count[r] = left
    replicas.size[r] = 0


@inner
def advance(r, until, clock, plan, requests, replicas):
    """One replica up to a time: every iteration that begins before it has begun."""
    while replicas.size[r] and replicas.end[r] <= until:
        now = replicas.end[r]
        complete(r, requests, replicas)
        begin(r, now, clock, plan, requests, replicas)


@inner
def send(q, r, clock, plan, requests, replicas):
    """A request to a replica that stands at its arrival; one that is idle begins at once."""
    requests.replica[q] = r
    now = requests.arrival[q]
    need = blocks_of(requests.prompt[q] + requests.output[q])
    if (
        replicas.up[r] == 0
        or replicas.waiting[r] >= plan.queue
        or need > plan.blocks[r] - plan.watermark[r]
    ):
        requests.lost[q] = FAILED if replicas.up[r] == 0 else TURNED_AWAY
        requests.finished[q] = now
        return
    push_back(r, q, requests, replicas)
    if replicas.size[r] == 0:
        begin(r, now, clock, plan, requests, replicas)
    elif replicas.more[r]:
        cut(r, now, requests, replicas)


@inner
def fail(r, now, plan, requests, replicas):
    """A replica dies: all it had is lost, its caches too."""
    for j in range(replicas.size[r]):
        lose(replicas.batch[r, j], now, requests)
    for j in range(replicas.count[r]):
        lose(replicas.running[r, j], now, requests)
    while replicas.head[r] != NONE:
        lose(pop_front(r, requests, replicas), now, requests)
    replicas.size[r] = replicas.count[r] = 0
    replicas.free[r] = plan.blocks[r]
    replicas.up[r] = 0
    forget_prefixes(r, replicas)


@inner
def lose(q, now, requests):
    """A request of a replica that failed."""
    requests.lost[q] = FAILED
    requests.finished[q] = now
    requests.held[q] = 0


@compiled
def replay(chosen, clock, plan, requests, replicas):
    """A whole trace to replicas that were chosen before; to the end of the last request."""
    for q in range(len(requests.arrival)):
        r = chosen[q]
        advance(r, requests.arrival[q], clock, plan, requests, replicas)
        send(q, r, clock, plan, requests, replicas)
    for r in range(len(replicas.head)):
        advance(r, np.inf, clock, plan, requests, replicas)
