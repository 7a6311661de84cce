"""A GRU over whole sequences, forwards and backwards, compiled by numba.

Autograd walks a sequence cell by cell, a dozen small operations each: 0.3 ms a row there and back,
of which the arithmetic is a tenth. Arrays are float32, time first: gates `[L, B, 3H]` in the order
reset, update, candidate, as in `torch.nn.GRUCell`, whose numbers a test holds these to.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.models.compiling import compiled, vectorised
from keel.models.kernels import squash

HALF, ONE = np.float32(0.5), np.float32(1.0)


@vectorised
def cell(seen, hidden, before, gates, candidate, after):
    """One row of the sequence: from `seen` (x·W + b) and `hidden` (h·U + c) to the next state.

    Leaves reset, update and candidate in `gates` and h·U + c of the candidate in `candidate`.
    """
    rows, size = before.shape
    for i in range(rows):
        for j in range(2 * size):  # σ(x) = ½ + ½ tanh(x/2)
            gates[i, j] = HALF * (seen[i, j] + hidden[i, j])
        squash(gates[i, : 2 * size], True)
        for j in range(2 * size):
            gates[i, j] = HALF + HALF * gates[i, j]
        for j in range(size):
            candidate[i, j] = hidden[i, 2 * size + j]
            gates[i, 2 * size + j] = seen[i, 2 * size + j] + gates[i, j] * candidate[i, j]
        squash(gates[i, 2 * size :], True)
        for j in range(size):
            n = gates[i, 2 * size + j]
            after[i, j] = n + gates[i, size + j] * (before[i, j] - n)


@compiled
def forward(seen, state, keep, weight, bias):
    """All states `[L, B, H]`, and what `backward` needs."""
    length, rows, _ = seen.shape
    size = state.shape[1]
    states = np.empty((length, rows, size), np.float32)
    before = np.empty((length, rows, size), np.float32)
    gates = np.empty((length, rows, 3 * size), np.float32)
    candidate = np.empty((length, rows, size), np.float32)
    hidden = np.empty((rows, 3 * size), np.float32)
    for t in range(length):
        for i in range(rows):
            for j in range(size):
                before[t, i, j] = state[i, j] * keep[t, i]
        np.dot(before[t], weight.T, hidden)
        for i in range(rows):
            for j in range(3 * size):
                hidden[i, j] += bias[j]
        cell(seen[t], hidden, before[t], gates[t], candidate[t], states[t])
        state = states[t]
    return states, before, gates, candidate


@vectorised
def cell_slopes(slope, before, gates, candidate, by_seen, by_hidden, by_before):
    """The gradient of one row: from that of its state to those of its three inputs."""
    rows, size = before.shape
    for i in range(rows):
        for j in range(size):
            r, z, n = gates[i, j], gates[i, size + j], gates[i, 2 * size + j]
            g = slope[i, j]
            by_before[i, j] = g * z
            by_n = g * (ONE - z) * (ONE - n * n)
            by_z = g * (before[i, j] - n) * z * (ONE - z)
            by_r = by_n * candidate[i, j] * r * (ONE - r)
            by_seen[i, j], by_seen[i, size + j], by_seen[i, 2 * size + j] = by_r, by_z, by_n
            by_hidden[i, j], by_hidden[i, size + j] = by_r, by_z
            by_hidden[i, 2 * size + j] = by_n * r


@compiled
def backward(slopes, keep, weight, before, gates, candidate):
    """From the gradient of all states to those of `seen`, `state`, `weight` and `bias`."""
    length, rows, size = slopes.shape
    by_seen = np.empty((length, rows, 3 * size), np.float32)
    by_hidden = np.empty((length, rows, 3 * size), np.float32)
    by_before = np.empty((rows, size), np.float32)
    through = np.empty((rows, size), np.float32)
    slope = slopes[length - 1].copy()
    for t in range(length - 1, -1, -1):
        cell_slopes(slope, before[t], gates[t], candidate[t], by_seen[t], by_hidden[t], by_before)
        np.dot(by_hidden[t], weight, through)
        for i in range(rows):
            for j in range(size):
                slope[i, j] = (by_before[i, j] + through[i, j]) * keep[t, i]
                if t > 0:
                    slope[i, j] += slopes[t - 1, i, j]
    flat = by_hidden.reshape((length * rows, 3 * size))
    by_weight = np.dot(flat.T, before.reshape((length * rows, size)))
    by_bias = np.zeros(3 * size, np.float32)
    for i in range(length * rows):
        for j in range(3 * size):
            by_bias[j] += flat[i, j]
    return by_seen, slope, by_weight, by_bias


class _Gru(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, seen: Tensor, state: Tensor, keep: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        arrays = [x.detach().contiguous().numpy() for x in (seen, state, keep, weight, bias)]
        states, *ctx.room = forward(*arrays)
        ctx.keep, ctx.weight = arrays[2], arrays[3]
        return torch.from_numpy(states)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        given = slopes[0].contiguous().numpy()
        by_seen, by_state, by_weight, by_bias = (
            torch.from_numpy(x) for x in backward(given, ctx.keep, ctx.weight, *ctx.room)
        )
        return by_seen, by_state, None, by_weight, by_bias


def run(seen: Tensor, state: Tensor, keep: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """All states `[L, B, H]` of a sequence, differentiable.

    Args:
        seen: `[L, B, 3H]`, x·W + b of every row.
        state: `[B, H]` before the first row.
        keep: `[L, B]`, 0 for rows that begin an episode, where the state is forgotten.
        weight: `[3H, H]`, of the state.
        bias: `[3H]`, of the state.
    """
    result: Tensor = _Gru.apply(seen, state, keep, weight, bias)
    return result
