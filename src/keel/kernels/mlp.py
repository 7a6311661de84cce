"""The optimizer step of two small MLPs, differentiated by hand and compiled by numba.

A 64×64 network at 256 rows is 0.3 ms of matrix products; around them autograd spends 4 ms on a
thousand tiny operations, and `torch.compile` 20 s before its first step. These loops do the same
arithmetic with nothing around it; numba keeps what it compiled on disk, beside this file.

Arrays are float32 and contiguous. A network is a piece of the parameter vector from `start` on: for
each layer its weight `[out, in]`, then its bias; `sizes` are the widths, input first. Numbers that
are not finite are let through to the gradient, where the caller looks for them.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import math

import numpy as np
import scipy.linalg.cython_blas  # noqa: F401  numba's products: loaded now, its threads can be set

from keel.distributions.actions import LOG_2PI
from keel.kernels import compiled, vectorised
from keel.kernels.steps import return_slope

LOSS, POLICY, VALUE, ENTROPY, KL, CLIPPED, QUARANTINED, LARGEST, CLONED, NORM = range(10)
"""Indices of the statistics of a step; `POLICY` is the surrogate's loss, `LARGEST` the
largest |log-ratio|, `CLONED` the loss on demonstrations."""

NO_KL, EXACT, K1, K3 = range(4)
"""Ways to measure the KL of a minibatch."""
K3_LIMIT = 20.0
LIMIT = np.float32(7.9)
"""tanh is 1 from here on, in float32."""
P0, P1, P2, P3, P4, P5 = (
    np.float32(x)
    for x in (
        9.9999998352e-01,
        1.2984976238e-01,
        2.9921684178e-03,
        9.9398358793e-06,
        -1.4908197056e-08,
        2.4110270612e-11,
    )
)
Q1, Q2, Q3 = (np.float32(x) for x in (4.6318294264e-01, 2.4053385958e-02, 2.3809667702e-04))
"""tanh(x) ≈ x·P(x²)/Q(x²), fitted by least squares to 2e-8; within 4e-7 as evaluated here. The
library's tanh is a call per number, which no compiler turns into a vector."""


@vectorised
def squash(x, tanh):
    """Apply tanh or ReLU to a flat array, in place."""
    for i in range(x.size):
        v = x[i]
        if tanh:
            if v > LIMIT:  # written so that NaN stays NaN
                v = LIMIT
            if v < -LIMIT:
                v = -LIMIT
            s = v * v
            p = ((((P5 * s + P4) * s + P3) * s + P2) * s + P1) * s + P0
            q = ((Q3 * s + Q2) * s + Q1) * s + np.float32(1.0)
            x[i] = v * p / q
        elif v < np.float32(0.0):
            x[i] = np.float32(0.0)


@vectorised
def forward(params, start, sizes, tanh, buffer, rows):
    """Run all layers, one after the other in `buffer` after the input; return the last's place."""
    at, here = start, 0
    for layer in range(1, sizes.size):
        inputs, outputs = sizes[layer - 1], sizes[layer]
        weight = params[at : at + outputs * inputs].reshape((outputs, inputs))
        at += outputs * inputs
        bias = params[at : at + outputs]
        at += outputs
        x = buffer[here : here + rows * inputs].reshape((rows, inputs))
        here += rows * inputs
        flat = buffer[here : here + rows * outputs]
        y = flat.reshape((rows, outputs))
        np.dot(x, weight.T, y)
        for i in range(rows):
            for j in range(outputs):
                y[i, j] += bias[j]
        if layer < sizes.size - 1:
            squash(flat, tanh)
    return here


@vectorised
def act(params, start, sizes, tanh, x, buffer, out):
    """Write a network's output on `x` `[N, in]` into the first columns of `out`; in one call, as
    around a pass over a few rows every call costs as much as the arithmetic."""
    rows, inputs = x.shape
    for i in range(rows):
        for j in range(inputs):
            buffer[i * inputs + j] = x[i, j]
    at = forward(params, start, sizes, tanh, buffer, rows)
    outputs = sizes[-1]
    for i in range(rows):
        for j in range(outputs):
            out[i, j] = buffer[at + i * outputs + j]


