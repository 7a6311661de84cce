"""Completions of a small Llama on the CPU from the first token to the last, compiled by numba.

A step of 64 rows is a millisecond of products, and as much again went into what lay around it:
operations of torch that draw a token, and threads that met after every one. Here a thread writes
its rows to their end and meets nobody; rows that have ended are not computed any more.

Arrays are those of `keel.models.pass_layers`. A test holds what is written to torch's pass over it.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from keel.models import compiling, pass_loops, products
from keel.models.decoding_loops import ONE, ZERO, add, exponentials, gate, mix, normalise
from keel.models.pass_loops import largest, normalise_rows
from keel.models.products import times_transposed

SOURCES = (Path(__file__), *pass_loops.SOURCES, *products.SOURCES)
vectorised = compiling.keeping(SOURCES, fastmath={"reassoc", "contract"})


LANES = 32
"""Room for keys is a multiple of this: loops over as many need no slow end, one by one."""


@vectorised
def compare(query, keys, out):
    """q·k of keys, which are the columns of `[D, ·]`, as many as `out` holds: so no sum runs across
    a vector. Four rows at a time, so that `out` is read and written less often."""
    size, count = query.size, out.size
    whole = size - size % 4
    out[:] = ZERO
    for d in range(0, whole, 4):
        a, b, c, e = query[d], query[d + 1], query[d + 2], query[d + 3]
        for j in range(count):
            near = a * keys[d, j] + b * keys[d + 1, j]
            far = c * keys[d + 2, j] + e * keys[d + 3, j]
            out[j] += near + far
    for d in range(whole, size):
        for j in range(count):
            out[j] += query[d] * keys[d, j]


@vectorised
def copy_prompts(memories, members, starts, keys, values):
    """The keys and values of prompts, without their padding, to the front of the rows' own."""
    layers, _, _, heads, size, width = memories.shape
    for layer in range(layers):
        for i in range(len(members)):
            start = starts[members[i]]
            for h in range(heads):
                memory = memories[layer, members[i]]
                for d in range(size):
                    for j in range(start, width):
                        keys[layer, i, h, d, j - start] = memory[0, h, d, j]
                        values[layer, i, h, j - start, d] = memory[1, h, d, j]


@vectorised
def turn_head(x, norm, cos, sin, dials, out):
    """A query or a key of one token, normed, turned and scaled."""
    scale, epsilon = dials
    half = x.size // 2
    if norm.size:
        normalise(x, norm, epsilon, out)
    else:
        out[:] = x
    low, high = out[:half], out[half:]
    for d in range(half):
        left, right = low[d] * scale, high[d] * scale
        low[d] = left * cos[d] - right * sin[d]
        high[d] = right * cos[d] + left * sin[d]


