"""Adam on flat arrays, compiled by numba as `keel.kernels.mlp` is."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import numpy as np

from keel.kernels.compiling import vectorised


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
