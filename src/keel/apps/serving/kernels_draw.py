"""Drawing traces, compiled: an environment begins one for every few hundred decisions."""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import numpy as np

from keel.apps.serving.compiling import compiled

LATELY = 64
"""Conversations that may go on: the last so many."""
LONGEST, LONGEST_TALK = 3_600, 3_000
"""Tokens of a prompt, and of a conversation that may go on."""


@compiled
def wandering(gaps, noise, burst, wander):
    """Arrivals at a rate whose logarithm is an Ornstein–Uhlenbeck process: mean 0, deviation
    `burst`, which it forgets in `wander` seconds."""
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
    """Prompts with their prefix blocks: a turn repeats all that was said, and adds a question.

    `chance` `[N, 2]`: whether it goes on, and with which conversation. `kinds` `[N]`: the system
    prompt of a new one. Returns the prompts, where their blocks begin, and the blocks' names.
    """
    count = len(prompt)
    most = LONGEST // block + 1
    talks = np.empty((count, most), np.int64)
    told = np.empty(count, np.int64)
    size = np.empty(count, np.int64)
    known = -np.ones((max(1, shared), max(1, shared_tokens // block)), np.int64)
    open_talks, fresh, used = 0, 0, 0
    names = np.empty(count * most, np.int64)
    first = np.zeros(count + 1, np.int64)
    sizes = np.empty(count, np.int64)
    chain = np.empty(most, np.int64)
    for i in range(count):
        length, own, at = 0, prompt[i], -1
        if open_talks and chance[i, 0] < sessions:
            begin = max(0, open_talks - LATELY)
            at = begin + int(chance[i, 1] * (open_talks - begin))
            length = size[at]
            chain[:length] = talks[at, :length]
            own = told[at] + max(8, own // 8)
        elif shared:
            kind = kinds[i]
            if known[kind, 0] < 0:
                for k in range(known.shape[1]):
                    known[kind, k] = fresh
                    fresh += 1
            length = known.shape[1]
            chain[:length] = known[kind]
            own += shared_tokens
        own = min(own, LONGEST)
        blocks = own // block
        for k in range(length, blocks):
            chain[k] = fresh
            fresh += 1
        names[used : used + blocks] = chain[:blocks]
        used += blocks
        first[i + 1], sizes[i] = used, own
        said = min(own + output[i], LONGEST - 100)
        grown = max(blocks, said // block)
        for k in range(blocks, grown):
            chain[k] = fresh
            fresh += 1
        if at >= 0:
            for k in range(at, open_talks - 1):
                talks[k] = talks[k + 1]
                told[k], size[k] = told[k + 1], size[k + 1]
            open_talks -= 1
        if said < LONGEST_TALK:
            talks[open_talks, :grown] = chain[:grown]
            told[open_talks], size[open_talks] = said, grown
            open_talks += 1
    return sizes, first, names[:used].copy()