@vectorised
def look_back(query, keys, values, count, room, out):
    """Attention of one query to the first `count` of the keys `[D, ·]` and values `[·, D]`."""
    weight, bits = room
    lanes = min((count + LANES - 1) // LANES * LANES, weight.size)
    scores = weight[:lanes]
    compare(query, keys, scores)
    scores[count:] = ZERO
    top = largest(weight[:count])
    for j in range(lanes):
        scores[j] -= top
    exponentials(scores, bits, bits.view(np.float32))
    scores[count:] = ZERO
    total = ZERO
    for j in range(lanes):
        total += scores[j]
    mix(weight[:count], values[:count], out)
    factor = ONE / total
    for d in range(out.size):
        out[d] *= factor


@vectorised
def step(x, rows, counts, weights, angles, dials, keys, values):
    """One more token of the `rows`, whose embeddings x `[B, hidden]` become what is behind the last
    layer. Before it row i has `counts[i]` tokens, whose `keys` and `values` it looks back to."""
    before, qkv, qkv_bias, query_norm, key_norm, out, out_bias = weights[:7]
    between, up, up_bias, down, down_bias = weights[7:]
    number, heads, size = len(rows), keys.shape[2], keys.shape[3]
    group = out.shape[2] // (heads * size)
    normal, update = np.empty_like(x), np.empty_like(x)
    asked, turning = out.shape[2], out.shape[2] + heads * size
    flat = np.empty((number, qkv.shape[1]), np.float32)
    seen = np.empty((number, asked), np.float32)
    gated = np.empty((number, up.shape[1]), np.float32)
    inner = np.empty((number, down.shape[2]), np.float32)
    query = np.empty(size, np.float32)
    room = np.empty(keys.shape[4], np.float32), np.empty(keys.shape[4], np.int32)
    one = (ONE, dials[1])
    for layer in range(before.shape[0]):
        normalise_rows(x, before[layer], dials[1], normal)
        times_transposed(normal, qkv[layer], flat)
        for i in range(number):
            at = counts[rows[i]]
            line, cos, sin = flat[i], angles[0][at], angles[1][at]
            for j in range(qkv_bias.shape[1]):
                line[j] += qkv_bias[layer, j]
            for h in range(heads):
                past, told = keys[layer, rows[i], h], values[layer, rows[i], h]
                begin = h * size
                own = line[asked + begin : asked + begin + size]
                turn_head(own, key_norm[layer], cos, sin, one, query)
                for d in range(size):
                    past[d, at] = query[d]
                told[at] = line[turning + begin : turning + begin + size]
                for g in range(group):
                    column = (h * group + g) * size
                    own = line[column : column + size]
                    turn_head(own, query_norm[layer], cos, sin, dials, query)
                    target = seen[i, column : column + size]
                    look_back(query, past, told, at + 1, room, target)
        times_transposed(seen, out[layer], update)
        add(x, update, out_bias[layer])
        normalise_rows(x, between[layer], dials[1], normal)
        times_transposed(normal, up[layer], gated)
        gate(gated, up_bias[layer], inner)
        times_transposed(inner, down[layer], update)
        add(x, update, down_bias[layer])


@vectorised
def draw(logits, chance, greedy, bits):
    """A token by its logits, which are used up, and its log-prob; `chance` is uniform in [0, 1)."""
    top, likeliest = logits[0], 0
    for j in range(logits.size):
        if logits[j] > top:
            top, likeliest = logits[j], j
    for j in range(logits.size):
        logits[j] -= top
    best = logits[likeliest]
    chosen = likeliest
    told = logits.copy()
    exponentials(logits, bits, bits.view(np.float32))
    total = 0.0
    for j in range(logits.size):
        total += logits[j]
    if not greedy:
        left = chance * total
        for j in range(logits.size):
            left -= logits[j]
            if left < 0.0:
                chosen = j
                break
        best = told[chosen]
    return chosen, best - math.log(total)


@vectorised
def generate(
    weights, ends, memories, begin, members, starts, angles, dials, chances, temperature, stop,
    tokens, log_probs, hidden, lengths, keys, values,
):  # fmt: skip
    """Completions of rows, each until the token `stop` or until there is no more room.

    Args:
        ends: the embedding `[V, H]`, the last norm `[H]` and the head `[V, H]`.
        begin: `[U, H]`, what is known after each prompt.
        members: `[R]`, `starts` `[U]`, `memories` and the others as `pass_layers.forward`.
        chances: `[R, T]` float64, uniform in [0, 1).
        temperature: 0 takes the likeliest.
        tokens, log_probs, hidden: `[R, T]`, `[R, T]` and `[R, T, H]`, filled as far as rows go.
        lengths: `[R]`: how far.
        keys, values: room, `[L, R, KV, D, ·]` and `[L, R, KV, ·, D]`, for a multiple of `LANES`.
    """
    embedding, last_norm, head = ends
    count, most = tokens.shape
    copy_prompts(memories, members, starts, keys, values)
    counts = memories.shape[5] - starts[members]
    greedy = temperature == 0.0
    factor = ONE if greedy else np.float32(1.0 / temperature)
    bits = np.empty(head.shape[0], np.int32)
    rows = np.arange(count)
    known = np.empty((count, begin.shape[1]), np.float32)
    for i in range(count):
        known[i] = begin[members[i]]
    for t in range(most):
        for i in range(len(rows)):
            for d in range(known.shape[1]):
                known[i, d] *= factor
        logits = np.dot(known, head.T)
        going = 0
        for i in range(len(rows)):
            row = rows[i]
            token, log_prob = draw(logits[i], chances[row, t], greedy, bits)
            tokens[row, t], log_probs[row, t] = token, log_prob
            hidden[row, t] = known[i]
            lengths[row] = t + 1
            if token != stop:
                rows[going] = row
                going += 1
        if not going or t + 1 == most:
            break
        rows = rows[:going]
        x = np.empty((going, begin.shape[1]), np.float32)
        for i in range(going):
            x[i] = embedding[tokens[rows[i], t]]
        step(x, rows, counts, weights, angles, dials, keys, values)
        counts += 1
        known = np.empty_like(x)
        normalise_rows(x, last_norm, dials[1], known)
