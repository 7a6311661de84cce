"""Behaviour cloning's part of the optimizer step, by the loops of `kernels`.

It comes after `categorical_gradient` or `gaussian_gradient` and adds to what they left: it works in
the same room, with a gradient of its own on its desk.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import math

import numpy as np

from keel.models.compiling import compiled
from keel.models.distributions import LOG_2PI
from keel.models.kernels import CLONED, NORM, actor_forward, backward, log_softmax, norm_of


@compiled
def add_categorical(params, net, shown, acted, index, real, dials, coef, desk, gradient):
    """−coef · mean weight · log π of a categorical policy: its gradient onto `gradient`.

    `shown` is what `gather` takes, with the weights last; `acted` (actions, masks or nothing).
    """
    action, mask = acted
    temperature = np.float32(dials[3])
    logits = actor_forward(params, net, shown, index, real, desk)
    rows, choices = logits.shape
    weight = desk[3][2]
    total, loss = count_of(real), 0.0
    for i in range(rows):
        taken = action[index[i]]
        for j in range(choices):
            logits[i, j] /= temperature
            if mask.size and not mask[index[i], j]:
                logits[i, j] = -np.inf
        log_softmax(logits[i], logits[i])
        share = weight[i] / total
        if share > 0.0:
            loss -= share * logits[i, taken]
        slope = np.float32(coef * share) / temperature
        for j in range(choices):
            p = np.float32(math.exp(logits[i, j]))
            logits[i, j] = slope * (p - np.float32(1.0)) if j == taken else slope * p
    add_actor(params, net, desk, gradient, loss)


@compiled
def add_gaussian(params, net, shown, acted, index, real, dials, coef, desk, gradient):
    """The same for a Gaussian policy, whose log-stds are the third of `starts`."""
    action, bounds = acted
    mean = actor_forward(params, net, shown, index, real, desk)
    rows, dims = mean.shape
    weight = desk[3][2]
    start = net[0][2]
    total, loss = count_of(real), 0.0
    heat = np.float32(0.5 * math.log(dials[3]))
    for j in range(dims):
        raw = params[start + j]
        bounded = min(max(raw, bounds[0]), bounds[1])
        spread = bounded + heat
        precision = np.float32(math.exp(-spread))
        by_log_std = np.float32(0.0)
        for i in range(rows):
            z = (action[index[i], j] - mean[i, j]) * precision
            share = weight[i] / total
            loss += share * (0.5 * z * z + spread + 0.5 * LOG_2PI)
            slope = np.float32(coef * share)
            by_log_std += slope * (np.float32(1.0) - z * z)
            mean[i, j] = -slope * z * precision
        if bounded == raw:  # a bound that holds has no gradient
            gradient[start + j] += by_log_std
    add_actor(params, net, desk, gradient, loss)


@compiled
def count_of(real):
    """How many rows are no padding; at least 1."""
    total = 0.0
    for i in range(real.size):
        total += real[i]
    return max(total, 1.0)


@compiled
def add_actor(params, net, desk, gradient, loss):
    """Backwards through the actor, and what was found onto the gradient of the step."""
    starts, sizes, _, tanh, _ = net
    room, slope, other, part, own, statistics = desk
    backward(params, own, starts[0], sizes, tanh, room, part[0].size, slope, other)
    size = 0
    for layer in range(1, sizes.size):
        size += sizes[layer] * (sizes[layer - 1] + 1)
    for i in range(starts[0], starts[0] + size):
        gradient[i] += own[i]
    statistics[CLONED] = loss
    statistics[NORM] = norm_of(gradient)
