"""Drawing actions, in numpy: at a handful of environments torch's overhead is the cost of acting.

The random stream is a `numpy.random.Generator`, whose state is plain data and can be saved.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keel.distributions.actions import (
    Bernoulli,
    Categorical,
    Dist,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
)

Array = NDArray[Any]


def draw_noise(dist: Dist, lead: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Draw the noise that `sample` needs for `lead` draws: in one call it costs a fifth."""
    if isinstance(dist, Gaussian | SquashedGaussian):
        return rng.standard_normal((*lead, dist.outputs // 2), dtype=np.float32)
    if isinstance(dist, Bernoulli):
        return rng.random((*lead, dist.n), dtype=np.float32)
    # Gumbel: the argmax of logits + noise is a draw from their softmax
    noise = rng.standard_exponential((*lead, dist.outputs), dtype=np.float32)
    np.maximum(noise, np.float32(1e-30), out=noise)
    return np.negative(np.log(noise, out=noise), out=noise)


def sample(
    dist: Dist, output: Array, mask: Array | None, temperature: float, noise: Array
) -> Array:
    """Draw from the distribution that `dist.params(output, mask, temperature)` describes.

    Args:
        dist: the distribution.
        output: `[N, K]`, outputs of the network.
        mask: `[N, K]`, true for legal outcomes; None for all.
        temperature: of the policy.
        noise: of `draw_noise`.

    Returns:
        The action `[N]` or `[N, D]`, pre-squash for squashed Gaussians.
    """
    if isinstance(dist, Gaussian | SquashedGaussian):
        mean, log_std = _gaussian(dist, output)
        spread = np.exp(log_std)
        spread *= noise
        if temperature != 1.0:
            spread *= math.sqrt(temperature)
        spread += mean
        return spread
    logits = output if temperature == 1.0 else output / np.float32(temperature)
    logits = _legal(logits, mask)
    if isinstance(dist, Categorical):
        return np.asarray((logits + noise).argmax(-1))
    if isinstance(dist, MultiCategorical):
        return np.stack([part.argmax(-1) for part in _parts(logits + noise, dist)], -1)
    if isinstance(dist, Bernoulli):
        return (noise < _sigmoid(logits)).astype(np.int64)
    raise TypeError(f"no sampler for {type(dist).__name__}")


def mode(dist: Dist, output: Array, mask: Array | None) -> Array:
    """Return the likeliest action, `[N]` or `[N, D]`."""
    if isinstance(dist, Gaussian | SquashedGaussian):
        return _gaussian(dist, output)[0]
    logits = _legal(output, mask)
    if isinstance(dist, Categorical):
        return np.asarray(logits.argmax(-1))
    if isinstance(dist, MultiCategorical):
        return np.stack([part.argmax(-1) for part in _parts(logits, dist)], -1)
    return (logits > 0).astype(np.int64)


def to_env(dist: Dist, action: Array) -> Array:
    """Convert the stored action to the environment's; clipping to bounds is left to it."""
    if isinstance(dist, SquashedGaussian):
        low, high = (np.array(x, dtype=np.float32) for x in (dist.low, dist.high))
        return low + (high - low) * np.float32(0.5) * (np.tanh(action) + np.float32(1.0))
    return action


INNER = np.float32(0.999)
"""Largest |tanh| of an action from outside: at its bounds, tanh has no inverse."""


def from_env(dist: Dist, action: Array) -> Array:
    """Convert an environment's action to that of the distribution: the inverse of `to_env`."""
    if isinstance(dist, SquashedGaussian):
        low, high = (np.array(x, dtype=np.float32) for x in (dist.low, dist.high))
        inside = np.float32(2.0) * (action - low) / (high - low) - np.float32(1.0)
        return np.arctanh(np.clip(inside, -INNER, INNER)).astype(np.float32)
    return action


def _gaussian(dist: Gaussian | SquashedGaussian, output: Array) -> tuple[Array, Array]:
    base = dist if isinstance(dist, Gaussian) else dist.base
    low, high = base.log_std_bounds
    log_std = np.maximum(output[..., base.dim :], np.float32(low))
    return output[..., : base.dim], np.minimum(log_std, np.float32(high), out=log_std)


def _legal(logits: Array, mask: Array | None) -> Array:
    return logits if mask is None else np.where(mask, logits, -np.inf)


def _parts(logits: Array, dist: MultiCategorical) -> list[Array]:
    return np.split(logits, np.cumsum(dist.sizes)[:-1], -1)


def _sigmoid(x: Array) -> Array:
    return np.float32(1.0) / (np.float32(1.0) + np.exp(-x))
