"""Behavior cloning's part of the optimizer step, by the loops of `kernels`.

It comes after `categorical_gradient` or `gaussian_gradient` and adds to what they left: it works in
the same workspace, with a gradient of its own.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import math

import numpy as np

from keel.distributions.actions import LOG_2PI
from keel.kernels import compiled
from keel.kernels.mlp import CLONED, NORM, actor_forward, backward, log_softmax, norm_of


@compiled
def add_categorical(params, net, demos, acted, index, real, hparams, coef, workspace, gradient):
    """Add the gradient of −coef · mean weight · log π of a categorical policy to `gradient`.

    `demos` is what `gather` takes, with the weights last; `acted` (actions, masks or nothing).
    """
    action, mask = acted
    temperature = np.float32(hparams[3])
    logits = actor_forward(params, net, demos, index, real, workspace)
    rows, choices = logits.shape
    weight = workspace[3][2]
    total, loss = count_of(real), 0.0
    for i in range(rows):
        demo_action = action[index[i]]
        for j in range(choices):
            logits[i, j] /= temperature
            if mask.size and not mask[index[i], j]:
                logits[i, j] = -np.inf
        log_softmax(logits[i], logits[i])
        share = weight[i] / total
        if share > 0.0:
            loss -= share * logits[i, demo_action]
        slope = np.float32(coef * share) / temperature
        for j in range(choices):
            p = np.float32(math.exp(logits[i, j]))
            logits[i, j] = slope * (p - np.float32(1.0)) if j == demo_action else slope * p
    add_actor(params, net, workspace, gradient, loss)


@compiled
def add_gaussian(params, net, demos, acted, index, real, hparams, coef, workspace, gradient):
    """Add the same for a Gaussian policy, whose log-stds are the third of `starts`."""
    action, bounds = acted
    mean = actor_forward(params, net, demos, index, real, workspace)
    rows, dims = mean.shape
    weight = workspace[3][2]
    start = net[0][2]
    total, loss = count_of(real), 0.0
    heat = np.float32(0.5 * math.log(hparams[3]))
    for j in range(dims):
        raw = params[start + j]
        bounded = min(max(raw, bounds[0]), bounds[1])
        spread = bounded + heat
        precision = np.float32(math.exp(-spread))
        grad_log_std = np.float32(0.0)
        for i in range(rows):
            z = (action[index[i], j] - mean[i, j]) * precision
            share = weight[i] / total
            loss += share * (0.5 * z * z + spread + 0.5 * LOG_2PI)
            slope = np.float32(coef * share)
            grad_log_std += slope * (np.float32(1.0) - z * z)
            mean[i, j] = -slope * z * precision
        if bounded == raw:  # a bound that holds has no gradient
            gradient[start + j] += grad_log_std
    add_actor(params, net, workspace, gradient, loss)


@compiled
def count_of(real):
    """Return how many rows are no padding; at least 1."""
    total = 0.0
    for i in range(real.size):
        total += real[i]
    return max(total, 1.0)


@compiled
def add_actor(params, net, workspace, gradient, loss):
    """Run backwards through the actor, and add the result to the gradient of the step."""
    starts, sizes, _, tanh, _ = net
    buffer, slope, other, part, own, statistics = workspace
    backward(params, own, starts[0], sizes, tanh, buffer, part[0].size, slope, other)
    size = 0
    for layer in range(1, sizes.size):
        size += sizes[layer] * (sizes[layer - 1] + 1)
    for i in range(starts[0], starts[0] + size):
        gradient[i] += own[i]
    statistics[CLONED] = loss
    statistics[NORM] = norm_of(gradient)
