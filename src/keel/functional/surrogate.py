"""Policy surrogates, per element: what to minimise, and which elements the clip cut off.

Every function takes the ratio r = π_new/π_old and the advantage A, equally shaped, and returns a
`Surrogate` of that shape. Averaging belongs to `keel.functional.reduce`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keel.errors import expect_rank, expect_same

Bound = float | Tensor
"""A number, or a 0-d tensor: one that changes would recompile a compiled step as a number."""


class Surrogate(NamedTuple):
    """A loss per element, and where its gradient was cut."""

    loss: Tensor
    clipped: Tensor
    """bool: the clip decided, so the element has no gradient in the ratio"""


def unclipped(ratio: Tensor, advantage: Tensor) -> Surrogate:
    """Return −r·A, the plain importance-sampled loss (TRPO 2015, arXiv 1502.05477, eq. 14).

    Args:
        ratio: π_new/π_old, `[*lead]`.
        advantage: `[*lead]`.
    """
    expect_same("ratio", tuple(ratio.shape), advantage=advantage)
    return Surrogate(-ratio * advantage, torch.zeros_like(ratio, dtype=torch.bool))


def clip(
    ratio: Tensor, advantage: Tensor, low: Bound = 0.2, high: Bound | None = None
) -> Surrogate:
    """Return max(−r·A, −clip(r, 1−low, 1+high)·A) (PPO 2017, arXiv 1707.06347, eq. 7, negated).

    The *maximum* of the two losses is the pessimistic one; a minimum would reward running away. A
    `high` above `low` is "clip-higher" (DAPO 2025, arXiv 2503.14476).

    Args:
        ratio: π_new/π_old, `[*lead]`.
        advantage: `[*lead]`.
        low: the ratio is clipped from below at 1 − low.
        high: the ratio is clipped from above at 1 + high; `low` by default.

    Examples:
        >>> import torch
        >>> clip(torch.tensor([2.0]), torch.tensor([1.0])).loss
        tensor([-1.2000])
    """
    return _clip_between(ratio, advantage, 1.0 - low, 1.0 + (low if high is None else high))


def symmetric_clip(ratio: Tensor, advantage: Tensor, epsilon: Bound = 0.2) -> Surrogate:
    """Clip the ratio to [1/(1+ε), 1+ε], symmetric in its logarithm (Sample Factory's form).

    Args:
        ratio: π_new/π_old, `[*lead]`.
        advantage: `[*lead]`.
        epsilon: ε.
    """
    return _clip_between(ratio, advantage, 1.0 / (1.0 + epsilon), 1.0 + epsilon)


def dual_clip(
    ratio: Tensor,
    advantage: Tensor,
    low: Bound = 0.2,
    high: Bound | None = None,
    bound: float = 3.0,
) -> Surrogate:
    """Return the loss of `clip`, for A < 0 at most −bound·A (Ye et al. 2020, arXiv 1912.09729).

    Without it a bad action that became very likely has an unbounded loss.

    Args:
        ratio: π_new/π_old, `[*lead]`.
        advantage: `[*lead]`.
        low: the ratio is clipped from below at 1 − low.
        high: the ratio is clipped from above at 1 + high; `low` by default.
        bound: largest ratio that counts where A < 0, above 1.
    """
    base = clip(ratio, advantage, low, high)
    ceiling = -bound * advantage
    cut = (advantage < 0) & (base.loss > ceiling)
    return Surrogate(torch.where(cut, ceiling, base.loss), base.clipped | cut)


def cispo(
    log_prob: Tensor, ratio: Tensor, advantage: Tensor, low: Bound = 0.2, high: Bound | None = None
) -> Surrogate:
    """Return −sg(clip(r))·A·log π (CISPO, MiniMax-M1 2025, arXiv 2506.13585).

    The *weight* is clipped, not the gradient: clipped elements go on learning. `clipped` tells
    which weights were bounded.

    Args:
        log_prob: log π_new of the sampled actions, `[*lead]`.
        ratio: π_new/π_old, `[*lead]`.
        advantage: `[*lead]`.
        low: the ratio is clipped from below at 1 − low.
        high: the ratio is clipped from above at 1 + high; `low` by default.
    """
    expect_same("ratio", tuple(ratio.shape), log_prob=log_prob, advantage=advantage)
    upper = 1.0 + (low if high is None else high)
    fixed = ratio.detach()
    weight = fixed.clamp(min=1.0 - low).clamp(max=upper)
    return Surrogate(-weight * advantage * log_prob, weight != fixed)


def sequence_log_ratio(log_ratio: Tensor, weight: Tensor) -> Tensor:
    """Return the mean log-ratio of each sequence's counted tokens, repeated on them: `[B, L]`.

    Its exponent is GSPO's length-normalized sequence ratio (2025, arXiv 2507.18071). Tokens that
    do not count get 0; a sequence without tokens is 0 everywhere.

    Args:
        log_ratio: `[B, L]`.
        weight: `[B, L]`, the response mask: 0 for tokens that do not count.
    """
    expect_rank("log_ratio", log_ratio, 2, "[B, L]")
    expect_same("log_ratio", tuple(log_ratio.shape), weight=weight)
    counted = weight > 0
    tokens = counted.sum(-1, keepdim=True).clamp(min=1)
    mean = torch.where(counted, log_ratio, 0.0).sum(-1, keepdim=True) / tokens
    return torch.where(counted, mean, 0.0)


def _clip_between(ratio: Tensor, advantage: Tensor, lower: Bound, upper: Bound) -> Surrogate:
    expect_same("ratio", tuple(ratio.shape), advantage=advantage)
    free = -ratio * advantage
    bounded = -ratio.clamp(min=lower).clamp(max=upper) * advantage
    return Surrogate(torch.maximum(free, bounded), bounded > free)
