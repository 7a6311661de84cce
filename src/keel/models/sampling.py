"""Drawing actions, in numpy: at a handful of environments torch's overhead is the cost of acting.

The random stream is a `numpy.random.Generator`, whose state is plain data and can be saved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from keel.models.distributions import (
    Bernoulli,
    Categorical,
    Dist,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
)

Array = NDArray[Any]


def sample(
    dist: Dist, output: Array, mask: Array | None, temperature: float, rng: np.random.Generator
) -> Array:
    """Draw from the distribution that `dist.params(output, mask, temperature)` describes.

    `output` is `[N, K]`; the action `[N]` or `[N, D]`, pre-squash for squashed Gaussians.
    """
    if isinstance(dist, Gaussian | SquashedGaussian):
        mean, log_std = _gaussian(dist, output)
        noise = rng.standard_normal(mean.shape, dtype=np.float32)
        spread: Array = np.exp(log_std) * np.sqrt(np.float32(temperature)) * noise
        return mean + spread
    logits = _legal(output / np.float32(temperature), mask)
    if isinstance(dist, Categorical):
        return _gumbel(logits, rng)
    if isinstance(dist, MultiCategorical):
        return np.stack([_gumbel(part, rng) for part in _parts(logits, dist)], -1)
    if isinstance(dist, Bernoulli):
        uniform: Array = rng.random(logits.shape, dtype=np.float32)
        return (uniform < _sigmoid(logits)).astype(np.int64)
    raise TypeError(f"no sampler for {type(dist).__name__}")


def mode(dist: Dist, output: Array, mask: Array | None) -> Array:
    """The likeliest action."""
    if isinstance(dist, Gaussian | SquashedGaussian):
        return _gaussian(dist, output)[0]
    logits = _legal(output, mask)
    if isinstance(dist, Categorical):
        return np.asarray(logits.argmax(-1))
    if isinstance(dist, MultiCategorical):
        return np.stack([part.argmax(-1) for part in _parts(logits, dist)], -1)
    return (logits > 0).astype(np.int64)


def to_env(dist: Dist, action: Array) -> Array:
    """The stored action as the environment takes it; clipping to bounds is the environment's."""
    if isinstance(dist, SquashedGaussian):
        low, high = (np.array(x, dtype=np.float32) for x in (dist.low, dist.high))
        return low + (high - low) * np.float32(0.5) * (np.tanh(action) + np.float32(1.0))
    return action


def _gaussian(dist: Gaussian | SquashedGaussian, output: Array) -> tuple[Array, Array]:
    base = dist if isinstance(dist, Gaussian) else dist.base
    return output[..., : base.dim], output[..., base.dim :].clip(*base.log_std_bounds)


def _legal(logits: Array, mask: Array | None) -> Array:
    return logits if mask is None else np.where(mask, logits, -np.inf)


def _parts(logits: Array, dist: MultiCategorical) -> list[Array]:
    return np.split(logits, np.cumsum(dist.sizes)[:-1], -1)


def _gumbel(logits: Array, rng: np.random.Generator) -> Array:
    """argmax(logits − log(−log u)), u ∈ (0, 1]: a draw from softmax(logits), unnormalised."""
    exponential: Array = rng.standard_exponential(logits.shape, dtype=np.float32)
    return np.asarray((logits - np.log(np.maximum(exponential, np.float32(1e-30)))).argmax(-1))


def _sigmoid(x: Array) -> Array:
    return np.float32(1.0) / (np.float32(1.0) + np.exp(-x))
