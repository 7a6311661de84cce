"""Exact divergences between action distributions, in nats, with exact gradients.

All of them are built on φ(x) = eˣ − 1 − x, since

    KL(p‖q) = Σ p (log p − log q) = Σ p φ(log q − log p)        (Σ p = Σ q = 1),

and every term on the right is ≥ 0. Summed that way the result is never negative, is exactly 0 for
equal distributions, and keeps its relative precision for the tiny KLs of a trust region, where
the textbook sum cancels to noise. Beside them, their curvature: Fisher matrices, by what they make
of a tangent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from keel.errors import ShapeError, expect_rank, expect_same


class Divergence(NamedTuple):
    """A KL per row, and whether it is exact or estimated from the sampled action."""

    kl: Tensor
    is_exact: bool


def exp_minus_linear(x: Tensor) -> Tensor:
    """φ(x) = eˣ − 1 − x ≥ 0, precise near 0 (where `expm1(x) − x` has lost every digit).

    Args:
        x: of any shape.
    """
    near = x.clamp(-0.05, 0.05)
    # ½x²·(1 + x/3·(1 + x/4·(…))), as far as the type can tell
    last = 8 if x.dtype == torch.float64 else 5
    series = near / last + 1.0
    for k in range(last - 1, 2, -1):
        series = series * near / k + 1.0
    return torch.where(near == x, 0.5 * near * near * series, torch.expm1(x) - x)


def kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return p φ(log q − log p) per outcome; the sum over outcomes is KL(p‖q).

    An outcome with p = 0 contributes q (so that the sum stays exact), one with q = 0 < p infinity.

    Args:
        log_p: normalized log-probabilities, `[*lead, K]`.
        log_q: the same of q, `[*lead, K]`.
    """
    p_possible, q_possible = log_p > -torch.inf, log_q > -torch.inf
    both = p_possible & q_possible
    safe_p, safe_q = torch.where(both, log_p, 0.0), torch.where(both, log_q, 0.0)
    p = safe_p.exp()
    gap = safe_q - safe_p
    # For a wide gap p·(e^gap − 1 − gap) would overflow where q itself is harmless.
    wide = gap.abs() > 1.0
    narrow_terms = p * exp_minus_linear(torch.where(wide, 0.0, gap))
    q = log_q.exp()
    terms = torch.where(wide, q - p - p * gap, narrow_terms)
    terms = torch.where(both, terms, q)
    return torch.where(p_possible > q_possible, torch.inf, terms)


