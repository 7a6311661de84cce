"""Compiled kernels of a replica's prefix cache: LRU over named blocks of prompts.

Uses are written into a ring in their order. An entry counts only if no later use of its block is
there, so the oldest entry that counts is the block to drop; nothing is ever searched.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from keel.apps.serving import fields as f
from keel.apps.serving.compiling import outer


@outer
def prefix_hit(r, q, requests, replicas):
    """Return the cached tokens at the begin of the prompt; the last token is always read."""
    if replicas.ints[f.R_CACHED, r] == 0:
        return 0
    blocks = 0
    for k in range(requests.first[q], requests.first[q + 1]):
        if replicas.stamp[r, requests.hashes[k]] == 0:
            break
        blocks += 1
    return min(blocks * requests.prefix_block, requests.ints[f.Q_PROMPT, q] - 1)


@outer
def evict_oldest(r, replicas):
    """Evict the least recently used block."""
    length = replicas.ring.shape[1]
    while replicas.ints[f.R_RING_COUNT, r]:
        at = replicas.ints[f.R_RING_FROM, r]
        name, stamp = replicas.ring[r, at, 0], replicas.ring[r, at, 1]
        replicas.ints[f.R_RING_FROM, r] = (at + 1) % length
        replicas.ints[f.R_RING_COUNT, r] -= 1
        if replicas.stamp[r, name] == stamp:
            replicas.stamp[r, name] = 0
            replicas.ints[f.R_CACHED, r] -= 1
            return


@outer
def compact_ring(r, replicas):
    """Remove outdated entries from a full ring."""
    length, count = replicas.ring.shape[1], 0
    begin = replicas.ints[f.R_RING_FROM, r]
    for k in range(replicas.ints[f.R_RING_COUNT, r]):
        at = (begin + k) % length
        name, stamp = replicas.ring[r, at, 0], replicas.ring[r, at, 1]
        if replicas.stamp[r, name] == stamp:
            to = (begin + count) % length
            replicas.ring[r, to, 0], replicas.ring[r, to, 1] = name, stamp
            count += 1
    replicas.ints[f.R_RING_COUNT, r] = count


@outer
def touch_block(r, name, capacity, replicas):
    """Mark a block as most recently used, and evict others if needed."""
    if replicas.stamp[r, name] == 0:
        while replicas.ints[f.R_CACHED, r] >= capacity:
            evict_oldest(r, replicas)
        replicas.ints[f.R_CACHED, r] += 1
    length = replicas.ring.shape[1]
    if replicas.ints[f.R_RING_COUNT, r] == length:
        compact_ring(r, replicas)
    replicas.ints[f.R_TICKS, r] += 1
    replicas.stamp[r, name] = replicas.ints[f.R_TICKS, r]
    at = (replicas.ints[f.R_RING_FROM, r] + replicas.ints[f.R_RING_COUNT, r]) % length
    replicas.ring[r, at, 0], replicas.ring[r, at, 1] = name, replicas.ints[f.R_TICKS, r]
    replicas.ints[f.R_RING_COUNT, r] += 1


@outer
def cache_prefix(r, q, requests, replicas):
    """Cache the prompt of a request; its end is evicted first."""
    capacity = replicas.ints[f.R_ROOM, r]
    first, last = requests.first[q], requests.first[q + 1]
    if capacity == 0 or last - first > capacity:
        last = min(last, first + capacity)
    for k in range(last - 1, first - 1, -1):
        touch_block(r, requests.hashes[k], capacity, replicas)


@outer
def clear_prefixes(r, replicas):
    """Clear the prefix cache of a replica."""
    replicas.stamp[r, :] = 0
    for row in (f.R_RING_FROM, f.R_RING_COUNT, f.R_CACHED):
        replicas.ints[row, r] = 0