@vectorised
def backward(params, gradient, start, sizes, tanh, buffer, rows, slope, other):
    """Compute a network's gradient from `slope` at its output; both spare arrays are used up."""
    at, here = start, 0
    for layer in range(1, sizes.size):
        at += sizes[layer] * (sizes[layer - 1] + 1)
        here += rows * sizes[layer - 1]
    for layer in range(sizes.size - 1, 0, -1):
        inputs, outputs = sizes[layer - 1], sizes[layer]
        at -= outputs
        s = slope[: rows * outputs].reshape((rows, outputs))
        bias = gradient[at : at + outputs]
        bias[:] = np.float32(0.0)
        for i in range(rows):
            for j in range(outputs):
                bias[j] += s[i, j]
        at -= outputs * inputs
        here -= rows * inputs
        layer_input = buffer[here : here + rows * inputs]
        grad_weight = gradient[at : at + outputs * inputs].reshape((outputs, inputs))
        np.dot(s.T, layer_input.reshape((rows, inputs)), grad_weight)
        if layer > 1:
            below = other[: rows * inputs]
            weight = params[at : at + outputs * inputs].reshape((outputs, inputs))
            np.dot(s, weight, below.reshape((rows, inputs)))
            for i in range(rows * inputs):
                y = layer_input[i]
                if tanh:
                    below[i] *= np.float32(1.0) - y * y
                elif not y > np.float32(0.0):
                    below[i] = np.float32(0.0)
            slope, other = other, slope


@compiled
def surrogate(log_prob, old, advantage, weight, low, high, limit, track, slope, statistics):
    """Compute PPO's clipped loss: d loss / d log-prob into `slope`, rows' shares into `weight`.

    A log-ratio that is not finite is quarantined: weight 0, gradient 0 (`functional.ratio`).
    """
    total, quarantined, largest = 0.0, 0.0, 0.0
    for i in range(weight.size):
        difference = abs(log_prob[i] - old[i])
        if not math.isfinite(difference):
            if weight[i] > 0.0:
                quarantined += 1.0
            weight[i] = np.float32(0.0)
        elif weight[i] > 0.0:
            largest = max(largest, difference)
        total += weight[i]
    if total == 0.0:
        total = 1.0
    loss, clipped, estimate = 0.0, 0.0, 0.0
    for i in range(weight.size):
        slope[i] = np.float32(0.0)
        if weight[i] == 0.0:
            continue
        share = weight[i] / np.float32(total)
        weight[i] = share
        difference = log_prob[i] - old[i]
        if track == K1:
            estimate -= share * difference
        elif track == K3:
            bounded = min(difference, K3_LIMIT)  # beyond, along the tangent (`functional.k3`)
            size = math.exp(bounded)
            estimate += share * (size * (1.0 + difference - bounded) - 1.0 - difference)
        log_ratio = min(max(difference, -limit), limit)
        ratio = math.exp(log_ratio)
        free = -ratio * advantage[i]
        bounded = -min(max(ratio, low), high) * advantage[i]
        if bounded > free:
            loss += share * bounded
            clipped += share
        else:
            loss += share * free
            if log_ratio == difference:
                slope[i] = share * free
    statistics[POLICY], statistics[CLIPPED], statistics[KL] = loss, clipped, estimate
    statistics[QUARANTINED] = quarantined
    statistics[LARGEST] = largest if quarantined == 0.0 else np.nan


@compiled
def log_softmax(row, out):
    """Normalize one row of logits, −inf where illegal."""
    largest = row[0]
    for j in range(1, row.size):
        largest = max(largest, row[j])
    total = 0.0
    for j in range(row.size):
        total += math.exp(row[j] - largest)
    shift = largest + math.log(total)
    for j in range(row.size):
        out[j] = row[j] - shift


