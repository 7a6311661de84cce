"""The only place that averages a loss; and sums, means and quantiles within the groups of a batch.

A loss per element becomes one number per group as Σ w·x / denominator. The denominator is that of
the *full* minibatch: given to every micro-batch, it makes their sums add up to the full-batch
value, whatever their sizes (per-micro-batch means do not).

Groups are told by `keys` `[M]`, which count from 0 to G − 1.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from keel.errors import InputError, check_choice, expect_rank, expect_same, expect_shape

Reduction = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "constant"
]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


def denominator(
    weight: Tensor,
    reduction: Reduction = "token-mean",
    *,
    group_axis: int | None = None,
    constant: float | None = None,
) -> Tensor:
    """Return the divisor of `aggregate`: a number, or `[G]` with a `group_axis`; 1 in place of 0.

    | reduction | denominator |
    |---|---|
    | `token-mean` | the sum of the weights |
    | `token-sum` | 1 |
    | `seq-mean-token-sum`, `seq-mean-token-mean` | the number of sequences with any weight |
    | `constant` | that number × `constant` (Dr.GRPO 2025: the longest permitted answer) |

    Args:
        weight: `[*lead]`, or `[*sequences, L]` for reductions over sequences.
        reduction: one of the reductions above.
        group_axis: axis of `weight` that is kept, of length G; None for none.
        constant: tokens that every sequence counts as; goes with reduction `constant`.
    """
    check_choice("reduction", reduction, REDUCTIONS)
    if (reduction == "constant") != (constant is not None):
        raise InputError("constant: goes with reduction 'constant', and is needed there")
    if reduction == "token-mean":
        total = _sum_but(_as_float(weight), group_axis)
        return torch.where(total > 0, total, 1.0)
    if reduction == "token-sum":
        return torch.ones_like(_sum_but(_as_float(weight), group_axis))
    expect_rank("weight", weight, 2, "[*sequences, L]")
    axis = _sequence_axis(weight, group_axis)
    sequences = _sum_but(_as_float((weight > 0).any(-1)), axis).clamp(min=1.0)
    return sequences * constant if constant is not None else sequences


def aggregate(
    x: Tensor,
    weight: Tensor | None = None,
    reduction: Reduction = "token-mean",
    *,
    denominator_of_batch: Tensor | None = None,
    group_axis: int | None = None,
    constant: float | None = None,
) -> Tensor:
    """Reduce a loss per element to Σ w·x / denominator: a scalar, or `[G]` with a `group_axis`.

    Elements with weight 0 contribute nothing to value or gradient, even where `x` is not finite;
    a batch without weight gives 0.

    Args:
        x: `[*lead]`; the last axis is the token axis of the `seq-` reductions.
        weight: `[*lead]`, 0 for elements that do not count; None for 1.
        reduction: as in `denominator`.
        denominator_of_batch: `denominator(weight of the full minibatch, …)`, to combine
            micro-batches by adding them; by default that of `weight`.
        group_axis: axis of `x` that is kept, of length G; None for none.
        constant: as in `denominator`.
    """
    check_choice("reduction", reduction, REDUCTIONS)
    expect_same("x", tuple(x.shape), weight=weight)
    weight = torch.ones_like(x) if weight is None else weight.to(x.dtype)
    if denominator_of_batch is None:
        denominator_of_batch = denominator(
            weight, reduction, group_axis=group_axis, constant=constant
        )
    weighted = torch.where(weight > 0, x, 0.0) * weight
    if reduction == "seq-mean-token-mean":
        expect_rank("x", x, 2, "[*sequences, L]")
        tokens = weight.sum(-1)
        weighted = weighted.sum(-1) / torch.where(tokens > 0, tokens, 1.0)
        group_axis = _sequence_axis(x, group_axis)
    total = _sum_but(weighted, group_axis)
    expect_shape("denominator_of_batch", denominator_of_batch, tuple(total.shape), "the groups")
    return total / denominator_of_batch.to(x.dtype)


def _as_float(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.to(torch.float32)


def _sequence_axis(x: Tensor, group_axis: int | None) -> int | None:
    """Return `group_axis` counted from the front, once the token axis (the last) is gone."""
    if group_axis is None:
        return None
    axis = group_axis % x.ndim
    if axis == x.ndim - 1:
        raise InputError("group_axis: the last axis holds tokens, it cannot hold groups too")
    return axis


def _sum_but(x: Tensor, keep: int | None) -> Tensor:
    if keep is None:
        return x.sum()
    return x.movedim(keep, 0).reshape(x.shape[keep], -1).sum(1)


def group_mean(x: Tensor, keys: Tensor, groups: int, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return mean and count of `x` `[M]` per group, `[G]` each; 0 for an empty group.

    What is summed are the distances from the largest member: equal members are then exactly their
    own mean, however many they are, and nothing that follows can mistake rounding for a signal.
    """
    valid = torch.ones_like(x, dtype=torch.bool) if valid is None else valid
    count = group_sum(valid.to(x.dtype), keys, groups)
    largest = group_max(torch.where(valid, x, -torch.inf), keys, groups)
    largest = torch.where(count > 0, largest, 0.0)
    distance = torch.where(valid, x - largest[keys], 0.0)
    return largest + group_sum(distance, keys, groups) / count.clamp(min=1), count


def group_moments(x: Tensor, valid: Tensor, keys: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return mean and Bessel-corrected standard deviation per group, `[G]` each.

    Squares are taken of distances over a power of two near the largest, so that they neither
    overflow nor vanish, and are otherwise the same to the last bit.
    """
    mean, count = group_mean(x, keys, groups, valid)
    distance = torch.where(valid, x - mean[keys], 0.0)
    largest = group_max(distance.abs(), keys, groups)
    _, exponent = torch.frexp(largest)
    unit = torch.ldexp(torch.ones_like(largest), exponent - 1)
    unit = torch.where(torch.isfinite(largest) & (unit > 0), unit, 1.0)
    total = group_sum((distance / unit[keys]) ** 2, keys, groups)
    return mean, (total / (count - 1).clamp(min=1)).sqrt() * unit


def group_sum(x: Tensor, keys: Tensor, groups: int) -> Tensor:
    """Return the sum of `x` `[M]` per group, `[G]`."""
    if groups == 1:  # inductor cannot vectorise a scatter to one place
        return x.sum(0, keepdim=True)
    return x.new_zeros(groups).index_add(0, keys, x)


def group_max(x: Tensor, keys: Tensor, groups: int) -> Tensor:
    """Return the largest of `x` `[M]` per group, `[G]`; −∞ for an empty group."""
    return x.new_full((groups,), -torch.inf).scatter_reduce(0, keys, x, "amax")


def group_median_and_iqr(
    x: Tensor, valid: Tensor, keys: Tensor, groups: int
) -> tuple[Tensor, Tensor]:
    """Return median and inter-quartile range per group, `[G]` each, linearly interpolated."""
    member = (keys == torch.arange(groups, device=x.device)[:, None]) & valid
    ordered = torch.where(member, x, torch.inf).sort(dim=1).values
    last = (member.sum(1) - 1).clamp(min=0)

    def quantile(q: float) -> Tensor:
        position = q * last.to(x.dtype)
        below = position.floor().long()
        above = torch.minimum(below + 1, last)
        low = ordered.gather(1, below[:, None])[:, 0]
        high = ordered.gather(1, above[:, None])[:, 0]
        value = low + (position - below) * (high - low)
        return torch.where(member.any(1), value, 0.0)

    return quantile(0.5), quantile(0.75) - quantile(0.25)
