"""The layers of `keel.models.pass_loops`: one after the other forward, and back."""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

from pathlib import Path

import numpy as np

from keel.models import compiling, pass_loops, products
from keel.models.decoding_loops import ONE, add, gate
from keel.models.pass_loops import (
    BLOCK,
    add_bias,
    add_bias_gradient,
    add_normalise_gradient,
    add_sums,
    angle_columns,
    attend,
    attend_gradient,
    attention_arrays,
    gate_gradient,
    normalise_rows,
    turn_heads,
    turn_heads_gradient,
)
from keel.models.products import add_product, add_product_of_transposed, add_transposed_product

SOURCES = (Path(__file__), *pass_loops.SOURCES, *products.SOURCES)
vectorised = compiling.keeping(SOURCES, fastmath={"reassoc", "contract"})


@vectorised
def block_of(kept, begin, end):
    """Tokens as columns, `[width, end − begin]`, of a block that is kept `[N, width]`."""
    width = kept.shape[1]
    return kept[begin:end].reshape((width, end - begin))


@vectorised
def forward_part(x, steps, weights, layer, memories, members, starts, angles, dials, kept, own):
    """Sequences of `steps` tokens through one layer, added to their rows of x `[·, hidden]`.

    Args:
        memories: `[·, 2, KV, D, past]`: what sequence i looks back to is `memories[members[i]]`.
        starts: how many positions at the begin are padding, of every sequence.
        kept: rows for what the way back needs; without rows nothing is kept.
        own: `[·, 2, KV, D, T]` for the keys and values of the sequences, or with T = 0.
    """
    before, qkv, qkv_bias, query_norm, key_norm, out, out_bias = weights[:7]
    between, up, up_bias, down, down_bias = weights[7:]
    heads, size, past = memories.shape[2], memories.shape[3], memories.shape[4]
    asked, turning = out.shape[2], out.shape[2] + heads * size
    whole = max(1, BLOCK // steps)
    rows = min(whole * steps, x.shape[0])
    normal, update = np.empty((rows, x.shape[1]), np.float32), np.empty_like(x[:rows])
    flats, seens = np.empty((rows, qkv.shape[1]), np.float32), np.empty((rows, asked), np.float32)
    turns = np.empty((rows, turning), np.float32)
    ups = np.empty((rows, up.shape[1]), np.float32)
    inner = np.empty((rows, down.shape[2]), np.float32)
    arrays = attention_arrays(asked // (heads * size), steps, past, size)
    keep = kept[0].shape[0] > 0
    for first in range(0, len(members), whole):
        count = min(whole, len(members) - first)
        a, b = first * steps, (first + count) * steps
        block, plain, more = x[a:b], normal[: b - a], update[: b - a]
        flat, seen = block_of(flats, 0, b - a), block_of(seens, 0, b - a)
        turned, gated = block_of(turns, 0, b - a), ups[: b - a]
        if keep:
            kept[0][a:b] = block
            flat, seen, gated = block_of(kept[2], a, b), block_of(kept[3], a, b), kept[4][a:b]
        normalise_rows(block, before[layer], dials[1], plain)
        np.dot(qkv[layer], plain.T, flat)
        add_bias(flat, qkv_bias[layer])
        angle = angle_columns(angles, past - starts[first : first + count], steps)
        turn_heads(flat[:asked], query_norm[layer], angle, dials, turned[:asked])
        one = (ONE, dials[1])
        turn_heads(flat[asked:turning], key_norm[layer], angle, one, turned[asked:])
        for i in range(count):
            at = first + i
            attend(
                turned, flat[turning:], i * steps, memories[members[at]], starts[at], arrays, seen,
                own[at],
            )  # fmt: skip
        np.dot(seen.T, out[layer].T, more)
        add(block, more, out_bias[layer])
        if keep:
            kept[1][a:b] = block
        normalise_rows(block, between[layer], dials[1], plain)
        np.dot(plain, up[layer].T, gated)
        gate(gated, up_bias[layer], inner[: b - a])
        np.dot(inner[: b - a], down[layer].T, more)
        add(block, more, down_bias[layer])


@vectorised
def backward_part(
    gradient, steps, weights, to_weights, layer, memories, members, starts, angles, dials, kept,
    later, to_memories,
):  # fmt: skip
    """Back through `forward_part`: `gradient` `[·, hidden]` of what it gave becomes that of what it
    was given; `later` is that of the keys and values that it left, `[·, 2, KV, D, T]`."""
    before, qkv, _, query_norm, key_norm, out, _ = weights[:7]
    between, up, _, down, _ = weights[7:]
    to_before, to_qkv, to_qkv_bias, to_query_norm, to_key_norm, to_out, to_out_bias = to_weights[:7]
    to_between, to_up, to_up_bias, to_down, to_down_bias = to_weights[7:]
    inputs, middles, flats, seens, ups = kept
    heads, size, past = memories.shape[2], memories.shape[3], memories.shape[4]
    asked, turning = out.shape[2], out.shape[2] + heads * size
    whole = max(1, BLOCK // steps)
    rows = min(whole * steps, gradient.shape[0])
    normal, change = np.empty_like(gradient[:rows]), np.empty_like(gradient[:rows])
    inner = np.empty((rows, down.shape[2]), np.float32)
    to_inner, to_seens = np.empty_like(inner), np.empty((rows, asked), np.float32)
    to_flats = np.empty((rows, qkv.shape[1]), np.float32)
    turns = np.empty((rows, turning), np.float32)
    to_turns = np.empty_like(turns)
    group = asked // (heads * size)
    arrays = attention_arrays(group, steps, past, size)
    spare = attention_arrays(group, steps, past, size)
    one = (ONE, dials[1])
    for first in range(0, len(members), whole):
        count = min(whole, len(members) - first)
        a, b = first * steps, (first + count) * steps
        g, plain, more = gradient[a:b], normal[: b - a], change[: b - a]
        # the MLP
        np.dot(g, down[layer], to_inner[: b - a])
        gate_gradient(ups[a:b], to_inner[: b - a], inner[: b - a])
        add_transposed_product(g, inner[: b - a], to_down[layer])
        add_sums(g, to_down_bias[layer])
        add_sums(ups[a:b], to_up_bias[layer])
        normalise_rows(middles[a:b], between[layer], dials[1], plain)
        add_transposed_product(ups[a:b], plain, to_up[layer])
        np.dot(ups[a:b], up[layer], more)
        for i in range(b - a):
            add_normalise_gradient(
                middles[a + i], between[layer], dials[1], more[i], g[i], to_between[layer]
            )
        # the attention
        flat, seen = block_of(flats, a, b), block_of(seens, a, b)
        turned, to_turned = block_of(turns, 0, b - a), block_of(to_turns, 0, b - a)
        to_flat, to_seen = block_of(to_flats, 0, b - a), block_of(to_seens, 0, b - a)
        np.dot(out[layer].T, g.T, to_seen)
        add_product_of_transposed(g, seen, to_out[layer])
        add_sums(g, to_out_bias[layer])
        angle = angle_columns(angles, past - starts[first : first + count], steps)
        turn_heads(flat[:asked], query_norm[layer], angle, dials, turned[:asked])
        turn_heads(flat[asked:turning], key_norm[layer], angle, one, turned[asked:])
        for i in range(count):
            at = first + i
            memory, to_memory = memories[members[at]], to_memories[members[at]]
            attend_gradient(
                turned, flat[turning:], i * steps, memory, starts[at], arrays, spare, to_seen,
                later[at], to_turned, to_flat[turning:], to_memory,
            )  # fmt: skip
        turn_heads_gradient(
            flat[:asked], query_norm[layer], angle, dials, to_turned[:asked], to_flat[:asked],
            to_query_norm[layer],
        )  # fmt: skip
        turn_heads_gradient(
            flat[asked:turning], key_norm[layer], angle, one, to_turned[asked:],
            to_flat[asked:turning], to_key_norm[layer],
        )  # fmt: skip
        normalise_rows(inputs[a:b], before[layer], dials[1], plain)
        add_product(to_flat, plain, to_qkv[layer])
        add_bias_gradient(to_flat, to_qkv_bias[layer])
        np.dot(to_flat.T, qkv[layer], more)
        for i in range(b - a):
            add_normalise_gradient(
                inputs[a + i], before[layer], dials[1], more[i], g[i], to_before[layer]
            )


@vectorised
def rows_of(kept, layer, begin, end):
    """Some rows of one layer, of everything that is kept."""
    return (
        kept[0][layer, begin:end],
        kept[1][layer, begin:end],
        kept[2][layer, begin:end],
        kept[3][layer, begin:end],
        kept[4][layer, begin:end],
    )


@vectorised
def forward(x, shape, members, starts, angles, dials, weights, kept, memories):
    """All layers, added to x `[U·P + R·T, hidden]`.

    Args:
        shape: P and T, tokens of a prompt and of a completion.
        weights: the norm before the attention, q, k and v with their bias, the norms of queries and
            keys, its output and bias; the norm before the MLP, gate and up, down, and biases.
        members: `[R]`: whose prompt is whose.
        starts: `[U]`: how much of a prompt is padding.
        dials: the scale of q·k, and ε.
        kept: inputs, middles, q-k-v, attended and gated, `[L, N, ·]` each, or `[L, 0, ·]`.
        memories: `[L, U, 2, KV, D, P]`, for the keys and values of the prompts.
    """
    width, steps = shape
    prompts = len(starts)
    cut = prompts * width
    heads, size = memories.shape[3], memories.shape[4]
    nothing = np.empty((1, 2, heads, size, 0), np.float32)
    alone = np.zeros(prompts, np.int64)
    no_room = np.empty((len(members), 2, heads, size, 0), np.float32)
    own_starts = starts[members]
    for layer in range(weights[0].shape[0]):
        forward_part(
            x[:cut], width, weights, layer, nothing, alone, starts, angles, dials,
            rows_of(kept, layer, 0, cut), memories[layer],
        )  # fmt: skip
        if steps:
            forward_part(
                x[cut:], steps, weights, layer, memories[layer], members, own_starts, angles, dials,
                rows_of(kept, layer, cut, len(x)), no_room,
            )  # fmt: skip


@vectorised
def backward(gradient, shape, members, starts, angles, dials, weights, to_weights, kept, memories):
    """Back through `forward`, which kept everything: `gradient` `[N, hidden]` of its result becomes
    that of its input, and `to_weights`, which begin with 0, those of the weights."""
    width, steps = shape
    prompts = len(starts)
    cut = prompts * width
    heads, size = memories.shape[3], memories.shape[4]
    nothing = np.empty((1, 2, heads, size, 0), np.float32)
    alone = np.zeros(prompts, np.int64)
    no_later = np.empty((len(members), 2, heads, size, 0), np.float32)
    own_starts = starts[members]
    for layer in range(weights[0].shape[0] - 1, -1, -1):
        to_memories = np.zeros_like(memories[layer])
        if steps:
            backward_part(
                gradient[cut:], steps, weights, to_weights, layer, memories[layer], members,
                own_starts, angles, dials, rows_of(kept, layer, cut, len(gradient)), no_later,
                to_memories,
            )  # fmt: skip
        backward_part(
            gradient[:cut], width, weights, to_weights, layer, nothing, alone, starts, angles,
            dials, rows_of(kept, layer, 0, cut), to_memories, nothing,
        )  # fmt: skip
