"""Advantages of tokens from scores of completions: by a critic, or by the group."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keel.apps.language.config import Language
from keel.functional import (
    dr_grpo,
    grpo,
    normalize,
    reward_to_go,
    rloo,
    token_gae,
)


class TokenTargets(NamedTuple):
    """Advantages and value targets of tokens, `[R, L]` each."""

    advantage: Tensor
    target: Tensor
    """of the critic; 0 without one"""
    raw: Tensor
    """advantages before they were normalized"""


def token_rewards(score: Tensor, weight: Tensor, penalty: Tensor) -> Tensor:
    """Return −penalty on every token that counts, and the score on the last of them: `[R, L]`.

    Args:
        score: `[R]`.
        weight: `[R, L]`, the response mask.
        penalty: `[R, L]`, cost of every token.
    """
    counts = weight > 0
    places = torch.arange(weight.shape[1], device=weight.device).expand_as(weight)
    last = torch.where(counts, places, -1).amax(1, keepdim=True)
    ends = (places == last) & counts
    return torch.where(counts, -penalty, 0.0) + torch.where(ends, score[:, None], 0.0)


def token_targets(
    config: Language,
    score: Tensor,
    weight: Tensor,
    penalty: Tensor,
    value: Tensor,
    baseline: Tensor | None = None,
) -> TokenTargets:
    """Compute advantages and value targets of completions.

    Args:
        config: algorithm and its rules.
        score: `[R]`.
        weight: `[R, L]`, the response mask.
        penalty: `[R, L]`, cost of every token: β times the KL to the reference.
        value: `[R, L]`, the critic's.
        baseline: `[R]`, score of the likeliest completion of each prompt (ReMax).
    """
    rules, group = config.advantage, config.sample.group
    counts = weight > 0
    nothing = torch.zeros_like(weight)
    if config.algo in ("ppo", "reinforce_pp"):
        reward = token_rewards(score, weight, penalty)
        if config.algo == "ppo":
            result = token_gae(reward, value, weight, gamma=rules.gamma, lam=rules.lam)
            raw, target = result.advantage, result.target
        else:
            never = torch.zeros_like(reward, dtype=torch.bool)
            raw = reward_to_go(reward.T, never.T, gamma=rules.gamma, weight=weight.T).T
            target = nothing
        scaled = normalize(raw, "batch", weight=weight, clamp=rules.clamp).advantage
        return TokenTargets(scaled, target, raw)
    total = score - torch.where(counts, penalty, 0.0).sum(1)
    keys = torch.arange(len(score), device=score.device) // group
    groups = len(score) // group
    real = counts.any(1).to(total.dtype)  # a completion that could not be scored is not there
    if config.algo == "grpo":
        own = grpo(total, keys, groups, weight=real)
    elif config.algo == "rloo":
        own = rloo(total, keys, groups, weight=real)
    elif config.algo == "dr_grpo":
        own = dr_grpo(total, keys, groups, weight=real)
    else:  # remax
        assert baseline is not None
        own = total - baseline
    bound = rules.clamp
    clamped = own if bound is None else own.clamp(-bound, bound)
    spread = torch.where(counts, clamped[:, None], 0.0)
    return TokenTargets(spread, nothing, torch.where(counts, own[:, None], 0.0))
