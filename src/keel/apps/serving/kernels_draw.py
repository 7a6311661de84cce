"""Compiled kernels that draw traces: an environment starts one every few hundred decisions."""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import numpy as np

from keel.apps.serving.compiling import compiled

LATELY = 64
"""Number of most recent conversations that may go on."""
LONGEST, LONGEST_TALK = 3_600, 3_000
"""Most tokens of a prompt, and of a conversation that may go on."""


@compiled
def arrival_times(gaps, noise, burst, wander):
    """Return arrival times at a rate whose logarithm is an Ornstein–Uhlenbeck process.

    Its mean is 0, its deviation `burst`, its correlation time `wander` seconds.
    """
    times = np.empty(len(gaps))
    level, now = noise[-1] * burst, 0.0
    for i in range(len(gaps)):
        now += gaps[i] * math.exp(0.5 * burst**2 - level)
        keep = math.exp(-gaps[i] / wander)
        level = keep * level + burst * math.sqrt(1.0 - keep**2) * noise[i]
        times[i] = now
    return times


@compiled
def conversations(prompt, output, chance, kinds, sessions, shared, shared_tokens, block):
    """Draw conversations: the prompt of a turn repeats all turns before, and adds a question.

    `chance` `[N, 2]`: whether it goes on, and with which conversation. `kinds` `[N]`: the system
    prompt of a new one. Returns the prompts, where their blocks begin, and the blocks' names.
    """
    count = len(prompt)
    most = LONGEST // block + 1
    open_blocks = np.empty((count, most), np.int64)
    lengths = np.empty(count, np.int64)
    open_sizes = np.empty(count, np.int64)
    shared_blocks = -np.ones((max(1, shared), max(1, shared_tokens // block)), np.int64)
    open_count, fresh, used = 0, 0, 0
    names = np.empty(count * most, np.int64)
    first = np.zeros(count + 1, np.int64)
    sizes = np.empty(count, np.int64)
    chain = np.empty(most, np.int64)
    for i in range(count):
        length, own, at = 0, prompt[i], -1
        if open_count and chance[i, 0] < sessions:
            begin = max(0, open_count - LATELY)
            at = begin + int(chance[i, 1] * (open_count - begin))
            length = open_sizes[at]
            chain[:length] = open_blocks[at, :length]
            own = lengths[at] + max(8, own // 8)
        elif shared:
            kind = kinds[i]
            if shared_blocks[kind, 0] < 0:
                for k in range(shared_blocks.shape[1]):
                    shared_blocks[kind, k] = fresh
                    fresh += 1
            length = shared_blocks.shape[1]
            chain[:length] = shared_blocks[kind]
            own += shared_tokens
        own = min(own, LONGEST)
        blocks = own // block
        for k in range(length, blocks):
            chain[k] = fresh
            fresh += 1
        names[used : used + blocks] = chain[:blocks]
        used += blocks
        first[i + 1], sizes[i] = used, own
        total = min(own + output[i], LONGEST - 100)
        grown = max(blocks, total // block)
        for k in range(blocks, grown):
            chain[k] = fresh
            fresh += 1
        if at >= 0:
            for k in range(at, open_count - 1):
                open_blocks[k] = open_blocks[k + 1]
                lengths[k], open_sizes[k] = lengths[k + 1], open_sizes[k + 1]
            open_count -= 1
        if total < LONGEST_TALK:
            open_blocks[open_count, :grown] = chain[:grown]
            lengths[open_count], open_sizes[open_count] = total, grown
            open_count += 1
    return sizes, first, names[:used].copy()
