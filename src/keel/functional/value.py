"""Critic losses, per element: scalar, quantile and categorical.

Each returns a loss shaped like the target; averaging belongs to `keel.functional.reduce`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from keel.errors import InputError, expect_rank, expect_same, expect_shape

ORDERED_SPREAD = 4.0
"""The distance between the outer quantiles of an ordered critic that has learned nothing is
ln 2 × this."""
HL_GAUSS_WIDTH = 0.75
"""σ of HL-Gauss in steps of the support (Farebrother et al. 2024, §5.1)."""


class ValueLoss(NamedTuple):
    """A loss per element, and where the value clip decided."""

    loss: Tensor
    clipped: Tensor
    """bool: the clipped branch is the larger, so the element has no gradient"""


def squared(value: Tensor, target: Tensor) -> Tensor:
    """Return ½ (V − R)², whose gradient is V − R.

    Args:
        value: V, `[*lead]`.
        target: R, `[*lead]`.
    """
    expect_same("target", tuple(target.shape), value=value)
    return 0.5 * (value - target) ** 2


def clipped(value: Tensor, old_value: Tensor, target: Tensor, clip: float) -> ValueLoss:
    """Return max(½(V − R)², ½(V_clip − R)²), V_clip within ±`clip` of the old value (PPO2's form).

    Args:
        value: V, `[*lead]`.
        old_value: V before the update, `[*lead]`.
        target: R, `[*lead]`.
        clip: bound on |V_clip − V_old|.
    """
    expect_same("target", tuple(target.shape), value=value, old_value=old_value)
    bounded = value.clamp(old_value - clip, old_value + clip)  # inside, V itself to the last bit
    free_loss, bounded_loss = squared(value, target), squared(bounded, target)
    return ValueLoss(torch.maximum(free_loss, bounded_loss), bounded_loss > free_loss)


def midpoints(quantiles: int, like: Tensor) -> Tensor:
    """Return the levels τ_i = (i + ½)/Q of Q equally likely quantiles, `[Q]`.

    Args:
        quantiles: Q.
        like: a tensor of the device and the type that are wanted.
    """
    return (torch.arange(quantiles, device=like.device, dtype=like.dtype) + 0.5) / quantiles


def quantile_huber(
    quantiles: Tensor, target: Tensor, *, kappa: float = 1.0, levels: Tensor | None = None
) -> Tensor:
    """Compute the quantile Huber loss, `[*lead]` (QR-DQN 2018, arXiv 1710.10044, eq. 10).

        ρ(u) = |τ − 1{u < 0}| · L_κ(u) / κ,    u = target − quantile

    It is the mean over samples and quantiles, so that its size does not depend on Q.

    Args:
        quantiles: `[*lead, Q]`.
        target: `[*lead]`, or `[*lead, K]` with K samples of the return.
        kappa: κ; 0 gives the plain quantile loss |τ − 1{u<0}|·|u|.
        levels: τ, `[Q]`; `midpoints` by default.
    """
    expect_rank("quantiles", quantiles, 1, "[*lead, Q]")
    lead = tuple(quantiles.shape[:-1])
    if target.ndim == len(lead):
        target = target.unsqueeze(-1)
    expect_shape("target", target, (*lead, *target.shape[-1:]), "[*lead] or [*lead, K]")
    if levels is None:
        levels = midpoints(quantiles.shape[-1], quantiles)
    expect_shape("levels", levels, (quantiles.shape[-1],), "one per quantile")
    error = target.unsqueeze(-2) - quantiles.unsqueeze(-1)  # [*lead, Q, K]
    size = error.abs()
    if kappa > 0:
        size = torch.where(size <= kappa, 0.5 * size**2 / kappa, size - 0.5 * kappa)
    tilt = (levels.unsqueeze(-1) - (error.detach() < 0).to(error.dtype)).abs()
    return (tilt * size).mean((-2, -1))


def two_hot(target: Tensor, support: Tensor) -> Tensor:
    """Spread each target over its two neighbours of the support: `[*lead, K]`.

    The mean of the result is the target, exactly; targets outside are moved to the nearest end.

    Args:
        target: `[*lead]`.
        support: `[K]`, sorted.
    """
    _check_support(support)
    inside = target.clamp(support[0], support[-1]).unsqueeze(-1)
    upper = torch.searchsorted(support, inside.contiguous()).clamp(1, support.shape[0] - 1)
    low, high = support[upper - 1], support[upper]
    share = (inside - low) / (high - low)
    result = torch.zeros(*target.shape, support.shape[0], dtype=target.dtype, device=target.device)
    return result.scatter(-1, upper - 1, 1.0 - share).scatter(-1, upper, share)


def hl_gauss(target: Tensor, support: Tensor, sigma: float) -> Tensor:
    """Return the histogram of N(target, σ²), `[*lead, K]` (HL-Gauss, arXiv 2403.03950).

    The bins are centred on `support` and reach half a step beyond its ends; the mass is
    renormalized there.

    Args:
        target: `[*lead]`.
        support: `[K]`, evenly spaced.
        sigma: σ; about ¾ of a step is the paper's choice.
    """
    _check_support(support)
    if not sigma > 0:
        raise InputError(f"sigma: expected a positive number, got {sigma}")
    half = (support[1] - support[0]) / 2
    edges = torch.cat([support[:1] - half, support + half])
    inside = target.clamp(support[0], support[-1]).unsqueeze(-1)
    # The renormalizer cannot vanish: a clamped target has half a bin on either side.
    below = torch.erf((edges - inside) / (sigma * math.sqrt(2.0)))  # 2·cdf − 1: the 1 and 2 cancel
    mass = below[..., 1:] - below[..., :-1]
    return mass / (below[..., -1:] - below[..., :1])


def categorical(logits: Tensor, target_probabilities: Tensor) -> Tensor:
    """Return the cross-entropy −Σ p log q of a categorical critic, `[*lead]`.

    Args:
        logits: of q, `[*lead, K]`.
        target_probabilities: p, the encoded target, `[*lead, K]`.
    """
    expect_same("logits", tuple(logits.shape), target_probabilities=target_probabilities)
    return -(target_probabilities * logits.log_softmax(-1)).sum(-1)


def categorical_mean(logits: Tensor, support: Tensor) -> Tensor:
    """Return the value that a categorical critic stands for: Σ softmax(logits)·support, `[*lead]`.

    Args:
        logits: `[*lead, K]`.
        support: `[K]`.
    """
    expect_shape("support", support, tuple(logits.shape[-1:]), "the last axis of logits")
    return (logits.softmax(-1) * support).sum(-1)


def _check_support(support: Tensor) -> None:
    expect_rank("support", support, 1, "[K]")
    if support.ndim != 1 or support.shape[0] < 2:
        raise InputError(f"support: expected at least two sorted atoms [K], got {support.shape}")
