"""Sums, means and quantiles within the groups of a batch: `keys` `[M]` count from 0 to G − 1."""

from __future__ import annotations

import torch
from torch import Tensor


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
