"""What TRPO asks of a small MLP, compiled by numba as `keel.models.kernels` is: tangents for
Fisher-vector products, and the critic's gradient by itself."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np

from keel.models.kernels import (
    NORM,
    VALUE,
    backward,
    compiled,
    critic_slope,
    forward,
    gather,
    norm_of,
    vectorised,
)

ONE, ZERO = np.float32(1.0), np.float32(0.0)


@vectorised
def tangent(params, moved, start, sizes, tanh, room, rows, below, other):
    """J v: the output's change as the parameters move by `moved`; it is left in `below` or `other`.

    `room` holds the layers as `forward` left them. Returns True if the result is in `below`.
    """
    at, here = start, 0
    first = True
    for layer in range(1, sizes.size):
        inputs, outputs = sizes[layer - 1], sizes[layer]
        weight = params[at : at + outputs * inputs].reshape((outputs, inputs))
        change = moved[at : at + outputs * inputs].reshape((outputs, inputs))
        at += outputs * inputs
        bias = moved[at : at + outputs]
        at += outputs
        x = room[here : here + rows * inputs].reshape((rows, inputs))
        here += rows * inputs
        flat = other[: rows * outputs]
        y = flat.reshape((rows, outputs))
        np.dot(x, change.T, y)
        if layer > 1:
            pushed = np.dot(below[: rows * inputs].reshape((rows, inputs)), weight.T)
            for i in range(rows):
                for j in range(outputs):
                    y[i, j] += pushed[i, j] + bias[j]
        else:
            for i in range(rows):
                for j in range(outputs):
                    y[i, j] += bias[j]
        if layer < sizes.size - 1:
            after = room[here : here + rows * outputs]
            for i in range(rows * outputs):
                v = after[i]
                if tanh:
                    flat[i] *= ONE - v * v
                elif not v > ZERO:
                    flat[i] = ZERO
        below, other = other, below
        first = not first
    return first


@compiled
def critic_gradient(params, sizes, tanh, batch, index, real, desk):
    """The gradient of the critic's mean squared error on a minibatch; `desk` as in `kernels`."""
    room, slope, other, part, gradient, statistics = desk
    rows = index.size
    gather(batch, index, real, sizes[0], room, part)
    total = 0.0
    for i in range(rows):
        total += part[2][i]
    if total > 0.0:
        for i in range(rows):
            part[2][i] /= np.float32(total)
    at = forward(params, 0, sizes, tanh, room, rows)
    slope[:rows] = room[at : at + rows]
    critic_slope(slope[:rows], part[3], part[2], 1.0, statistics)
    backward(params, gradient, 0, sizes, tanh, room, rows, slope, other)
    statistics[NORM] = norm_of(gradient)
    return statistics[VALUE]
