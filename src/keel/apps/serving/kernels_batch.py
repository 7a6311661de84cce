"""Compiled kernels that form the next batch of a replica: decodes, prompts, admissions.

`plan`, `requests` and `replicas` are those of `keel.apps.serving.arrays`.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

from keel.apps.serving import fields as f
from keel.apps.serving.arrays import BLOCK, NONE
from keel.apps.serving.compiling import inner, outer
from keel.apps.serving.kernels_cache import prefix_hit

VLLM_TOKENS = 4096
"""Most tokens of a batch of prompts in vLLM's order, padded to the longest."""
TURNED_AWAY, GAVE_UP, FAILED = 1, 2, 3


@inner
def push_back(r, q, requests, replicas):
    """Append a request to the queue."""
    requests.ints[f.Q_NEXT, q] = NONE
    if replicas.ints[f.R_TAIL, r] == NONE:
        replicas.ints[f.R_HEAD, r] = q
    else:
        requests.ints[f.Q_NEXT, replicas.ints[f.R_TAIL, r]] = q
    replicas.ints[f.R_TAIL, r] = q
    replicas.ints[f.R_WAITING, r] += 1
    replicas.ints[f.R_WAITING_TOKENS, r] += requests.ints[f.Q_PREFILL, q]


@inner
def push_front(r, q, requests, replicas):
    """Put a request at the front of the queue."""
    requests.ints[f.Q_NEXT, q] = replicas.ints[f.R_HEAD, r]
    if replicas.ints[f.R_HEAD, r] == NONE:
        replicas.ints[f.R_TAIL, r] = q
    replicas.ints[f.R_HEAD, r] = q
    replicas.ints[f.R_WAITING, r] += 1
    replicas.ints[f.R_WAITING_TOKENS, r] += requests.ints[f.Q_PREFILL, q]


@inner
def pop_front(r, requests, replicas):
    """Remove and return the first request of the queue."""
    q = replicas.ints[f.R_HEAD, r]
    replicas.ints[f.R_HEAD, r] = requests.ints[f.Q_NEXT, q]
    if replicas.ints[f.R_HEAD, r] == NONE:
        replicas.ints[f.R_TAIL, r] = NONE
    replicas.ints[f.R_WAITING, r] -= 1
    replicas.ints[f.R_WAITING_TOKENS, r] -= requests.ints[f.Q_PREFILL, q]
    return q


@inner
def restart(r, q, requests, replicas):
    """Restart a request for lack of memory: its tokens so far have to be read again."""
    requests.ints[f.Q_PREFILL, q] = requests.ints[f.Q_PROCESSED, q]
    requests.ints[f.Q_PROCESSED, q] = 0
    requests.ints[f.Q_RESTARTS, q] += 1
    replicas.ints[f.R_FREE, r] += requests.ints[f.Q_HELD, q]
    requests.ints[f.Q_HELD, q] = 0
    push_front(r, q, requests, replicas)


@inner
def blocks_of(tokens):
    """Return the blocks of KV cache that hold `tokens` tokens."""
    return (tokens + BLOCK - 1) // BLOCK


@inner
def prompt_is_read(q, requests):
    """Return whether a sequence decodes: the end of its prefill wrote the first token."""
    return requests.ints[f.Q_PROCESSED, q] > requests.ints[f.Q_PREFILL, q]


@inner
def add(r, q, tokens, replicas):
    """Add a request to the batch that is being formed."""
    at = replicas.ints[f.R_SIZE, r]
    replicas.batch[r, at] = q
    replicas.tokens[r, at] = tokens
    replicas.ints[f.R_SIZE, r] = at + 1


@inner
def take_decodes(r, requests, replicas, plan):
    """Add all decoding sequences to the batch; without a free block the last ones restart.

    Returns how many tokens there are, and where the rest of `running` begins and ends. Prompts that
    are not read yet stay in front of it, compacted: `[0, prompts)`.
    """
    running = replicas.running[r]
    i, end, prompts, tokens = 0, replicas.ints[f.R_ASIDE, r], 0, 0
    while i < end and replicas.ints[f.R_SIZE, r] < plan.cap:
        q = running[i]
        i += 1
        if not prompt_is_read(q, requests):
            running[prompts] = q
            prompts += 1
            continue
        went = False
        while replicas.ints[f.R_FREE, r] < 1:
            if end > i:
                end -= 1
                restart(r, running[end], requests, replicas)
            else:
                restart(r, q, requests, replicas)
                went = True
                break
        if went:
            continue
        if requests.ints[f.Q_PROCESSED, q] > requests.ints[f.Q_HELD, q] * BLOCK:
            requests.ints[f.Q_HELD, q] += 1
            replicas.ints[f.R_FREE, r] -= 1
        add(r, q, 1, replicas)
        tokens += 1
    return tokens, prompts, i, end


