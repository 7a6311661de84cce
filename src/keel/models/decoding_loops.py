"""One position of a small Llama through a layer on the CPU, compiled by numba.

At a million parameters and 64 rows the matrix products of a layer take 0.27 ms, and the attention
of 40 positions in torch's operations nearly as much again: for every row and head two products of a
few hundred numbers each. These loops take half of that, with nothing around the products.

Arrays are float32 and contiguous. A weight that a model does not have is empty. The numbers are
those of torch's operations (`keel.models.decoding_lean`), to which a test holds them.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from keel.models import compiling

SOURCES = (Path(__file__), Path(compiling.__file__))
vectorised = compiling.keeping(SOURCES, fastmath={"reassoc", "contract"})

ZERO, HALF, ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
LOWEST, HIGHEST = np.float32(-87.0), np.float32(88.0)
"""Between these, e^x is a normal float32."""
LOG2_E = np.float32(1.44269504)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
E2, E3, E4 = np.float32(0.5), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
E5, E6, E7 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)
"""e^r = 1 + r + r²·(E2 + E3·r + …) on |r| ≤ ½ ln 2, to 1e-7 (Cephes' expf)."""


@vectorised
def exponentials(x, bits, powers):
    """e^x in place, by arithmetic that becomes vectors; a library's exp is called one by one.

    e^x = 2^k·e^r with x = k·ln 2 + r. 2^k is made of its `bits`, int32, of which `powers` is the
    view as float32. NaN stays NaN.
    """
    for i in range(x.size):
        v = x[i]
        if v < LOWEST:
            v = LOWEST
        if v > HIGHEST:
            v = HIGHEST
        k = np.floor(v * LOG2_E + HALF)
        r = (v - k * LN2_HIGH) - k * LN2_LOW
        p = ((((E7 * r + E6) * r + E5) * r + E4) * r + E3) * r + E2
        x[i] = p * r * r + r + ONE
        bits[i] = (np.int32(k) + np.int32(127)) << np.int32(23)
    for i in range(x.size):
        x[i] *= powers[i]


@vectorised
def normalise(x, weight, epsilon, out):
    """w·x/√(mean x² + ε) of one row; `out` may be x."""
    squares = ZERO
    for j in range(x.size):
        squares += x[j] * x[j]
    factor = np.float32(1.0 / math.sqrt(squares / x.size + epsilon))
    for j in range(x.size):
        out[j] = x[j] * factor * weight[j]


@vectorised
def turn(x, cos, sin):
    """A query or a key by the angles of its position."""
    half = x.size // 2
    for d in range(half):
        left, right = x[d], x[half + d]
        x[d] = left * cos[d] - right * sin[d]
        x[half + d] = right * cos[d] + left * sin[d]


@vectorised
def compare(query, keys, scale, out):
    """q·k of all keys `[T, D]`; the largest of them."""
    top = np.float32(-np.inf)
    for j in range(keys.shape[0]):
        product = ZERO
        for d in range(query.size):
            product += query[d] * keys[j, d]
        out[j] = product * np.float32(scale)
        top = max(top, out[j])
    return top


@vectorised
def mix(weight, values, out):
    """Σ w·v over values `[T, D]`; four at a time, so that `out` is read and written less often."""
    count, size = values.shape
    whole = count - count % 4
    out[:] = ZERO
    for j in range(0, whole, 4):
        a, b, c, e = weight[j], weight[j + 1], weight[j + 2], weight[j + 3]
        for d in range(size):
            near = a * values[j, d] + b * values[j + 1, d]
            far = c * values[j + 2, d] + e * values[j + 3, d]
            out[d] += near + far
    for j in range(whole, count):
        for d in range(size):
            out[d] += weight[j] * values[j, d]


@vectorised
def attend(qkv, norm, angles, cache, starts, at, dials, out):
    """Attention of the position `at`, `[B, KV, G + 2, D]`, which enters the cache.

    Row b looks at the positions from `starts[b]` on: padding is not so much as read.

    Args:
        norm: `[G + 1, D]`, of the queries and the key of a key head.
        angles: cos and sin `[capacity, D]` of all positions.
        cache: `[B, 2, KV, capacity, D]`, keys and values.
        dials: the scale of q·k, and ε.
        out: `[B, KV·G, D]`.
    """
    rows, key_heads, group = qkv.shape[0], qkv.shape[1], qkv.shape[2] - 2
    scale, epsilon = dials
    scores = np.empty(at + 1, np.float32)
    bits = np.empty(at + 1, np.int32)
    powers = bits.view(np.float32)
    for i in range(rows):
        start = starts[i]
        cos, sin = angles[0][at - start], angles[1][at - start]
        weight = scores[: at + 1 - start]
        for h in range(key_heads):
            for g in range(group + 1):
                x = qkv[i, h, g]
                if norm.shape[0]:
                    normalise(x, norm[g], epsilon, x)
                turn(x, cos, sin)
            cache[i, 0, h, at] = qkv[i, h, group]
            cache[i, 1, h, at] = qkv[i, h, group + 1]
            for g in range(group):
                top = compare(qkv[i, h, g], cache[i, 0, h, start : at + 1], scale, weight)
                for j in range(weight.size):
                    weight[j] -= top
                exponentials(weight, bits, powers)
                total = ZERO
                for j in range(weight.size):
                    total += weight[j]
                seen = out[i, h * group + g]
                mix(weight, cache[i, 1, h, start : at + 1], seen)
                for d in range(seen.size):
                    seen[d] /= total


@vectorised
def add(x, y, bias):
    """x += y + b, `[B, ·]`; b may be empty."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] += y[i, j]
        for j in range(bias.size):
            x[i, j] += bias[j]


@vectorised
def gate(x, bias, out):
    """silu of the first half of every row, times the second, `[B, I]` from `[B, 2I]`, to which the
    bias is added first."""
    rows, size = out.shape
    bits = np.empty(size, np.int32)
    powers = bits.view(np.float32)
    for i in range(rows):
        for j in range(bias.size):
            x[i, j] += bias[j]
        for j in range(size):
            out[i, j] = -x[i, j]
        exponentials(out[i], bits, powers)
        for j in range(size):
            out[i, j] = x[i, j] * x[i, size + j] / (ONE + out[i, j])


@vectorised
def layer(x, attention, mlp, norm, angles, cache, starts, at, dials):
    """A whole layer, added to x `[B, hidden]`.

    `attention` is the norm before it, the weight and bias of q, k and v, those of its output; `mlp`
    the same for gate and up, and down; weights are `[in, out]`. For the others see `attend`.
    """
    before, qkv_weight, qkv_bias, out_weight, out_bias = attention
    between, up_weight, up_bias, down_weight, down_bias = mlp
    rows, key_heads, size = x.shape[0], cache.shape[2], cache.shape[4]
    normal, update = np.empty_like(x), np.empty_like(x)
    for i in range(rows):
        normalise(x[i], before, dials[1], normal[i])
    projected = np.dot(normal, qkv_weight)
    for i in range(rows):
        for j in range(qkv_bias.size):
            projected[i, j] += qkv_bias[j]
    qkv = projected.reshape((rows, key_heads, -1, size))
    seen = np.empty((rows, out_weight.shape[0]), np.float32)
    heads = seen.reshape((rows, -1, size))
    attend(qkv, norm, angles, cache, starts, at, dials, heads)
    np.dot(seen, out_weight, update)
    add(x, update, out_bias)
    for i in range(rows):
        normalise(x[i], between, dials[1], normal[i])
    opened = np.empty((rows, down_weight.shape[0]), np.float32)
    gate(np.dot(normal, up_weight), up_bias, opened)
    np.dot(opened, down_weight, update)
    add(x, update, down_bias)
