"""Advantages of tokens from scores of completions: by a critic, or by the group."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keel.apps.language.config import Language
from keel.apps.language.registries import ESTIMATORS
from keel.errors import InputError
from keel.functional import normalize, reward_to_go

ARGUMENTS = (
    "score", "reward", "value", "weight", "group", "groups", "baseline", "gamma", "lam",
)  # fmt: skip
"""What estimators are called with; see `token_targets`."""


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


def rewards_to_go(reward: Tensor, weight: Tensor, gamma: float) -> Tensor:
    """Return the sum of a token's reward and all later ones, without a baseline, `[R, L]`."""
    never = torch.zeros_like(reward, dtype=torch.bool)
    return reward_to_go(reward.T, never.T, gamma=gamma, weight=weight.T).T


def over_likeliest(score: Tensor, baseline: Tensor) -> Tensor:
    """Return by how much completions are better than the likeliest one (ReMax), `[R]`."""
    return score - baseline


def named_arguments(algo: str) -> frozenset[str]:
    """Return the arguments that an estimator names: it is called with these."""
    parameters = inspect.signature(ESTIMATORS.get(algo)).parameters
    return frozenset(parameters) & frozenset(ARGUMENTS)


def check_estimator(config: Language) -> None:
    """Raise an `InputError` for an estimator that asks for what this run does not have."""
    function, named = ESTIMATORS.get(config.algo), named_arguments(config.algo)
    try:
        inspect.signature(function).bind(**dict.fromkeys(named))
    except TypeError as error:
        raise InputError(
            f"algo {config.algo}: {error}; an estimator may name {', '.join(ARGUMENTS)}"
        ) from error
    if "value" in named and config.critic == "none":
        raise InputError(f"algo {config.algo}: names value; set model.critic to head or model")


def token_targets(
    config: Language,
    score: Tensor,
    weight: Tensor,
    penalty: Tensor,
    value: Tensor,
    baseline: Tensor | None = None,
) -> TokenTargets:
    """Compute advantages and value targets of completions.

    The estimator is called with those of these arguments that it names: `score` `[R]`, less the
    penalties; `group` `[R]`, the prompt of each completion, from 0, and `groups`, how many there
    are; `baseline` `[R]`; or, by token, `reward` `[R, L]`, the score on the last one; `value`
    `[R, L]`; `gamma` and `lam`. `weight` is 0 for what does not count: `[R, L]` beside `reward`,
    else `[R]`.

    It returns advantages `[R]`, which all tokens of a completion get, or `[R, L]`, which are
    normalized over the batch; or a pair of such and value targets `[R, L]`.

    Args:
        config: the estimator and its rules.
        score: `[R]`.
        weight: `[R, L]`, the response mask.
        penalty: `[R, L]`, cost of every token: β times the KL to the reference.
        value: `[R, L]`, the critic's.
        baseline: `[R]`, score of the likeliest completion of each prompt.
    """
    rules, counts, size = config.advantage, weight > 0, config.sample.group
    total = score - torch.where(counts, penalty, 0.0).sum(1)
    named = named_arguments(config.algo)
    given: dict[str, Any] = {
        "score": total,
        "reward": token_rewards(score, weight, penalty),
        "value": value,
        # a completion that could not be scored is not there
        "weight": weight if "reward" in named else counts.any(1).to(total.dtype),
        "group": torch.arange(len(score), device=score.device) // size,
        "groups": len(score) // size,
        "baseline": baseline,
        "gamma": rules.gamma,
        "lam": rules.lam,
    }
    result = ESTIMATORS.get(config.algo)(**{name: given[name] for name in named})
    raw, target = result if isinstance(result, tuple) else (result, torch.zeros_like(weight))
    for x, shapes in ((raw, (score.shape, weight.shape)), (target, (weight.shape,))):
        if not isinstance(x, Tensor) or x.shape not in shapes:
            raise InputError(
                f"algo {config.algo}: expected advantages {list(score.shape)} or "
                f"{list(weight.shape)}, alone or with value targets {list(weight.shape)}"
            )
    if raw.ndim > 1:
        scaled = normalize(raw, "batch", weight=weight, clamp=rules.clamp).advantage
    else:
        raw = raw[:, None]
        scaled = raw if rules.clamp is None else raw.clamp(-rules.clamp, rules.clamp)
    return TokenTargets(*(torch.where(counts, x, 0.0) for x in (scaled, target, raw)))