@compiled
def categorical(logits, mask, action, old_logits, hparams, part, statistics):
    """Compute the policy's loss and its gradient at the logits, which it overwrites."""
    old, advantage, share, _, slope, log_prob = part
    low, high, entropy_coef, temperature, limit, bonus, track = hparams
    count, choices = logits.shape
    spare = np.empty(choices, np.float32)
    for i in range(count):
        for j in range(choices):
            logits[i, j] /= np.float32(temperature)
            if mask.size and not mask[i, j]:
                logits[i, j] = -np.inf
        log_softmax(logits[i], logits[i])
        log_prob[i] = logits[i, action[i]]
    surrogate(log_prob, old, advantage, share, low, high, limit, track, slope, statistics)
    entropy, kl = 0.0, 0.0
    for i in range(count):
        if track == EXACT:
            log_softmax(old_logits[i], spare)
            for j in range(choices):
                if spare[j] > -np.inf and share[i] > 0.0:
                    kl += share[i] * math.exp(spare[j]) * (spare[j] - logits[i, j])
        negative = 0.0  # −H of this row
        if bonus:
            for j in range(choices):
                if logits[i, j] > -np.inf:
                    negative += math.exp(logits[i, j]) * logits[i, j]
            if share[i] > 0.0:
                entropy -= share[i] * negative
        for j in range(choices):
            log_p = logits[i, j]
            p = math.exp(log_p)
            g = -slope[i] * p
            if j == action[i]:
                g += slope[i]
            if bonus and p > 0.0:
                g += entropy_coef * share[i] * p * (log_p - negative)
            logits[i, j] = g / temperature
    statistics[ENTROPY] = entropy
    if track == EXACT:
        statistics[KL] = kl


@compiled
def gaussian(mean, log_std, bounds, action, behavior, hparams, part, grad_log_std, statistics):
    """Compute the same for a Gaussian whose log-stds do not depend on the observation."""
    old, advantage, share, _, slope, log_prob = part
    low, high, entropy_coef, temperature, limit, bonus, track = hparams
    old_mean, old_log_std = behavior
    count, dims = mean.shape
    spread = np.empty(dims, np.float32)
    free = np.empty(dims, np.bool_)
    constant = np.float32(0.5 * LOG_2PI * dims)
    for j in range(dims):
        bounded = min(max(log_std[j], bounds[0]), bounds[1])
        free[j] = bounded == log_std[j]  # a bound that holds has no gradient
        spread[j] = bounded + np.float32(0.5 * math.log(temperature))
        constant += spread[j]
    precision = np.exp(-spread)
    for i in range(count):
        squares = np.float32(0.0)
        for j in range(dims):
            z = (action[i, j] - mean[i, j]) * precision[j]
            squares += z * z
        log_prob[i] = np.float32(-0.5) * squares - constant
    surrogate(log_prob, old, advantage, share, low, high, limit, track, slope, statistics)
    total, kl = 0.0, 0.0
    grad_log_std[:] = np.float32(0.0)
    for i in range(count):
        total += share[i]
        for j in range(dims):
            if track == EXACT and share[i] > 0.0:
                gap = (old_mean[i, j] - mean[i, j]) * precision[j]
                step = old_log_std[i, j] - spread[j]
                kl += share[i] * (0.5 * (math.expm1(2.0 * step) + gap * gap) - step)
            z = (action[i, j] - mean[i, j]) * precision[j]
            grad_log_std[j] += slope[i] * (z * z - np.float32(1.0))
            mean[i, j] = slope[i] * z * precision[j]
    statistics[ENTROPY] = 0.0
    if track == EXACT:
        statistics[KL] = kl
    if bonus:
        statistics[ENTROPY] = total * (constant + 0.5 * dims)
        for j in range(dims):
            grad_log_std[j] -= np.float32(entropy_coef * total)
    for j in range(dims):
        if not free[j]:
            grad_log_std[j] = np.float32(0.0)


@vectorised
def norm_of(gradient):
    """Return the Euclidean norm of a gradient, summed in float64: NaN or ∞ if any of it is."""
    total = 0.0
    for i in range(gradient.size):
        total += np.float64(gradient[i]) * np.float64(gradient[i])
    return math.sqrt(total)