@inner
def read_on(r, tokens, prompts, i, end, requests, replicas, plan):
    """Continue prompts that were begun; those that do not fit stay in `running`, by arrival."""
    running, left = replicas.running[r], 0
    for j in range(prompts):
        q = running[j]
        unread = requests.ints[f.Q_PREFILL, q] - requests.ints[f.Q_PROCESSED, q]
        more = min(unread, plan.chunk - tokens)
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
        came = requests.times[f.Q_ARRIVAL, q]
        while k > 0 and requests.times[f.Q_ARRIVAL, running[k - 1]] > came:
            running[k] = running[k - 1]
            k -= 1
        running[k] = q
    replicas.ints[f.R_ASIDE, r] = left
    return tokens


@outer
def give_up(r, now, requests, replicas, plan):
    """Drop requests at the head of the queue that have waited too long; restarted ones stay."""
    while replicas.ints[f.R_HEAD, r] != NONE:
        q = replicas.ints[f.R_HEAD, r]
        waited = now - requests.times[f.Q_ARRIVAL, q]
        if waited <= plan.patience or not math.isnan(requests.times[f.Q_STARTED, q]):
            break
        pop_front(r, requests, replicas)
        requests.ints[f.Q_LOST, q] = GAVE_UP
        requests.times[f.Q_FINISHED, q] = now


@inner
def admit(r, now, tokens, requests, replicas, plan):
    """Admit waiting requests, first come, first served, while memory lasts."""
    while replicas.ints[f.R_HEAD, r] != NONE:
        q = replicas.ints[f.R_HEAD, r]
        if replicas.ints[f.R_SIZE, r] + replicas.ints[f.R_ASIDE, r] >= plan.cap:
            break
        need = blocks_of(requests.ints[f.Q_PREFILL, q])
        if replicas.ints[f.R_FREE, r] - need < plan.watermark[r]:
            break
        known = prefix_hit(r, q, requests, replicas) if requests.ints[f.Q_RESTARTS, q] == 0 else 0
        more = min(requests.ints[f.Q_PREFILL, q] - known, plan.chunk - tokens)
        if more <= 0:
            break
        pop_front(r, requests, replicas)
        requests.ints[f.Q_PROCESSED, q] = requests.ints[f.Q_HIT, q] = known
        if math.isnan(requests.times[f.Q_STARTED, q]):
            requests.times[f.Q_STARTED, q] = now
        requests.ints[f.Q_HELD, q] = need
        replicas.ints[f.R_FREE, r] -= need
        add(r, q, more, replicas)
        tokens += more
    return tokens


@inner
def form(r, now, requests, replicas, plan):
    """Form the next batch in Sarathi's order, and return its tokens."""
    replicas.ints[f.R_SIZE, r] = 0
    tokens, prompts, i, end = take_decodes(r, requests, replicas, plan)
    tokens = read_on(r, tokens, prompts, i, end, requests, replicas, plan)
    return admit(r, now, tokens, requests, replicas, plan)


@outer
def form_prompts_first(r, now, requests, replicas, plan):
    """Form the next batch in vLLM's order: prompts alone if any can be admitted, else decodes."""
    replicas.ints[f.R_SIZE, r] = 0
    longest = tokens = 0
    while replicas.ints[f.R_HEAD, r] != NONE:
        q = replicas.ints[f.R_HEAD, r]
        if replicas.ints[f.R_SIZE, r] + replicas.ints[f.R_ASIDE, r] >= plan.cap:
            break
        need = blocks_of(requests.ints[f.Q_PREFILL, q])
        length = max(longest, requests.ints[f.Q_PREFILL, q])
        padded = length * (replicas.ints[f.R_SIZE, r] + 1)
        if replicas.ints[f.R_FREE, r] - need < plan.watermark[r]:
            break
        if padded > VLLM_TOKENS and replicas.ints[f.R_SIZE, r] > 0:
            break
        pop_front(r, requests, replicas)
        known = prefix_hit(r, q, requests, replicas) if requests.ints[f.Q_RESTARTS, q] == 0 else 0
        requests.ints[f.Q_PROCESSED, q] = requests.ints[f.Q_HIT, q] = known
        if math.isnan(requests.times[f.Q_STARTED, q]):
            requests.times[f.Q_STARTED, q] = now
        requests.ints[f.Q_HELD, q] = need
        replicas.ints[f.R_FREE, r] -= need
        add(r, q, requests.ints[f.Q_PREFILL, q] - known, replicas)
        tokens += requests.ints[f.Q_PREFILL, q] - known
        longest = length
    if replicas.ints[f.R_SIZE, r]:
        return tokens
    tokens, prompts, i, end = take_decodes(r, requests, replicas, plan)
    read_on(r, plan.chunk, prompts, i, end, requests, replicas, plan)
    return tokens
