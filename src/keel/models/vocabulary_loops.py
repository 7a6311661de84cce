"""Two distributions over a small vocabulary beside each other on the CPU, compiled by numba.

What `keel.functional.vocabulary_comparison` says, to which a test holds it: a certificate is one
pass of the model and this, and in torch's operations, thirty passes over all logits, this took a
sixth of it.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from keel.models import compiling, pass_loops
from keel.models.decoding_loops import HALF, ONE, ZERO, exponentials
from keel.models.pass_loops import largest

SOURCES = (Path(__file__), *pass_loops.SOURCES)
vectorised = compiling.keeping(SOURCES, fastmath={"reassoc", "contract"})

BLOCK = 256
"""Rows whose logits are there at a time."""
SERIES = tuple(np.float32(1.0 / k) for k in range(11, 2, -1))


@vectorised
def log_softmax(z, chance, bits):
    """In place; `chance` becomes its exponential. The entropy."""
    top = largest(z)
    for j in range(z.size):
        z[j] -= top
        chance[j] = z[j]
    exponentials(chance, bits, bits.view(np.float32))
    total = ZERO
    for j in range(z.size):
        total += chance[j]
    whole, factor = np.float32(math.log(total)), ONE / total
    entropy = ZERO
    for j in range(z.size):
        z[j] -= whole
        chance[j] *= factor
        entropy -= chance[j] * z[j]
    return entropy


@vectorised
def divergence(log_p, p, log_q, q):
    """KL(p‖q) = Σ p·φ(log q − log p) with φ(x) = eˣ − 1 − x ≥ 0, near 0 by its series, so that tiny
    ones keep their digits (`keel.functional.divergence`)."""
    total = ZERO
    for j in range(p.size):
        gap = log_q[j] - log_p[j]
        near = min(max(gap, -ONE), ONE)
        series = near * SERIES[0] + ONE
        series = series * near * SERIES[1] + ONE
        series = series * near * SERIES[2] + ONE
        series = series * near * SERIES[3] + ONE
        series = series * near * SERIES[4] + ONE
        series = series * near * SERIES[5] + ONE
        series = series * near * SERIES[6] + ONE
        series = series * near * SERIES[7] + ONE
        series = series * near * SERIES[8] + ONE
        narrow = p[j] * (HALF * near * near * series)
        wide = q[j] - p[j] - p[j] * gap
        total += narrow if near == gap else wide
    return total


@vectorised
def comparison(p_hidden, p_head, q_hidden, q_head, tokens, out):
    """KL(p‖q), KL(q‖p), log q(token) and the entropy of q into the rows of `out` `[4, N]`."""
    size = p_head.shape[0]
    bits = np.empty(size, np.int32)
    p, q = np.empty(size, np.float32), np.empty(size, np.float32)
    for begin in range(0, tokens.size, BLOCK):
        end = min(begin + BLOCK, tokens.size)
        of_p = np.dot(p_hidden[begin:end], p_head.T)
        of_q = np.dot(q_hidden[begin:end], q_head.T)
        for i in range(end - begin):
            log_p, log_q = of_p[i], of_q[i]
            log_softmax(log_p, p, bits)
            at = begin + i
            out[3, at] = log_softmax(log_q, q, bits)
            out[0, at] = divergence(log_p, p, log_q, q)
            out[1, at] = divergence(log_q, q, log_p, p)
            out[2, at] = log_q[tokens[at]]
