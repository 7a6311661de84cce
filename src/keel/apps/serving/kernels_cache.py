"""The prefix cache of a replica: named blocks of prompts, the least recently used go first.

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
    """Tokens at the begin of the prompt that need not be read; the last one always is."""
    if replicas.ints[f.R_CACHED, r] == 0:
        return 0
    blocks = 0
    for k in range(requests.first[q], requests.first[q + 1]):
        if replicas.stamp[r, requests.hashes[k]] == 0:
            break
        blocks += 1
    return min(blocks * requests.prefix_block, requests.ints[f.Q_PROMPT, q] - 1)


@outer
def oldest_goes(r, replicas):
    """Drop the block whose last use is the longest ago."""
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
def tidy_ring(r, replicas):
    """Throw away the entries that count no more, when the ring is full."""
    length, kept = replicas.ring.shape[1], 0
    begin = replicas.ints[f.R_RING_FROM, r]
    for k in range(replicas.ints[f.R_RING_COUNT, r]):
        at = (begin + k) % length
        name, stamp = replicas.ring[r, at, 0], replicas.ring[r, at, 1]
        if replicas.stamp[r, name] == stamp:
            to = (begin + kept) % length
            replicas.ring[r, to, 0], replicas.ring[r, to, 1] = name, stamp
            kept += 1
    replicas.ints[f.R_RING_COUNT, r] = kept


@outer
def use(r, name, room, replicas):
    """A block was read or written."""
    if replicas.stamp[r, name] == 0:
        while replicas.ints[f.R_CACHED, r] >= room:
            oldest_goes(r, replicas)
        replicas.ints[f.R_CACHED, r] += 1
    length = replicas.ring.shape[1]
    if replicas.ints[f.R_RING_COUNT, r] == length:
        tidy_ring(r, replicas)
    replicas.ints[f.R_TICKS, r] += 1
    replicas.stamp[r, name] = replicas.ints[f.R_TICKS, r]
    at = (replicas.ints[f.R_RING_FROM, r] + replicas.ints[f.R_RING_COUNT, r]) % length
    replicas.ring[r, at, 0], replicas.ring[r, at, 1] = name, replicas.ints[f.R_TICKS, r]
    replicas.ints[f.R_RING_COUNT, r] += 1


@outer
def keep_prefix(r, q, requests, replicas):
    """The prompt of a request is in the cache from now on, its end first to go."""
    room = replicas.ints[f.R_ROOM, r]
    first, last = requests.first[q], requests.first[q + 1]
    if room == 0 or last - first > room:
        last = min(last, first + room)
    for k in range(last - 1, first - 1, -1):
        use(r, requests.hashes[k], room, replicas)


@outer
def forget_prefixes(r, replicas):
    """All of it."""
    replicas.stamp[r, :] = 0
    replicas.ints[f.R_RING_FROM, r] = replicas.ints[f.R_RING_COUNT, r] = replicas.ints[
        f.R_CACHED, r
    ] = 0
