"""All layers of a small Llama over groups of completions on the CPU, and back, compiled by numba.

Of a model of a million parameters torch spends half of a pass between the matrix products: every
operation reads and writes megabytes that no cache holds, and threads wait for one another. Here a
block of sequences goes through a whole layer while it is in the cache, the thread meets nobody, and
the way back makes again what is cheaper to make than to keep: norms, turned queries, the softmax.

Tokens are rows of x: first U prompts of P tokens, then R completions of T tokens, each of which
looks at the keys and values of its prompt. Queries, keys and values are kept with their tokens as
columns: a head is too short for vectors, a block of tokens is not. Arrays are float32 and
contiguous, weights `[L, out, in]` for all L layers; what a model does not have is empty. To torch's
operations (`keel.models.shared_prefix`) a test holds these, values and gradients.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from keel.models import compiling, decoding_loops
from keel.models.decoding_loops import ONE, ZERO, exponentials, normalise

SOURCES = (Path(__file__), *decoding_loops.SOURCES)
vectorised = compiling.keeping(SOURCES, fastmath={"reassoc", "contract"})

BLOCK = 384
"""Tokens that go through a layer together: their activations, a few hundred KB, stay in the
second cache, and products of this size are as fast as they get."""


@vectorised
def normalise_rows(x, weight, epsilon, out):
    """Of every row."""
    for i in range(x.shape[0]):
        normalise(x[i], weight, epsilon, out[i])


@vectorised
def inverse_root(squares, size, epsilon):
    """1/√(mean + ε), of a sum of squares."""
    return ONE / np.float32(math.sqrt(squares / np.float32(size) + epsilon))


@vectorised
def add_normalise_gradient(x, weight, epsilon, gradient, to_x, to_weight):
    """Of y = w·x·r with r = 1/√(mean x² + ε), one row: `to_x` += r·(w·g − x·r²·mean(w·g·x))."""
    size = x.size
    squares, inner = ZERO, ZERO
    for j in range(size):
        squares += x[j] * x[j]
        inner += gradient[j] * weight[j] * x[j]
    factor = inverse_root(squares, size, epsilon)
    pull = inner * factor * factor / np.float32(size)
    for j in range(size):
        to_x[j] += factor * (gradient[j] * weight[j] - x[j] * pull)
        to_weight[j] += gradient[j] * x[j] * factor


@vectorised
def add_bias(x, bias):
    """To all columns; b may be empty."""
    for i in range(bias.size):
        for j in range(x.shape[1]):
            x[i, j] += bias[i]


@vectorised
def add_sums(x, total):
    """The sum of all rows, to the gradient of a bias, which may be empty."""
    for i in range(x.shape[0]):
        for j in range(total.size):
            total[j] += x[i, j]


@vectorised
def add_bias_gradient(x, total):
    """Back through `add_bias`."""
    for i in range(total.size):
        for j in range(x.shape[1]):
            total[i] += x[i, j]


@vectorised
def gate_gradient(x, gradient, inner):
    """Of silu(a)·b, a and b the halves of every row of x `[N, 2I]`, which their gradients replace;
    `inner` becomes what it was."""
    size = x.shape[1] // 2
    bits = np.empty(size, np.int32)
    powers = bits.view(np.float32)
    for i in range(x.shape[0]):
        for j in range(size):
            inner[i, j] = -x[i, j]
        exponentials(inner[i], bits, powers)
        for j in range(size):
            a, b, g = x[i, j], x[i, size + j], gradient[i, j]
            share = ONE / (ONE + inner[i, j])
            opened = a * share
            inner[i, j] = opened * b
            x[i, j] = g * b * (share + opened * (ONE - share))
            x[i, size + j] = g * opened


@vectorised
def angle_columns(angles, places, steps):
    """cos and sin `[D/2, B·T]` of B sequences of T tokens; the first token of sequence i stands at
    position `places[i]`, which padding makes negative."""
    half = angles[0].shape[1] // 2
    cos = np.empty((half, len(places) * steps), np.float32)
    sin = np.empty_like(cos)
    for i in range(len(places)):
        for t in range(steps):
            position = max(places[i] + t, 0)
            for d in range(half):
                cos[d, i * steps + t] = angles[0][position, d]
                sin[d, i * steps + t] = angles[1][position, d]
    return cos, sin


@vectorised
def head_factors(x, norm, epsilon, out):
    """What the norm divides the columns of a head `[D, N]` by, as a factor; 1 without a norm."""
    if not norm.size:
        out[:] = ONE
        return
    out[:] = ZERO
    for d in range(x.shape[0]):
        for j in range(out.size):
            out[j] += x[d, j] * x[d, j]
    for j in range(out.size):
        out[j] = ONE / np.sqrt(out[j] / np.float32(x.shape[0]) + epsilon)


@vectorised
def turn_heads(flat, norm, columns, dials, out):
    """Queries or keys, rows of heads `[heads·D, N]`, normed, turned by their angles and scaled."""
    cos, sin = columns
    scale, epsilon = dials
    half, count = cos.shape
    factor = np.empty(count, np.float32)
    for at in range(0, flat.shape[0], 2 * half):
        head_factors(flat[at : at + 2 * half], norm, epsilon, factor)
        for d in range(half):
            a = norm[d] * scale if norm.size else scale
            b = norm[half + d] * scale if norm.size else scale
            low, high = flat[at + d], flat[at + half + d]
            left_out, right_out = out[at + d], out[at + half + d]
            for j in range(count):
                left, right = low[j] * factor[j] * a, high[j] * factor[j] * b
                left_out[j] = left * cos[d, j] - right * sin[d, j]
                right_out[j] = right * cos[d, j] + left * sin[d, j]


@vectorised
def turn_heads_gradient(flat, norm, columns, dials, gradient, to_flat, to_norm):
    """Back through `turn_heads`."""
    cos, sin = columns
    scale, epsilon = dials
    half, count = cos.shape
    size = 2 * half
    factor, pull = np.empty(count, np.float32), np.empty(count, np.float32)
    for at in range(0, flat.shape[0], size):
        x, to_x = flat[at : at + size], to_flat[at : at + size]
        for d in range(half):  # by the angle back
            low, high = gradient[at + d], gradient[at + half + d]
            left_out, right_out = to_x[d], to_x[half + d]
            for j in range(count):
                left, right = low[j] * scale, high[j] * scale
                left_out[j] = left * cos[d, j] + right * sin[d, j]
                right_out[j] = right * cos[d, j] - left * sin[d, j]
        if not norm.size:
            continue
        head_factors(x, norm, epsilon, factor)
        pull[:] = ZERO
        for d in range(size):
            w, own, g = norm[d], x[d], to_x[d]
            total = ZERO
            for j in range(count):
                product = g[j] * own[j]
                total += product * factor[j]
                pull[j] += product * w
            to_norm[d] += total
        for j in range(count):
            pull[j] *= factor[j] * factor[j] / np.float32(size)
        for d in range(size):
            w, own, g = norm[d], x[d], to_x[d]
            for j in range(count):
                g[j] = factor[j] * (g[j] * w - own[j] * pull[j])


@vectorised
def largest(x):
    """Of a row; four at a time, because each comparison waits for the one before."""
    size = x.size
    whole = size - size % 4
    a = b = c = e = x[0]
    for j in range(0, whole, 4):
        if x[j] > a:
            a = x[j]
        if x[j + 1] > b:
            b = x[j + 1]
        if x[j + 2] > c:
            c = x[j + 2]
        if x[j + 3] > e:
            e = x[j + 3]
    for j in range(whole, size):
        if x[j] > a:
            a = x[j]
    return max(max(a, b), max(c, e))


@vectorised
def soften(scores, steps, past, start):
    """Softmax `[G·T, past + T]` in place: token t sees what stands from `start` to itself. What it
    does not see is 0, and so is all of padding, which sees nothing."""
    count = scores.shape[1]
    bits = np.empty(count, np.int32)
    powers = bits.view(np.float32)
    for i in range(scores.shape[0]):
        end = past + i % steps + 1
        row = scores[i]
        row[: min(start, count)] = ZERO
        row[end:] = ZERO
        if end <= start:
            row[:] = ZERO
            continue
        seen = row[start:end]
        top = largest(seen)
        for j in range(seen.size):
            seen[j] -= top
        exponentials(seen, bits, powers)
        total = ZERO
        for j in range(seen.size):
            total += seen[j]
        factor = ONE / total
        for j in range(seen.size):
            seen[j] *= factor


@vectorised
def soften_gradient(weight, gradient):
    """Of a softmax that came to `weight`, in place: w·(g − Σ w·g)."""
    for i in range(weight.shape[0]):
        w, g = weight[i], gradient[i]
        inner = ZERO
        for j in range(w.size):
            inner += w[j] * g[j]
        for j in range(w.size):
            g[j] = w[j] * (g[j] - inner)


@vectorised
def copy_columns(source, begin, target, at, count):
    """`count` columns of all rows, from `begin` on, to those of the target from `at` on.

    An index that is a sum could be negative for all numba knows, and count from the end: asking
    that of every number takes three times as long as copying it. So slices come first.
    """
    for d in range(target.shape[0]):
        x, y = source[d, begin : begin + count], target[d, at : at + count]
        for j in range(count):
            y[j] = x[j]


@vectorised
def add_columns_of(source, begin, target, at, count):
    """The same, added."""
    for d in range(target.shape[0]):
        x, y = source[d, begin : begin + count], target[d, at : at + count]
        for j in range(count):
            y[j] += x[j]


@vectorised
def attention_arrays(group, steps, past, size):
    """Room for a key head of one sequence: queries `[D, G·T]`, keys and values `[D, past + T]`,
    what looks at what `[G·T, past + T]`, and what is seen `[D, G·T]`."""
    return (
        np.empty((size, group * steps), np.float32),
        np.empty((size, past + steps), np.float32),
        np.empty((size, past + steps), np.float32),
        np.empty((group * steps, past + steps), np.float32),
        np.empty((size, group * steps), np.float32),
    )


@vectorised
def arrange(turned, values, head, begin, memory, start, arrays):
    """Fill the first four of the `arrays` for a key head of the sequence whose columns begin at
    `begin`; `memory` `[2, KV, D, past]` are keys and values that stood before."""
    queries, keys, looks = arrays[0], arrays[1], arrays[3]
    heads, size, past = memory.shape[1], keys.shape[0], memory.shape[3]
    steps = keys.shape[1] - past
    group = queries.shape[1] // steps
    for g in range(group):
        at = (head * group + g) * size
        copy_columns(turned[at : at + size], begin, queries, g * steps, steps)
    copy_columns(memory[0, head], 0, keys, 0, past)
    copy_columns(memory[1, head], 0, arrays[2], 0, past)
    at = (heads * group + head) * size
    copy_columns(turned[at : at + size], begin, keys, past, steps)
    copy_columns(values[head * size : (head + 1) * size], begin, arrays[2], past, steps)
    np.dot(queries.T, keys, looks)
    soften(looks, steps, past, start)


@vectorised
def attend(turned, values, begin, memory, start, arrays, out, kept):
    """Attention of the sequence of T columns from `begin` on, to `out` `[KV·G·D, N]`.

    Args:
        turned: queries and keys `[(KV·G + KV)·D, N]` of a block of sequences.
        values: `[KV·D, N]`.
        memory: `[2, KV, D, past]`: keys and values that stand before; `start` of all are padding.
        kept: `[2, KV, D, T]` for its own keys and values, or with T = 0.
    """
    _, keys, all_values, looks, seen = arrays
    size, past = keys.shape[0], memory.shape[3]
    steps = keys.shape[1] - past
    group = seen.shape[1] // steps
    for head in range(memory.shape[1]):
        arrange(turned, values, head, begin, memory, start, arrays)
        np.dot(all_values, looks.T, seen)
        for g in range(group):
            at = (head * group + g) * size
            copy_columns(seen, g * steps, out[at : at + size], begin, steps)
        if kept.shape[3]:
            copy_columns(keys, past, kept[0, head], 0, steps)
            copy_columns(all_values, past, kept[1, head], 0, steps)


@vectorised
def attend_gradient(
    turned, values, begin, memory, start, arrays, spare, gradient, later, to_turned, to_values,
    to_memory,
):  # fmt: skip
    """Back through `attend`: `gradient` `[KV·G·D, N]` of what was seen, and `later` of the keys and
    values that it kept, go to `to_turned`, `to_values` and, added, to `to_memory`."""
    queries, keys, all_values, looks, _ = arrays
    to_queries, to_keys, to_all, to_looks, to_seen = spare
    heads, size, past = memory.shape[1], keys.shape[0], memory.shape[3]
    steps = keys.shape[1] - past
    group = queries.shape[1] // steps
    for head in range(heads):
        arrange(turned, values, head, begin, memory, start, arrays)
        for g in range(group):
            at = (head * group + g) * size
            copy_columns(gradient[at : at + size], begin, to_seen, g * steps, steps)
        np.dot(to_seen, looks, to_all)
        np.dot(to_seen.T, all_values, to_looks)
        soften_gradient(looks, to_looks)
        np.dot(keys, to_looks.T, to_queries)
        np.dot(queries, to_looks, to_keys)
        add_columns_of(to_keys, 0, to_memory[0, head], 0, past)
        add_columns_of(to_all, 0, to_memory[1, head], 0, past)
        if later.shape[3]:
            add_columns_of(later[0, head], 0, to_keys, past, steps)
            add_columns_of(later[1, head], 0, to_all, past, steps)
        for g in range(group):
            at = (head * group + g) * size
            copy_columns(to_queries, g * steps, to_turned[at : at + size], begin, steps)
        at = (heads * group + head) * size
        copy_columns(to_keys, past, to_turned[at : at + size], begin, steps)
        own = to_values[head * size : (head + 1) * size]
        copy_columns(to_all, past, own, begin, steps)
