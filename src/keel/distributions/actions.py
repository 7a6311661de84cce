"""Action distributions: static, hashable, pure. One per action space; parameters are arguments.

What is learned from is torch, drawing is numpy; the random stream is a `numpy.random.Generator`,
whose state is plain data and can be saved. `keel.distributions.composed` has those of several
choices and the squashed one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keel.errors import ShapeError
from keel.functional.divergence import (
    categorical_entropy,
    categorical_fisher,
    categorical_kl,
    gaussian_fisher,
    gaussian_kl,
)
from keel.types import Tree

Array = NDArray[Any]
LOG_2PI = math.log(2.0 * math.pi)


class Dist(Protocol):
    """A distribution over actions, given by a policy's outputs; `params` are trees `[*lead, K]`.

    A class of your own inherits from this one, and says `outputs`, `params`, `log_prob`, `entropy`,
    `kl`, `sample` and `mode`; the rest has defaults.
    """

    exact: bool = True
    """whether `kl` has a closed form; certification refuses where it has none"""
    exact_entropy: bool = True
    """whether `entropy` has a closed form, or is an estimate"""
    constants: tuple[str, ...] = ()
    """names of parameters that are the same for all rows"""

    @property
    def outputs(self) -> int:
        """Number of outputs that the network must give."""

    @property
    def log_stds(self) -> int:
        """How many of the outputs, the last, are log-stds: unless `network.state_std` is set, these
        are parameters of their own, which do not see the observation."""
        return 0

    def params(self, output: Tensor, mask: Tensor | None, temperature: float | Tensor) -> Tree:
        """Return the parameters from the network's `output`, with mask and temperature in.

        Args:
            output: Output of the network, `[*lead, K]`.
            mask: bool: legal choices; None: all.
            temperature: Divisor of the logits.
        """

    def log_prob(self, params: Tree, action: Tensor) -> Tensor:
        """Return log π of actions, `[*lead]`.

        Args:
            params: Parameters, as `params` returns them.
            action: Actions, `[*lead]` or `[*lead, D]`.
        """

    def entropy(self, params: Tree) -> Tensor:
        """Return the entropy in nats, `[*lead]`."""

    def kl(self, p: Tree, q: Tree) -> Tensor:
        """Return KL(p‖q) in nats, `[*lead]`.

        Args:
            p: Parameters of the first distribution.
            q: Parameters of the second.
        """

    def compare(self, p: Tree, q: Tree, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return KL(p‖q), KL(q‖p), and log-prob and entropy of q, `[*lead]` each."""
        return self.kl(p, q), self.kl(q, p), self.log_prob(q, action), self.entropy(q)

    def fisher(self, params: Tree, tangent: Tree) -> Tree:
        """Multiply `tangent` by the Fisher matrix at `params`: by default KL's second derivative.

        Args:
            params: Parameters.
            tangent: Tangent of the parameters, of their shapes.
        """

        def slope(q: Tree) -> Tree:
            gradient: Tree = torch.func.grad(lambda q: self.kl(params, q).sum())(q)
            return gradient

        product: Tree = torch.func.jvp(slope, (params,), (tangent,))[1]
        return product

    def noise(self, lead: tuple[int, ...], rng: np.random.Generator) -> Array:
        """Draw what `sample` needs for `lead` draws, `[*lead, …]`: in one call it costs a fifth.

        By default seeds: `np.random.default_rng(noise.reshape(-1))` gives `sample` a generator.
        """
        return rng.integers(1 << 32, size=lead)

    def sample(self, output: Array, mask: Array | None, temperature: float, noise: Array) -> Array:
        """Draw from the distribution that `params(output, mask, temperature)` describes.

        In numpy: at a handful of environments torch's overhead is the cost of acting.

        Args:
            output: `[N, K]`, outputs of the network.
            mask: `[N, K]`, true for legal outcomes; None for all.
            temperature: of the policy.
            noise: of `noise`.

        Returns:
            The action `[N]` or `[N, D]`, as `log_prob` takes it.
        """
        raise TypeError(f"no sampler for {type(self).__name__}")

    def mode(self, output: Array, mask: Array | None) -> Array:
        """Return the likeliest action, `[N]` or `[N, D]`."""
        raise TypeError(f"no sampler for {type(self).__name__}")

    def to_env(self, action: Array) -> Array:
        """Convert the stored action to the environment's; clipping to bounds is left to it."""
        return action

    def from_env(self, action: Array) -> Array:
        """Convert an environment's action to that of the distribution: the inverse of `to_env`."""
        return action


def legal_logits(output: Array, mask: Array | None, temperature: float = 1.0) -> Array:
    """Return logits at a temperature, −inf where illegal."""
    logits = output if temperature == 1.0 else output / np.float32(temperature)
    return logits if mask is None else np.where(mask, logits, -np.inf)


