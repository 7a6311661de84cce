"""The books of the KL: nats spent against old, reference and sampler, per token and per sequence,
and how far the estimators that others go by are from the exact figure."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keel.distributions.vocabulary import HEAD, HIDDEN, Vocabulary
from keel.experience.batch import chunks
from keel.experience.completions import Completions
from keel.functional import k1, k2, k3
from keel.networks.causal_lm import TokenAgent
from keel.resources import parallel_map
from keel.types import UpdateReport


class Reference(NamedTuple):
    """What the reference says of completions `[R, L]`."""

    log_prob: Tensor
    hidden: Tensor
    """`[R, L, H]`, divided by the temperature"""
    head: Tensor
    """`[V, H]`"""
    kl: Tensor
    """exact KL(policy‖reference) of every token"""
    per_token: float
    """its mean over the tokens that count"""
    per_sequence: float
    """its sum over a completion, on average"""


@torch.no_grad()
def compare_with(
    agent: TokenAgent,
    params: Tensor,
    reference: Tensor,
    completions: Completions,
    weight: Tensor,
    temperature: float,
) -> Reference:
    """One pass of the reference; the policy's side is what was kept when it sampled."""
    batch = completions.batch()
    assert isinstance(agent.dist, Vocabulary)
    dist = agent.dist
    head, own_head = agent.head(reference), agent.head(params)

    def piece(index: slice) -> tuple[Tensor, Tensor, Tensor]:
        seen = {k: x[index] for k, x in completions.obs.items()}
        other = agent.policy(reference, seen, temperature)
        own = {HIDDEN: completions.hidden[index], HEAD: own_head}
        compared = dist.compare(own, other, completions.action[index])
        return other[HIDDEN], compared.log_prob, compared.kl

    parts = parallel_map(piece, chunks(batch, agent.workers), agent.workers)
    hidden, log_prob, exact = (torch.cat(x) for x in zip(*parts, strict=True))
    counted = torch.where(weight > 0, exact.double(), 0.0).sum().item()
    tokens = max(1.0, (weight > 0).sum().item())
    return Reference(
        log_prob=log_prob,
        hidden=hidden,
        head=head,
        kl=exact,
        per_token=counted / tokens,
        per_sequence=counted / max(1, int((weight > 0).any(1).sum())),
    )


def reference_metrics(
    reference: Reference, completions: Completions, weight: Tensor
) -> dict[str, float]:
    """The exact KL to the reference, and k1, k2, k3 on the same tokens: bias and spread."""
    counts = weight > 0
    own = completions.log_prob[counts].double(), reference.log_prob[counts].double()
    metrics = {
        "train/kl_reference": reference.per_token,
        "kl/reference_token": reference.per_token,
        "kl/reference_sequence": reference.per_sequence,
    }
    for name, estimate in (("k1", k1), ("k2", k2), ("k3", k3)):
        values = estimate(*own)
        if values.numel() > 1:
            metrics[f"train/kl_reference_{name}_bias"] = values.mean().item() - reference.per_token
            metrics[f"train/kl_reference_{name}_std"] = values.std().item()
    return metrics


def kl_spent_metrics(
    spent: float, report: UpdateReport, completions: Completions, weight: Tensor
) -> dict[str, float]:
    """What this update cost, and all of them together; and what lies between sampler and policy.

    With top-k or top-p the sampler draws from the policy's own tokens, normalized again: on them
    log q − log π is one number, which is the exact KL(sampler‖policy).
    """
    counts = weight > 0
    tokens = (counts.sum() / counts.any(1).sum().clamp(min=1)).item()
    written = completions.response_mask > 0
    gap = (completions.sampler_log_prob - completions.log_prob)[written].double()
    sampler = gap.mean().item() if gap.numel() else 0.0
    own_tokens = (written.sum() / written.any(1).sum().clamp(min=1)).item()
    kl = report.kl_exact.max().item()
    return {
        "kl/old_token": kl,
        "kl/old_sequence": kl * tokens,
        "kl/sampler_token": sampler,
        "kl/sampler_sequence": sampler * own_tokens,
        "kl/spent_token": spent,
    }
