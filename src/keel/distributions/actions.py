"""Action distributions: static, hashable, pure. One per action space; parameters are arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from keel.errors import ShapeError
from keel.functional import (
    bernoulli_fisher,
    bernoulli_kl,
    categorical_entropy,
    categorical_fisher,
    categorical_kl,
    gaussian_fisher,
    gaussian_kl,
    multi_categorical_kl,
)
from keel.types import Tree

LOG_2PI = math.log(2.0 * math.pi)


class Dist(Protocol):
    """A distribution over actions, given by a policy's outputs; `params` are trees `[*lead, K]`."""

    @property
    def outputs(self) -> int:
        """Number of outputs that the network must give."""

    @property
    def exact(self) -> bool:
        """True if `kl` has a closed form; certification refuses where it has none."""

    @property
    def exact_entropy(self) -> bool:
        """True if `entropy` has a closed form, False if it is an estimate."""

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

    def fisher(self, params: Tree, tangent: Tree) -> Tree:
        """Multiply `tangent` by the Fisher matrix at `params`.

        Args:
            params: Parameters.
            tangent: Tangent of the parameters, of their shapes.
        """


def _tempered(output: Tensor, mask: Tensor | None, temperature: float | Tensor) -> Tensor:
    """Return logits at a temperature; illegal outcomes at −inf: no mass there, and no gradient."""
    logits = output / temperature
    if mask is None:
        return logits
    if mask.shape != logits.shape:
        raise ShapeError(
            f"action_mask: expected shape {list(logits.shape)} (one entry per action), "
            f"got {list(mask.shape)}"
        )
    return logits.masked_fill(~mask.bool(), -torch.inf)


@dataclass(frozen=True)
class Categorical:
    """A choice among `n` actions, some of which a mask may rule out."""

    n: int
    exact: bool = True
    exact_entropy: bool = True

    @property
    def outputs(self) -> int:
        """Number of logits: one per action."""
        return self.n

    def params(self, output: Tensor, mask: Tensor | None, temperature: float | Tensor) -> Tree:
        """Return logits, −inf where illegal."""
        return {"logits": _tempered(output, mask, temperature)}

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


@dataclass(frozen=True)
class MultiCategorical:
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

    def params(self, output: Tensor, mask: Tensor | None, temperature: float | Tensor) -> Tree:
        """Return logits, −inf where illegal."""
        return {"logits": _tempered(output, mask, temperature)}

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


@dataclass(frozen=True)
class Bernoulli:
    """`n` independent switches, action `[*lead, n]` of 0 and 1."""

    n: int
    exact: bool = True
    exact_entropy: bool = True

    @property
    def outputs(self) -> int:
        """Number of logits: one per switch."""
        return self.n

    def params(self, output: Tensor, mask: Tensor | None, temperature: float | Tensor) -> Tree:
        """Return logits; a masked switch stays off."""
        return {"logits": _tempered(output, mask, temperature)}

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


@dataclass(frozen=True)
class Gaussian:
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


@dataclass(frozen=True)
class SquashedGaussian:
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
