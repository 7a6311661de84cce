"""Action distributions of several choices, and the squashed Gaussian."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from keel.distributions.actions import Array, Dist, Gaussian, Logits, legal_logits
from keel.functional.divergence import (
    bernoulli_fisher,
    bernoulli_kl,
    categorical_entropy,
    categorical_fisher,
    multi_categorical_kl,
)
from keel.types import Tree

INNER = np.float32(0.999)
"""Largest |tanh| of an action from outside: at its bounds, tanh has no inverse."""


@dataclass(frozen=True)
class MultiCategorical(Logits):
    """Several independent choices, action `[*lead, len(sizes)]`."""

    sizes: tuple[int, ...]
    exact: bool = True
    exact_entropy: bool = True

    @property
    def outputs(self) -> int:
        """Number of logits of all choices."""
        return sum(self.sizes)

    def _parts(self, logits: Tensor) -> tuple[Tensor, ...]:
        return torch.split(logits, list(self.sizes), -1)

    def log_prob(self, params: Tree, action: Tensor) -> Tensor:
        """Return the sum of log π over the choices."""
        parts = [
            part.log_softmax(-1).gather(-1, action[..., i : i + 1].long())
            for i, part in enumerate(self._parts(params["logits"]))
        ]
        return torch.cat(parts, -1).sum(-1)

    def entropy(self, params: Tree) -> Tensor:
        """Return the sum of entropies over the choices."""
        parts = [categorical_entropy(part) for part in self._parts(params["logits"])]
        return torch.stack(parts).sum(0)

    def kl(self, p: Tree, q: Tree) -> Tensor:
        """Return the sum of KLs over the choices."""
        return multi_categorical_kl(p["logits"], q["logits"], self.sizes)

    def fisher(self, params: Tree, tangent: Tree) -> Tree:
        """Multiply by the block-diagonal Fisher matrix: one block per choice."""
        blocks = [
            categorical_fisher(logits, part, logits > -torch.inf)
            for logits, part in zip(
                self._parts(params["logits"]), self._parts(tangent["logits"]), strict=True
            )
        ]
        return {"logits": torch.cat(blocks, -1)}

    def sample(self, output: Array, mask: Array | None, temperature: float, noise: Array) -> Array:
        """Draw actions, `[N, len(sizes)]`."""
        return self._likeliest(legal_logits(output, mask, temperature) + noise)

    def mode(self, output: Array, mask: Array | None) -> Array:
        """Return the likeliest actions, `[N, len(sizes)]`."""
        return self._likeliest(legal_logits(output, mask))

    def _likeliest(self, logits: Array) -> Array:
        parts = np.split(logits, np.cumsum(self.sizes)[:-1], -1)
        return np.stack([part.argmax(-1) for part in parts], -1)


@dataclass(frozen=True)
class Bernoulli(Logits):
    """`n` independent switches, action `[*lead, n]` of 0 and 1; a masked one stays off."""

    n: int
    exact: bool = True
    exact_entropy: bool = True

    @property
    def outputs(self) -> int:
        """Number of logits: one per switch."""
        return self.n

    def log_prob(self, params: Tree, action: Tensor) -> Tensor:
        """Return the sum of log π over the switches."""
        logits = params["logits"]
        chosen = torch.where(action.bool(), logits, -logits)
        return F.logsigmoid(chosen).sum(-1)

    def entropy(self, params: Tree) -> Tensor:
        """Return the sum of entropies over the switches; 0 for a masked one."""
        logits = params["logits"]
        safe = torch.where(logits > -torch.inf, logits, -1e4)
        p = safe.sigmoid()
        return -(p * F.logsigmoid(safe) + (1.0 - p) * F.logsigmoid(-safe)).sum(-1)

    def kl(self, p: Tree, q: Tree) -> Tensor:
        """Return the sum of KLs over the switches."""
        return bernoulli_kl(p["logits"], q["logits"])

    def fisher(self, params: Tree, tangent: Tree) -> Tree:
        """Multiply by the diagonal Fisher matrix."""
        return {"logits": bernoulli_fisher(params["logits"], tangent["logits"])}

    def noise(self, lead: tuple[int, ...], rng: np.random.Generator) -> Array:
        """Draw uniform numbers."""
        return rng.random((*lead, self.n), dtype=np.float32)

    def sample(self, output: Array, mask: Array | None, temperature: float, noise: Array) -> Array:
        """Draw actions, `[N, n]`."""
        logits = legal_logits(output, mask, temperature)
        chance = np.float32(1.0) / (np.float32(1.0) + np.exp(-logits))
        return (noise < chance).astype(np.int64)

    def mode(self, output: Array, mask: Array | None) -> Array:
        """Return the likeliest actions, `[N, n]`."""
        return (legal_logits(output, mask) > 0).astype(np.int64)


@dataclass(frozen=True)
class SquashedGaussian(Dist):
    """tanh of a Gaussian, stretched to [low, high]; the pre-squash action is what is stored.

    KL, log-ratio and Fisher matrix are those of the Gaussian: a bijection changes none of them. The
    entropy is not, so it is estimated as that of the Gaussian plus the log-Jacobian at the mean.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    exact: bool = True
    exact_entropy: bool = False

    @property
    def base(self) -> Gaussian:
        """Distribution before squashing."""
        return Gaussian(len(self.low))

    @property
    def outputs(self) -> int:
        """Number of means and log-stds."""
        return self.base.outputs

    @property
    def log_stds(self) -> int:
        """Number of log-stds."""
        return self.base.dim

    def params(self, output: Tensor, mask: Tensor | None, temperature: float | Tensor) -> Tree:
        """Return mean and log-std of the Gaussian."""
        return self.base.params(output, mask, temperature)

    def log_prob(self, params: Tree, action: Tensor) -> Tensor:
        """Return log π of the stored action; the log-Jacobian cancels in every ratio."""
        return self.base.log_prob(params, action)

    def entropy(self, params: Tree) -> Tensor:
        """Return H(Gaussian) + Σ log(1 − tanh²(mean)): first order in the spread."""
        mean = params["mean"]
        jacobian = 2.0 * (math.log(2.0) - mean - F.softplus(-2.0 * mean))
        return self.base.entropy(params) + jacobian.sum(-1)

    def kl(self, p: Tree, q: Tree) -> Tensor:
        """Return the exact KL, which does not change under a bijection."""
        return self.base.kl(p, q)

    def fisher(self, params: Tree, tangent: Tree) -> Tree:
        """Multiply by the Fisher matrix of the Gaussian."""
        return self.base.fisher(params, tangent)

    def noise(self, lead: tuple[int, ...], rng: np.random.Generator) -> Array:
        """Draw standard normal numbers."""
        return self.base.noise(lead, rng)

    def sample(self, output: Array, mask: Array | None, temperature: float, noise: Array) -> Array:
        """Draw actions before they are squashed, `[N, D]`."""
        return self.base.sample(output, mask, temperature, noise)

    def mode(self, output: Array, mask: Array | None) -> Array:
        """Return the means, `[N, D]`."""
        return self.base.mode(output, mask)

    def to_env(self, action: Array) -> Array:
        """Squash to [low, high]."""
        low, high = (np.array(x, dtype=np.float32) for x in (self.low, self.high))
        return low + (high - low) * np.float32(0.5) * (np.tanh(action) + np.float32(1.0))

    def from_env(self, action: Array) -> Array:
        """Return the action before it is squashed."""
        low, high = (np.array(x, dtype=np.float32) for x in (self.low, self.high))
        inside = np.float32(2.0) * (action - low) / (high - low) - np.float32(1.0)
        return np.arctanh(np.clip(inside, -INNER, INNER)).astype(np.float32)
