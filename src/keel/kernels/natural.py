"""TRPO's kernels for small MLPs, compiled by numba as `keel.kernels.mlp` is: Fisher-vector
products without anything between their passes, and the critic's fit by itself."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np

from keel.kernels import compiled, vectorised
from keel.kernels.mlp import NORM, VALUE, backward, forward, gather, norm_of
from keel.kernels.steps import adam, return_slope

ONE, ZERO = np.float32(1.0), np.float32(0.0)


@vectorised
def tangent(params, moved, start, sizes, tanh, buffer, rows, below, other, spare):
    """Compute J v, v = `moved`: the change of the output, left in `below` or `other`.

    `buffer` holds the layers as `forward` left them. Returns True if the result is in `below`.
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
        x = buffer[here : here + rows * inputs].reshape((rows, inputs))
        here += rows * inputs
        flat = other[: rows * outputs]
        y = flat.reshape((rows, outputs))
        np.dot(x, change.T, y)
        for i in range(rows):
            for j in range(outputs):
                y[i, j] += bias[j]
        if layer > 1:
            pushed = spare[: rows * outputs]
            lower = below[: rows * inputs].reshape((rows, inputs))
            np.dot(lower, weight.T, pushed.reshape((rows, outputs)))
            for i in range(rows * outputs):
                flat[i] += pushed[i]
        if layer < sizes.size - 1:
            after = buffer[here : here + rows * outputs]
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
def gaussian_product(params, moved, net, buffer, precision, log_std, spare, damping, out):
    """Compute (Jᵀ F J + damping) v of a Gaussian whose log-stds do not see the observation.

    `precision` `[R, D]` is each row's share over its variance; `log_std` where these parameters
    begin, and 2 for each that its bounds leave free.
    """
    start, sizes, tanh = net
    rows, dims = precision.shape
    first = tangent(params, moved, start, sizes, tanh, buffer, rows, spare[0], spare[1], spare[2])
    slope = spare[0] if first else spare[1]
    other = spare[1] if first else spare[0]
    flat = precision.reshape(rows * dims)
    for i in range(rows * dims):
        slope[i] *= flat[i]
    backward(params, out, start, sizes, tanh, buffer, rows, slope, other)
    place, curvature = log_std
    for j in range(dims):
        out[place + j] = curvature[j] * moved[place + j]
    for i in range(out.size):
        out[i] += np.float32(damping) * moved[i]


@compiled
def categorical_product(params, moved, net, buffer, p, share, spare, damping, out):
    """Compute the same of a categorical, share·(p∘u − p (p·u)); `share` holds 1/temperature²."""
    start, sizes, tanh = net
    rows, choices = p.shape
    first = tangent(params, moved, start, sizes, tanh, buffer, rows, spare[0], spare[1], spare[2])
    slope = spare[0] if first else spare[1]
    other = spare[1] if first else spare[0]
    u = slope[: rows * choices].reshape((rows, choices))
    for i in range(rows):
        mean = ZERO
        for j in range(choices):
            mean += p[i, j] * u[i, j]
        for j in range(choices):
            u[i, j] = share[i] * p[i, j] * (u[i, j] - mean)
    backward(params, out, start, sizes, tanh, buffer, rows, slope, other)
    for i in range(out.size):
        out[i] += np.float32(damping) * moved[i]


@compiled
def critic_gradient(params, net, batch, index, real, workspace):
    """Compute the gradient of the critic's loss on a minibatch; `workspace` as in `kernels`."""
    sizes, tanh, returns = net
    buffer, slope, other, part, gradient, statistics = workspace
    rows = index.size
    gather(batch, index, real, sizes[0], buffer, part)
    total = 0.0
    for i in range(rows):
        total += part[2][i]
    if total > 0.0:
        for i in range(rows):
            part[2][i] /= np.float32(total)
    at = forward(params, 0, sizes, tanh, buffer, rows)
    count = sizes[-1]
    slope[: rows * count] = buffer[at : at + rows * count]
    raw = slope[: rows * count].reshape((rows, count))
    statistics[VALUE] = return_slope(raw, part[3], part[2], 1.0, returns)
    backward(params, gradient, 0, sizes, tanh, buffer, rows, slope, other)
    statistics[NORM] = norm_of(gradient)
    return statistics[VALUE]


@compiled
def critic_sweep(state, age, net, batch, order, workspace, settings, split, metrics):
    """Run one pass of Adam over all rows in the order given, in place; return the critic's new age.

    `state` `[3, C]` holds parameters and moments, `metrics` `[M, 2]` takes each minibatch's loss
    and gradient norm. A gradient that is not finite is not applied.
    """
    rate, max_norm, betas, epsilon = settings
    gradient, statistics = workspace[4], workspace[5]
    rows, size = order.size, workspace[3][0].size
    index, real = np.zeros(size, np.int64), np.zeros(size, np.float32)
    ages = np.empty(2, np.float32)
    for at in range(metrics.shape[0]):
        for i in range(size):
            row = at * size + i
            index[i] = order[row] if row < rows else 0
            real[i] = np.float32(1.0) if row < rows else ZERO
        metrics[at, 0] = critic_gradient(state[0], net, batch, index, real, workspace)
        norm = statistics[NORM]
        metrics[at, 1] = norm
        if np.isfinite(norm):
            age += 1.0
            ages[:] = age
            scale = min(1.0, max_norm / (norm + 1e-6))
            adam(
                state[0], state[1], state[2], gradient, scale, (rate, rate), betas, epsilon, split,
                ages, state,
            )  # fmt: skip
    return age