class Logits(Dist):
    """Choices by logits; illegal outcomes are at −inf: no mass there, and no gradient."""

    def params(self, output: Tensor, mask: Tensor | None, temperature: float | Tensor) -> Tree:
        """Return logits at a temperature, −inf where illegal."""
        logits = output / temperature
        if mask is None:
            return {"logits": logits}
        if mask.shape != logits.shape:
            raise ShapeError(
                f"action_mask: expected shape {list(logits.shape)} (one entry per action), "
                f"got {list(mask.shape)}"
            )
        return {"logits": logits.masked_fill(~mask.bool(), -torch.inf)}

    def noise(self, lead: tuple[int, ...], rng: np.random.Generator) -> Array:
        """Draw Gumbel noise: the argmax of logits + noise is a draw from their softmax."""
        noise = rng.standard_exponential((*lead, self.outputs), dtype=np.float32)
        np.maximum(noise, np.float32(1e-30), out=noise)
        return np.negative(np.log(noise, out=noise), out=noise)


@dataclass(frozen=True)
class Categorical(Logits):
    """A choice among `n` actions, some of which a mask may rule out."""

    n: int
    exact: bool = True
    exact_entropy: bool = True

    @property
    def outputs(self) -> int:
        """Number of logits: one per action."""
        return self.n

    def log_prob(self, params: Tree, action: Tensor) -> Tensor:
        """Return log π of integer actions `[*lead]`."""
        log_p = params["logits"].log_softmax(-1)
        return log_p.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self, params: Tree) -> Tensor:
        """Return the entropy over the legal actions."""
        return categorical_entropy(params["logits"])

    def kl(self, p: Tree, q: Tree) -> Tensor:
        """Return the exact KL; infinite where q rules out what p allows."""
        return categorical_kl(p["logits"], q["logits"])

    def fisher(self, params: Tree, tangent: Tree) -> Tree:
        """Multiply by the Fisher matrix; illegal actions carry nothing."""
        logits = params["logits"]
        return {"logits": categorical_fisher(logits, tangent["logits"], logits > -torch.inf)}

    def sample(self, output: Array, mask: Array | None, temperature: float, noise: Array) -> Array:
        """Draw actions `[N]`."""
        return np.asarray((legal_logits(output, mask, temperature) + noise).argmax(-1))

    def mode(self, output: Array, mask: Array | None) -> Array:
        """Return the likeliest actions, `[N]`."""
        return np.asarray(legal_logits(output, mask).argmax(-1))


@dataclass(frozen=True)
class Gaussian(Dist):
    """A diagonal Gaussian of `dim` dimensions; the environment clips it to its bounds.

    `state_dependent` log-stds come from the network, else from one parameter vector (the network
    gives both side by side either way). The KL is that of the unclipped Gaussians: exact for them,
    and an upper bound for the clipped actions.
    """

    dim: int
    log_std_bounds: tuple[float, float] = (-20.0, 2.0)
    exact: bool = True
    exact_entropy: bool = True

    @property
    def outputs(self) -> int:
        """Number of means and log-stds."""
        return 2 * self.dim

    @property
    def log_stds(self) -> int:
        """Number of log-stds."""
        return self.dim

    def params(self, output: Tensor, mask: Tensor | None, temperature: float | Tensor) -> Tree:
        """Return mean and log-std; a temperature widens the deviation by its square root."""
        if mask is not None:
            raise ShapeError("action_mask: a Gaussian has no outcomes to rule out")
        mean, log_std = torch.split(output, [self.dim, self.dim], -1)
        heat = torch.as_tensor(temperature, dtype=output.dtype, device=output.device)
        return {"mean": mean, "log_std": log_std.clamp(*self.log_std_bounds) + 0.5 * heat.log()}

    def log_prob(self, params: Tree, action: Tensor) -> Tensor:
        """Return the sum of log π over the dimensions."""
        z = (action - params["mean"]) * torch.exp(-params["log_std"])
        return (-0.5 * (z * z + LOG_2PI) - params["log_std"]).sum(-1)

    def entropy(self, params: Tree) -> Tensor:
        """Return Σ ½ log(2πe σ²)."""
        return (params["log_std"] + 0.5 * (LOG_2PI + 1.0)).sum(-1)

    def kl(self, p: Tree, q: Tree) -> Tensor:
        """Return the exact KL, summed over the dimensions."""
        return gaussian_kl(p["mean"], p["log_std"], q["mean"], q["log_std"])

    def fisher(self, params: Tree, tangent: Tree) -> Tree:
        """Multiply by the Fisher matrix, diagonal in (mean, log-std)."""
        mean, log_std = gaussian_fisher(params["log_std"], tangent["mean"], tangent["log_std"])
        return {"mean": mean, "log_std": log_std}

    def noise(self, lead: tuple[int, ...], rng: np.random.Generator) -> Array:
        """Draw standard normal numbers."""
        return rng.standard_normal((*lead, self.dim), dtype=np.float32)

    def sample(self, output: Array, mask: Array | None, temperature: float, noise: Array) -> Array:
        """Draw actions, `[N, dim]`."""
        low, high = self.log_std_bounds
        log_std = np.maximum(output[..., self.dim :], np.float32(low))
        spread = np.exp(np.minimum(log_std, np.float32(high), out=log_std))
        spread *= noise
        if temperature != 1.0:
            spread *= math.sqrt(temperature)
        spread += output[..., : self.dim]
        return spread

    def mode(self, output: Array, mask: Array | None) -> Array:
        """Return the means, `[N, dim]`."""
        return output[..., : self.dim]
