"""The probability ratio: clamped in log space, quarantined where not finite, and reported."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keel.errors import expect_same

MAX_LOG_RATIO = 10.0
"""Bound on |log-ratio|: exp(10) = 22,026. A finite loss, not a trust region: that is the KL's."""


class Ratio(NamedTuple):
    """π_new / π_old of the sampled actions; every field shaped like `log_prob`."""

    ratio: Tensor
    """exp(log_ratio); 1 where quarantined."""
    log_ratio: Tensor
    """Clamped; 0 where quarantined. Differentiable in `log_prob`."""
    weight: Tensor
    """The given weight, 0 where quarantined."""
    quarantined: Tensor
    """bool: rows that count but whose log-ratio is not finite."""
    raw_log_ratio: Tensor
    """Before the clamp, detached; 0 where quarantined or not counted."""


class RatioReport(NamedTuple):
    """Extremes and shares of a ratio: 0-d tensors over the rows that count, so that it compiles."""

    max_abs_log_ratio: Tensor
    share_large: Tensor
    """share with |log-ratio| > 5"""
    share_clamped: Tensor
    ratio_min: Tensor
    ratio_max: Tensor
    share_extreme: Tensor
    """share with ratio > 100 or < 0.01"""
    non_finite_count: Tensor
    non_finite_share: Tensor
    effective_sample_size: Tensor
    """Kish's, as a share of the rows: 1 when all ratios are equal"""


def policy_ratio(
    log_prob: Tensor,
    old_log_prob: Tensor,
    weight: Tensor | None = None,
    *,
    max_log_ratio: float = MAX_LOG_RATIO,
) -> Ratio:
    """Compute exp(clamp(log π_new − log π_old)), safe in value and gradient.

    A sample whose log-ratio is not finite is *quarantined*: its weight is 0 and the gradient to its
    `log_prob` exactly 0, so it neither poisons the batch nor pretends (as replacing the ratio by 1
    does) to be a sample on which the policy did not change. NaN logits must be stopped before the
    log-prob is taken: the backward pass of a softmax multiplies its own NaN by that zero.

    The clamp has zero gradient outside ±`max_log_ratio`.

    Args:
        log_prob: log π_new of the sampled actions, `[*lead]`.
        old_log_prob: log π_old of the same actions, `[*lead]`.
        weight: `[*lead]`, 0 for rows that do not count; None for 1.
        max_log_ratio: bound on |log-ratio|.
    """
    shape = tuple(log_prob.shape)
    expect_same("log_prob", shape, old_log_prob=old_log_prob, weight=weight)
    counted = torch.ones_like(log_prob) if weight is None else weight.to(log_prob.dtype)
    difference = log_prob - old_log_prob
    finite = torch.isfinite(difference)
    usable = finite & (counted > 0)
    raw = torch.where(usable, difference, 0.0)
    log_ratio = raw.clamp(-max_log_ratio, max_log_ratio)
    return Ratio(
        ratio=log_ratio.exp(),
        log_ratio=log_ratio,
        weight=torch.where(finite, counted, 0.0),
        quarantined=~finite & (counted > 0),
        raw_log_ratio=raw.detach(),
    )


def ratio_report(ratio: Ratio, *, max_log_ratio: float = MAX_LOG_RATIO) -> RatioReport:
    """Report extremes and shares of a `Ratio`; without a usable row: zeros, and ratios of 1.

    Args:
        ratio: result of `policy_ratio`.
        max_log_ratio: the bound it was clamped to.
    """
    if ratio.weight.numel() == 0:  # the extremes of no row are those of one that does not count
        ratio = Ratio(*(field.new_zeros(1) for field in ratio))
    value = ratio.ratio.detach()
    usable = ratio.weight > 0
    counted = usable | ratio.quarantined
    total = usable.sum().clamp(min=1)
    size = ratio.raw_log_ratio.abs()
    quarantined = ratio.quarantined.sum()

    def share(condition: Tensor) -> Tensor:
        return (condition & usable).sum() / total

    return RatioReport(
        max_abs_log_ratio=size.max(),
        share_large=share(size > 5.0),
        share_clamped=share(size > max_log_ratio),
        ratio_min=torch.where(usable.any(), torch.where(usable, value, torch.inf).min(), 1.0),
        ratio_max=torch.where(usable.any(), torch.where(usable, value, 0.0).max(), 1.0),
        share_extreme=share((value > 100.0) | (value < 0.01)),
        non_finite_count=quarantined,
        non_finite_share=quarantined / counted.sum().clamp(min=1),
        effective_sample_size=effective_sample_size(value * ratio.weight) / total,
    )


def effective_sample_size(importance: Tensor) -> Tensor:
    """Compute (Σ w)² / Σ w² (Kish 1965): how many equal samples the weights are worth.

    Args:
        importance: weights w ≥ 0, of any shape.
    """
    scaled = importance / importance.max().clamp(min=torch.finfo(importance.dtype).tiny)
    return scaled.sum() ** 2 / (scaled**2).sum().clamp(min=torch.finfo(scaled.dtype).tiny)