@compiled
def gather(batch, index, real, width, buffer, part):
    """Gather a minibatch: observations into `buffer`, numbers into the arrays of `part`.

    Whatever rows of weight 0 hold is wiped.
    """
    obs, log_prob, advantage, target, weight = batch
    for i in range(index.size):
        row = index[i]
        counts = weight[row] * real[i]
        for j in range(width):
            buffer[i * width + j] = obs[row, j] if counts > 0.0 else np.float32(0.0)
        part[0][i] = log_prob[row]
        part[1][i] = advantage[row] if counts > 0.0 else np.float32(0.0)
        part[2][i] = counts
        part[3][i] = target[row] if counts > 0.0 else np.float32(0.0)


@compiled
def actor_forward(params, net, batch, index, real, workspace):
    """Fetch the minibatch and run the actor; return outputs where their gradient will stand."""
    starts, sizes, _, tanh, _ = net
    buffer, slope, _, part, _, _ = workspace
    rows, outputs = index.size, sizes[-1]
    gather(batch, index, real, sizes[0], buffer, part)
    at = forward(params, starts[0], sizes, tanh, buffer, rows)
    slope[: rows * outputs] = buffer[at : at + rows * outputs]
    return slope[: rows * outputs].reshape((rows, outputs))


@compiled
def finish(params, net, value_coef, workspace):
    """Run backwards through the actor, then the critic forwards and backwards."""
    starts, actor_sizes, critic_sizes, tanh, returns = net
    buffer, slope, other, part, gradient, statistics = workspace
    rows = part[0].size
    backward(params, gradient, starts[0], actor_sizes, tanh, buffer, rows, slope, other)
    at = forward(params, starts[1], critic_sizes, tanh, buffer, rows)
    count = critic_sizes[-1]
    slope[: rows * count] = buffer[at : at + rows * count]
    raw = slope[: rows * count].reshape((rows, count))
    statistics[VALUE] = return_slope(raw, part[3], part[2], value_coef, returns)
    backward(params, gradient, starts[1], critic_sizes, tanh, buffer, rows, slope, other)
    statistics[NORM] = norm_of(gradient)


@compiled
def categorical_gradient(params, net, batch, acted, index, real, hparams, value_coef, workspace):
    """Compute the gradient of the whole objective on a minibatch, for a categorical policy.

    `net` is (starts of actor and critic, their sizes, whether tanh, the critic in numbers); `batch`
    (observations, log probs, advantages, targets, weights), all rows; `acted` (actions, old logits,
    masks or nothing); `workspace` the buffers, in which gradient and statistics are left, too.
    """
    action, old_logits, mask = acted
    logits = actor_forward(params, net, batch, index, real, workspace)
    rows, choices = logits.shape
    track = hparams[6]
    own_action = np.empty(rows, np.int64)
    before = np.empty((rows, choices), np.float32)
    legal = np.empty((rows if mask.size else 0, choices), np.bool_)
    for i in range(rows):
        own_action[i] = action[index[i]]
        for j in range(choices):
            if track == EXACT:
                before[i, j] = old_logits[index[i], j]
            if mask.size:
                legal[i, j] = mask[index[i], j]
    categorical(logits, legal, own_action, before, hparams, workspace[3], workspace[5])
    finish(params, net, value_coef, workspace)


@compiled
def gaussian_gradient(params, net, batch, acted, index, real, hparams, value_coef, workspace):
    """Compute the same for a Gaussian policy, whose log-stds are the third of `starts`."""
    action, old_mean, old_log_std, bounds = acted
    mean = actor_forward(params, net, batch, index, real, workspace)
    rows, dims = mean.shape
    track = hparams[6]
    own_action = np.empty((rows, dims), np.float32)
    before = np.empty((rows, dims), np.float32), np.empty((rows, dims), np.float32)
    for i in range(rows):
        for j in range(dims):
            own_action[i, j] = action[index[i], j]
            if track == EXACT:
                before[0][i, j] = old_mean[index[i], j]
                before[1][i, j] = old_log_std[index[i], j]
    spread = slice(net[0][2], net[0][2] + dims)
    grad_log_std = workspace[4][spread]
    gaussian(
        mean, params[spread], bounds, own_action, before, hparams, workspace[3], grad_log_std,
        workspace[5],
    )  # fmt: skip
    finish(params, net, value_coef, workspace)