def categorical_kl(p_logits: Tensor, q_logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute KL(p‖q) of two categoricals over their legal outcomes, `[*lead]`.

    The mask is part of the distribution, so it is one and the same for both. A row without a legal
    outcome gives 0 with zero gradient.

    Args:
        p_logits: `[*lead, K]`.
        q_logits: `[*lead, K]`.
        mask: `[*lead, K]`, true for legal outcomes; None for all.

    Examples:
        >>> import torch
        >>> p, q = torch.tensor([0.8, 0.2], dtype=torch.float64), torch.tensor([0.7, 0.3]).double()
        >>> round(categorical_kl(p.log(), q.log()).item(), 6)
        0.025732
    """
    log_p, log_q = _log_softmaxes(mask, p_logits=p_logits, q_logits=q_logits)
    return kl_terms(log_p, log_q).sum(-1)


def multi_categorical_kl(
    p_logits: Tensor, q_logits: Tensor, sizes: Sequence[int], mask: Tensor | None = None
) -> Tensor:
    """Compute KL(p‖q) of independent categoricals whose logits lie side by side, `[*lead]`.

    Args:
        p_logits: `[*lead, Σ sizes]`.
        q_logits: `[*lead, Σ sizes]`.
        sizes: number of outcomes of each categorical.
        mask: `[*lead, Σ sizes]`, true for legal outcomes; None for all.
    """
    expect_rank("p_logits", p_logits, 1, "[*lead, Σ sizes]")
    if sum(sizes) != p_logits.shape[-1]:
        raise ShapeError(
            f"p_logits: expected a last axis of {sum(sizes)} (the sum of sizes {list(sizes)}), "
            f"got shape {list(p_logits.shape)}"
        )
    expect_same("p_logits", tuple(p_logits.shape), q_logits=q_logits, mask=mask)
    split = list(sizes)
    masks = [None] * len(split) if mask is None else torch.split(mask, split, -1)
    logits = zip(torch.split(p_logits, split, -1), torch.split(q_logits, split, -1), strict=True)
    parts = [categorical_kl(p, q, part) for (p, q), part in zip(logits, masks, strict=True)]
    return torch.stack(parts).sum(0)


def bernoulli_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Compute KL(p‖q) of independent Bernoullis, summed over D: `[*lead]`.

    Args:
        p_logits: `[*lead, D]`.
        q_logits: `[*lead, D]`.
    """
    expect_rank("p_logits", p_logits, 1, "[*lead, D]")
    expect_same("p_logits", tuple(p_logits.shape), q_logits=q_logits)
    yes = kl_terms(F.logsigmoid(p_logits), F.logsigmoid(q_logits))
    no = kl_terms(F.logsigmoid(-p_logits), F.logsigmoid(-q_logits))
    return (yes + no).sum(-1)


def gaussian_kl(p_mean: Tensor, p_log_std: Tensor, q_mean: Tensor, q_log_std: Tensor) -> Tensor:
    """Compute KL(p‖q) of diagonal Gaussians, summed over D: `[*lead]`.

        Σ_d ½ φ(2 (log σ_p − log σ_q)) + ½ ((μ_p − μ_q) / σ_q)²

    which is log(σ_q/σ_p) + (σ_p² + (μ_p−μ_q)²)/(2σ_q²) − ½ without its cancellation. No ε is added
    anywhere: equal Gaussians give exactly 0 at any σ. For a squashed Gaussian (tanh or any other
    bijection of both) the KL of the pre-squash Gaussians is the KL of the actions; for a clipped
    one it is an upper bound.

    Args:
        p_mean: `[*lead, D]`.
        p_log_std: `[*lead, D]`.
        q_mean: `[*lead, D]`.
        q_log_std: `[*lead, D]`.
    """
    expect_rank("p_mean", p_mean, 1, "[*lead, D]")
    shape = tuple(p_mean.shape)
    expect_same("p_mean", shape, p_log_std=p_log_std, q_mean=q_mean, q_log_std=q_log_std)
    spread = exp_minus_linear(2.0 * (p_log_std - q_log_std))
    shift = (p_mean - q_mean) * torch.exp(-q_log_std)
    return 0.5 * (spread + shift * shift).sum(-1)


squashed_gaussian_kl = gaussian_kl
"""KL is invariant under a bijection: on the pre-squash means and log-stds it is exact."""


def distribution_kl(p: Distribution, q: Distribution, action: Tensor) -> Divergence:
    """Compute KL(p‖q) of two `torch.distributions`, in closed form where torch has one.

    Otherwise k3 on `action`, and `is_exact` is False: never negative and unbiased (where p can
    reach all that q can), but an estimate from one sample. Event dimensions are summed by the
    distribution.

    Args:
        p: distribution with batch shape `[*lead]`.
        q: distribution with batch shape `[*lead]`.
        action: sample of p, `[*lead, *event]`.
    """
    try:
        return Divergence(kl_divergence(p, q), is_exact=True)
    except NotImplementedError:
        return Divergence(exp_minus_linear(q.log_prob(action) - p.log_prob(action)), is_exact=False)


def categorical_entropy(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute −Σ p log p in nats over the legal outcomes, `[*lead]`.

    Args:
        logits: `[*lead, K]`.
        mask: `[*lead, K]`, true for legal outcomes; None for all.
    """
    (log_p,) = _log_softmaxes(mask, logits=logits)
    possible = log_p > -torch.inf
    safe = torch.where(possible, log_p, 0.0)
    return torch.where(possible, safe.exp() * (0.0 - safe), 0.0).sum(-1)


def total_variation(p_logits: Tensor, q_logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute ½ Σ |p − q|, the largest difference in the probability of any event: `[*lead]`.

    Args:
        p_logits: `[*lead, K]`.
        q_logits: `[*lead, K]`.
        mask: `[*lead, K]`, true for legal outcomes; None for all.
    """
    log_p, log_q = _log_softmaxes(mask, p_logits=p_logits, q_logits=q_logits)
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def jensen_shannon(p_logits: Tensor, q_logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute ½ KL(p‖m) + ½ KL(q‖m) with m = (p+q)/2 (Lin 1991): `[*lead]`.

    It is symmetric and at most log 2.

    Args:
        p_logits: `[*lead, K]`.
        q_logits: `[*lead, K]`.
        mask: `[*lead, K]`, true for legal outcomes; None for all.
    """
    log_p, log_q = _log_softmaxes(mask, p_logits=p_logits, q_logits=q_logits)
    log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.full_like(log_p[..., :1], 2.0))
    return 0.5 * (kl_terms(log_p, log_m) + kl_terms(log_q, log_m)).sum(-1)


def categorical_fisher(logits: Tensor, tangent: Tensor, mask: Tensor | None = None) -> Tensor:
    """Multiply by the Fisher matrix of a (masked) categorical in its logits: F·u = p∘u − p (p·u).

    Args:
        logits: `[*lead, K]`.
        tangent: u, `[*lead, K]`.
        mask: `[*lead, K]`, true for legal outcomes; None for all.
    """
    expect_same("logits", tuple(logits.shape), tangent=tangent, mask=mask)
    if mask is not None:
        logits = logits.masked_fill(~mask.bool(), -torch.inf)
        tangent = torch.where(mask.bool(), tangent, 0.0)
    p = logits.softmax(-1)
    if mask is not None:
        p = torch.where(mask.bool(), p, 0.0)
    weighted = p * tangent
    return weighted - p * weighted.sum(-1, keepdim=True)


def bernoulli_fisher(logits: Tensor, tangent: Tensor) -> Tensor:
    """Multiply by the Fisher matrix of independent Bernoullis: F·u = σ(z)(1 − σ(z))·u.

    Args:
        logits: z, `[*lead, D]`.
        tangent: u, `[*lead, D]`.
    """
    expect_same("logits", tuple(logits.shape), tangent=tangent)
    return logits.sigmoid() * (-logits).sigmoid() * tangent


def gaussian_fisher(
    log_std: Tensor, mean_tangent: Tensor, log_std_tangent: Tensor
) -> tuple[Tensor, Tensor]:
    """Multiply by the Fisher matrix of a diagonal Gaussian: (u_μ / σ², 2 u_{log σ}).

    Args:
        log_std: log σ, `[*lead, D]`.
        mean_tangent: u_μ, `[*lead, D]`.
        log_std_tangent: u_{log σ}, `[*lead, D]`.
    """
    shape = tuple(log_std.shape)
    expect_same("log_std", shape, mean_tangent=mean_tangent, log_std_tangent=log_std_tangent)
    return mean_tangent * torch.exp(-2.0 * log_std), 2.0 * log_std_tangent


def _log_softmaxes(mask: Tensor | None, **logits: Tensor) -> list[Tensor]:
    """Return normalized log-probabilities on the legal support; −inf on the rest."""
    name, first = next(iter(logits.items()))
    expect_rank(name, first, 1, "[*lead, K]")
    expect_same(name, tuple(first.shape), **logits, mask=mask)
    if mask is None:
        return [x.log_softmax(-1) for x in logits.values()]
    legal = mask.bool()
    # A row without a legal outcome has no distribution; as a uniform one it is equal to itself.
    empty = ~legal.any(-1, keepdim=True)
    return [
        torch.where(empty, 0.0, x.masked_fill(~legal, -torch.inf)).log_softmax(-1)
        for x in logits.values()
    ]
