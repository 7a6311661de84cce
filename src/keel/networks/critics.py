"""Critics of the return's distribution: quantiles of it, or a histogram.

A critic is static and pure, as a distribution is: `raw` `[*lead, outputs]` is what the network
gives, and targets are λ-returns, single samples of the return as far as λ lets them be. Its numbers
are in units of its own where returns are normalized (`keel.networks.popart`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from keel.functional import value as losses
from keel.networks.actor_critic import Scalar


@dataclass(frozen=True)
class Quantile:
    """A critic of quantiles of the return at the levels (i + ½)/N (Dabney et al. 2018)."""

    outputs: int = 32
    kappa: float = 0.02
    """where the Huber loss turns from square to linear; 0: the plain quantile loss. Returns within
    κ of each other pull like the square, towards their mean: κ above their spread gives expectiles,
    and the distribution comes out too narrow"""
    ordered: bool = False
    """quantiles that cannot cross: their mean, and the steps between them, which are positive"""
    tail: float = 1.0
    """CVaR: the value is the mean of this lowest share of the distribution"""
    normalized: bool = True

    @property
    def affine(self) -> int:
        """Number of outputs that move with the units: of an ordered critic the first, its mean."""
        return 1 if self.ordered else self.outputs

    def quantiles(self, raw: Tensor) -> Tensor:
        """Return the quantiles at `levels`, `[*lead, N]`."""
        if not self.ordered:
            return raw
        steps = torch.nn.functional.softplus(raw[..., 1:]) * (losses.ORDERED_SPREAD / self.outputs)
        heights = torch.nn.functional.pad(steps.cumsum(-1), (1, 0))
        return raw[..., :1] + heights - heights.mean(-1, keepdim=True)

    def levels(self, like: Tensor) -> Tensor:
        """Return the levels (i + ½)/N, `[N]`."""
        return losses.midpoints(self.outputs, like)

    def value(self, raw: Tensor) -> Tensor:
        """Return the mean, or that of the lower tail: `[*lead]`."""
        if self.tail >= 1.0:
            return raw[..., 0] if self.ordered else raw.mean(-1)
        return lower_mean(self.quantiles(raw), torch.ones_like(raw) / self.outputs, self.tail)

    def loss(
        self, raw: Tensor, target: Tensor, old: Tensor | None = None, clip: float | None = None
    ) -> Tensor:
        """Return the quantile Huber loss; clipped, quantiles stay within `clip` of the old ones."""
        now = self.quantiles(raw)
        free = losses.quantile_huber(now, target, kappa=self.kappa)
        if clip is None or old is None:
            return free
        before = self.quantiles(old)
        bounded = now.clamp(before - clip, before + clip)
        return torch.maximum(free, losses.quantile_huber(bounded, target, kappa=self.kappa))


@dataclass(frozen=True)
class Histogram:
    """A critic of probabilities of `outputs` atoms, evenly spaced over ±`reach`."""

    outputs: int = 101
    reach: float = 8.0
    encoding: Literal["two_hot", "hl_gauss"] = "hl_gauss"
    """how a target is spread over the atoms"""
    tail: float = 1.0
    normalized: bool = True
    affine: int = 0

    @property
    def step(self) -> float:
        """Distance between two atoms."""
        return 2.0 * self.reach / (self.outputs - 1)

    @cached_property
    def atoms(self) -> Tensor:
        """The atoms `[N]`, in double precision."""
        return torch.linspace(-self.reach, self.reach, self.outputs, dtype=torch.float64)

    def support(self, like: Tensor) -> Tensor:
        """Return the atoms `[N]` on the device and in the type of `like`."""
        return self.atoms.to(like)

    def quantiles(self, raw: Tensor) -> Tensor:
        """Return quantiles of the histogram at `levels`, linear inside of a bin: `[*lead, 32]`."""
        edges = self.support(raw) + 0.5 * self.step
        reached = raw.softmax(-1).cumsum(-1)
        levels = self.levels(raw)
        at = torch.searchsorted(
            reached.contiguous(), levels.expand(*raw.shape[:-1], -1).contiguous()
        )
        at = at.clamp(max=self.outputs - 1)
        above = reached.gather(-1, at)
        below = torch.nn.functional.pad(reached, (1, 0)).gather(-1, at)
        share = (levels - below) / (above - below).clamp(min=1e-12)
        return edges[at] - self.step * (1.0 - share.clamp(0.0, 1.0))

    def levels(self, like: Tensor) -> Tensor:
        """Return the levels (i + ½)/32, `[32]`."""
        return losses.midpoints(32, like)

    def value(self, raw: Tensor) -> Tensor:
        """Return the mean, or that of the lower tail: `[*lead]`."""
        support = self.support(raw)
        if self.tail >= 1.0:
            return losses.categorical_mean(raw, support)
        chances = raw.softmax(-1)
        return lower_mean(support.expand_as(chances), chances, self.tail)

    def loss(
        self, raw: Tensor, target: Tensor, old: Tensor | None = None, clip: float | None = None
    ) -> Tensor:
        """Return the cross-entropy against the encoded target, `[*lead]`.

        Clipped, it is that of the mixture with the old histogram whose mean is within `clip` of the
        old one.
        """
        aim = self.encode(target)
        free = losses.categorical(raw, aim)
        if clip is None or old is None:
            return free
        now, before = raw.softmax(-1), old.softmax(-1)
        support = self.support(raw)
        gap = ((now - before) * support).sum(-1, keepdim=True)
        share = (clip / gap.abs().clamp(min=1e-12)).clamp(max=1.0)
        mixed = before + share * (now - before)
        bounded = -(aim * mixed.clamp(min=1e-12).log()).sum(-1)
        return torch.where(share.squeeze(-1) < 1.0, torch.maximum(free, bounded), free)

    def encode(self, target: Tensor) -> Tensor:
        """Encode targets `[*lead]` as probabilities of the atoms, `[*lead, N]`."""
        support = self.support(target)
        if self.encoding == "two_hot":
            return losses.two_hot(target, support)
        return losses.hl_gauss(target, support, losses.HL_GAUSS_WIDTH * self.step)


Critic = Scalar | Quantile | Histogram
Distributional = Quantile | Histogram


def draw(critic: Distributional, raw: Tensor, rng: torch.Generator) -> Tensor:
    """Draw one sample of the return for every row, `[*lead]`: a quantile at random.

    Args:
        critic: the meaning of `raw`.
        raw: outputs, `[*lead, Q]`.
        rng: source of the levels.
    """
    quantiles = critic.quantiles(raw)
    which = torch.randint(quantiles.shape[-1], (*raw.shape[:-1], 1), generator=rng)
    return quantiles.gather(-1, which.to(raw.device)).squeeze(-1)


def lower_mean(values: Tensor, chances: Tensor, share: float) -> Tensor:
    """Return the mean of the lowest `share` of a distribution, `[*lead]` (CVaR; Rockafellar 2000).

    Args:
        values: `[*lead, N]`.
        chances: probabilities of the values, `[*lead, N]`.
        share: share of the distribution, between 0 and 1.
    """
    order = values.argsort(-1)
    values, chances = values.gather(-1, order), chances.gather(-1, order)
    before = chances.cumsum(-1) - chances
    tail = torch.minimum(chances, (share - before).clamp(min=0.0))
    return (tail * values).sum(-1) / share


def calibration(critic: Distributional, raw: Tensor, target: Tensor) -> dict[str, float]:
    """Measure how often targets `[n]` fall below the quantiles predicted for them, `[n, N]`.

    `coverage_80` is the share between the 10 % and the 90 % quantile; `calibration_error` the mean
    distance between share and level over all levels.
    """
    predicted = critic.quantiles(raw)
    levels = critic.levels(raw)
    below = (target.unsqueeze(-1) < predicted).to(torch.float64).mean(0)
    at: Callable[[float], Tensor] = lambda level: _quantile_at(predicted, levels, level)  # noqa: E731
    inside = (target >= at(0.1)) & (target <= at(0.9))
    return {
        "train/coverage_80": inside.double().mean().item(),
        "train/calibration_error": (below - levels.double()).abs().mean().item(),
    }


def _quantile_at(predicted: Tensor, levels: Tensor, level: float) -> Tensor:
    """Interpolate linearly between the two nearest levels, `[n]`."""
    position = level * len(levels) - 0.5
    low = min(max(int(position), 0), len(levels) - 2)
    share = position - low
    return predicted[..., low] + share * (predicted[..., low + 1] - predicted[..., low])
