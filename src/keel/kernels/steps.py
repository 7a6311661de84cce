"""Parts of optimizer steps that several kernels call, compiled by numba: Adam, and the losses of
critics (`keel.networks.critics`) with their gradients.

`raw` `[rows, Q]` is what the critic gave, and is overwritten by the gradient there.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import math

import numpy as np

from keel.functional.value import HL_GAUSS_WIDTH, ORDERED_SPREAD
from keel.kernels import compiled, vectorised

SCALAR, QUANTILE, ORDERED, TWO_HOT, HL_GAUSS = range(5)
FAR = 5.0
"""Standard deviations from its centre at which single precision has nothing left of a Gaussian."""


@compiled
def return_slope(raw, target, share, coefficient, returns):
    """Return the mean loss over rows by `share`; rows of share 0 have neither loss nor gradient."""
    kind, kappa, reach = returns
    rows, outputs = raw.shape
    loss = 0.0
    spare = np.empty(outputs, np.float32)
    for i in range(rows):
        if not share[i] > 0.0:
            raw[i] = np.float32(0.0)
            continue
        weight = np.float32(coefficient) * share[i]
        if kind == SCALAR:
            error = raw[i, 0] - target[i]
            loss += 0.5 * share[i] * error * error
            raw[i, 0] = weight * error
        elif kind == QUANTILE:
            loss += share[i] * quantile_row(raw[i], target[i], kappa, weight)
        elif kind == ORDERED:
            loss += share[i] * ordered_row(raw[i], target[i], kappa, weight, spare)
        else:
            encode(target[i], reach, kind == HL_GAUSS, spare)
            loss += share[i] * histogram_row(raw[i], spare, weight)
    return loss


@compiled
def quantile_row(q, target, kappa, weight):
    """Compute the quantile Huber loss (`functional.value.quantile_huber`) of one row."""
    count = q.size
    loss = 0.0
    for j in range(count):
        error = target - q[j]
        level = (j + 0.5) / count
        tilt = 1.0 - level if error < 0.0 else level
        size = abs(error)
        if size <= kappa and kappa > 0.0:  # κ = 0 has no square part, not even at 0
            loss += tilt * 0.5 * size * size / kappa
            slope = error / kappa
        else:
            loss += tilt * (size - 0.5 * kappa)
            slope = 1.0 if error > 0.0 else -1.0
        q[j] = -weight * np.float32(tilt * slope / count)
    return loss / count


@compiled
def ordered_row(raw, target, kappa, weight, q):
    """Compute the same of quantiles made of their mean and the steps between them."""
    count = raw.size
    unit = ORDERED_SPREAD / count
    height, mean = 0.0, 0.0
    q[0] = np.float32(0.0)
    for j in range(1, count):
        x = raw[j]
        height += unit * (x + math.log1p(math.exp(-x)) if x > 0.0 else math.log1p(math.exp(x)))
        q[j] = height
        mean += height
    mean /= count
    for j in range(count):
        q[j] += raw[0] - np.float32(mean)
    loss = quantile_row(q, target, kappa, weight)
    total = 0.0
    for j in range(count):
        total += q[j]
    after = total  # Σ of the slopes from j on
    raw[0] = total
    for j in range(1, count):
        after -= q[j - 1]
        by_step = after - total * (count - j) / count
        raw[j] = by_step * unit / (1.0 + math.exp(-raw[j]))
    return loss


@compiled
def encode(target, reach, gaussian, aim):
    """Encode a target as probabilities of evenly spaced atoms (`two_hot`, `hl_gauss`)."""
    count = aim.size
    step = 2.0 * reach / (count - 1)
    inside = min(max(target, -reach), reach)
    position = (inside + reach) / step
    aim[:] = np.float32(0.0)
    if not gaussian:
        low = min(int(position), count - 2)
        aim[low] = 1.0 - (position - low)
        aim[low + 1] = position - low
        return
    first = max(0, int(position - FAR * HL_GAUSS_WIDTH))
    last = min(count - 1, int(position + FAR * HL_GAUSS_WIDTH) + 1)
    root = HL_GAUSS_WIDTH * math.sqrt(2.0)
    total = 0.0
    before = math.erf((first - 0.5 - position) / root)
    for j in range(first, last + 1):
        after = math.erf((j + 0.5 - position) / root)
        aim[j] = after - before
        total += after - before
        before = after
    for j in range(first, last + 1):
        aim[j] /= np.float32(total)


@compiled
def histogram_row(raw, aim, weight):
    """Compute the cross-entropy of one row; its gradient at the logits is softmax − aim."""
    count = raw.size
    largest = raw[0]
    for j in range(1, count):
        largest = max(largest, raw[j])
    total = 0.0
    for j in range(count):
        total += math.exp(raw[j] - largest)
    shift = largest + math.log(total)
    loss = 0.0
    for j in range(count):
        log_p = raw[j] - shift
        if aim[j] > 0.0:
            loss -= aim[j] * log_p
        raw[j] = weight * (np.float32(math.exp(log_p)) - aim[j])
    return loss


@vectorised
def adam(params, first, second, gradient, scale, rates, betas, epsilon, split, ages, moved):
    """Apply Adam to `params`, `first`, `second`; the results are the three rows of `moved`.

    `split` `[P]` says whose learning rate (`rates` `[2]`) and age count, the policy's (True) or the
    critic's.
    """
    beta1, beta2 = np.float32(betas[0]), np.float32(betas[1])
    rest1, rest2 = np.float32(1.0 - betas[0]), np.float32(1.0 - betas[1])
    steps = np.empty(2, np.float32)
    unbias = np.empty(2, np.float32)
    for k in range(2):
        steps[k] = -rates[k] / (1.0 - betas[0] ** ages[k])
        unbias[k] = 1.0 / math.sqrt(1.0 - betas[1] ** ages[k])
    small, clip = np.float32(epsilon), np.float32(scale)
    for i in range(params.size):
        g = gradient[i] * clip
        m = beta1 * first[i] + rest1 * g
        v = beta2 * second[i] + rest2 * (g * g)
        k = 0 if split[i] else 1
        moved[0, i] = params[i] + steps[k] * m / (np.sqrt(v) * unbias[k] + small)
        moved[1, i] = m
        moved[2, i] = v
