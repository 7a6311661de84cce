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

from keel.kernels import compiled, vectorised
from keel.kernels.mlp import squash

HALF, ONE = np.float32(0.5), np.float32(1.0)


@vectorised
def cell(input_gates, hidden_gates, before, gates, candidate, after):
    """Compute the next state from `input_gates` (x·W + b) and `hidden_gates` (h·U + c) of one row.

    Leaves reset, update and candidate in `gates` and h·U + c of the candidate in `candidate`.
    """
    rows, size = before.shape
    for i in range(rows):
        for j in range(2 * size):  # σ(x) = ½ + ½ tanh(x/2)
            gates[i, j] = HALF * (input_gates[i, j] + hidden_gates[i, j])
        squash(gates[i, : 2 * size], True)
        for j in range(2 * size):
            gates[i, j] = HALF + HALF * gates[i, j]
        for j in range(size):
            candidate[i, j] = hidden_gates[i, 2 * size + j]
            gates[i, 2 * size + j] = input_gates[i, 2 * size + j] + gates[i, j] * candidate[i, j]
        squash(gates[i, 2 * size :], True)
        for j in range(size):
            n = gates[i, 2 * size + j]
            after[i, j] = n + gates[i, size + j] * (before[i, j] - n)


@compiled
def forward(input_gates, state, keep, weight, bias):
    """Return all states `[L, B, H]`, and what `backward` needs."""
    length, rows, _ = input_gates.shape
    size = state.shape[1]
    states = np.empty((length, rows, size), np.float32)
    before = np.empty((length, rows, size), np.float32)
    gates = np.empty((length, rows, 3 * size), np.float32)
    candidate = np.empty((length, rows, size), np.float32)
    hidden_gates = np.empty((rows, 3 * size), np.float32)
    for t in range(length):
        for i in range(rows):
            for j in range(size):
                before[t, i, j] = state[i, j] * keep[t, i]
        np.dot(before[t], weight.T, hidden_gates)
        for i in range(rows):
            for j in range(3 * size):
                hidden_gates[i, j] += bias[j]
        cell(input_gates[t], hidden_gates, before[t], gates[t], candidate[t], states[t])
        state = states[t]
    return states, before, gates, candidate


@vectorised
def cell_backward(grad_state, before, gates, candidate, grad_input, grad_hidden, grad_before):
    """Compute the gradient of one row: from that of its state to those of its three inputs."""
    rows, size = before.shape
    for i in range(rows):
        for j in range(size):
            r, z, n = gates[i, j], gates[i, size + j], gates[i, 2 * size + j]
            g = grad_state[i, j]
            grad_before[i, j] = g * z
            grad_n = g * (ONE - z) * (ONE - n * n)
            grad_z = g * (before[i, j] - n) * z * (ONE - z)
            grad_r = grad_n * candidate[i, j] * r * (ONE - r)
            (
                grad_input[i, j],
                grad_input[i, size + j],
                grad_input[i, 2 * size + j],
            ) = grad_r, grad_z, grad_n
            grad_hidden[i, j], grad_hidden[i, size + j] = grad_r, grad_z
            grad_hidden[i, 2 * size + j] = grad_n * r


@compiled
def backward(grad_states, keep, weight, before, gates, candidate):
    """Return gradients of `input_gates`, `state`, `weight` and `bias`, from those of all states."""
    length, rows, size = grad_states.shape
    grad_input = np.empty((length, rows, 3 * size), np.float32)
    grad_hidden = np.empty((length, rows, 3 * size), np.float32)
    grad_before = np.empty((rows, size), np.float32)
    grad_through = np.empty((rows, size), np.float32)
    grad_state = grad_states[length - 1].copy()
    for t in range(length - 1, -1, -1):
        cell_backward(
            grad_state,
            before[t],
            gates[t],
            candidate[t],
            grad_input[t],
            grad_hidden[t],
            grad_before,
        )
        np.dot(grad_hidden[t], weight, grad_through)
        for i in range(rows):
            for j in range(size):
                grad_state[i, j] = (grad_before[i, j] + grad_through[i, j]) * keep[t, i]
                if t > 0:
                    grad_state[i, j] += grad_states[t - 1, i, j]
    flat = grad_hidden.reshape((length * rows, 3 * size))
    grad_weight = np.dot(flat.T, before.reshape((length * rows, size)))
    grad_bias = np.zeros(3 * size, np.float32)
    for i in range(length * rows):
        for j in range(3 * size):
            grad_bias[j] += flat[i, j]
    return grad_input, grad_state, grad_weight, grad_bias


class _Gru(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input_gates: Tensor, state: Tensor, keep: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        arrays = [x.detach().contiguous().numpy() for x in (input_gates, state, keep, weight, bias)]
        states, *ctx.saved = forward(*arrays)
        ctx.keep, ctx.weight = arrays[2], arrays[3]
        return torch.from_numpy(states)

    @staticmethod
    def backward(ctx: Any, *grad_states: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad_states[0].contiguous().numpy()
        grad_input, grad_state, grad_weight, grad_bias = (
            torch.from_numpy(x) for x in backward(grad, ctx.keep, ctx.weight, *ctx.saved)
        )
        return grad_input, grad_state, None, grad_weight, grad_bias


def run(input_gates: Tensor, state: Tensor, keep: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return all states `[L, B, H]` of a sequence, differentiable.

    Args:
        input_gates: `[L, B, 3H]`, x·W + b of every row.
        state: `[B, H]` before the first row.
        keep: `[L, B]`, 0 for rows that begin an episode, where the state is forgotten.
        weight: `[3H, H]`, of the state.
        bias: `[3H]`, of the state.
    """
    result: Tensor = _Gru.apply(input_gates, state, keep, weight, bias)
    return result
