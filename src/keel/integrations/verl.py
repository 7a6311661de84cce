"""Keel's losses, advantages and KL estimates under verl's own names (verl 0.9).

Importing this module registers them wherever verl is installed; verl does so by itself, in every
process, with `VERL_USE_EXTERNAL_MODULES=keel.integrations.verl`. Then its configuration may say

    actor_rollout_ref.actor.policy_loss.loss_mode: keel_dual_clip
    actor_rollout_ref.actor.kl_loss_type: keel_straight_through
    algorithm.adv_estimator: keel_grpo
    algorithm.kl_penalty: keel_k1

Numbers are verl's own, except where verl errs:

* tokens that do not count contribute nothing, even if they are NaN; verl's `seq-mean-` reductions
  multiply by 0, and NaN · 0 is NaN;
* a log-ratio that is not finite is quarantined and counted; verl clamps it to 20 and trains on a
  ratio of 5e8;
* a group of one answer has no baseline, hence no advantage; verl takes its raw score;
* the estimate of KL that is logged (`actor/keel_kl`) is never negative; `actor/ppo_kl` is k1;
* k3 keeps its gradient where drift is worst; verl clamps its value at 10;
* an estimator that does not descend KL in its place warns: k1 or k3 in the loss, k3 in the reward.

verl's KL to the reference is not told the old policy: in a loss these forms are right on the first
step after a rollout, and miss the ratio on later ones.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from keel.errors import InputError, check_choice
from keel.functional import (
    Ratio,
    aggregate,
    denominator,
    dr_grpo,
    grpo,
    k3,
    kl_loss,
    kl_reward,
    policy_ratio,
    ratio_report,
    reinforce_pp,
    rloo,
    surrogate,
)
from keel.functional.reduce import Reduction

PREFIX = "keel_"
MODES: Mapping[str, Reduction] = {
    "token-mean": "token-mean",
    "token-sum": "token-sum",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum-norm": "constant",
}
"""verl's `loss_agg_mode`, as `functional.aggregate` calls it."""
KL_FORMS = ("k1", "k2", "k3", "ratio_k3", "straight_through")
"""Names, behind the prefix, for `kl_penalty` (in the reward) and `kl_loss_type` (in the loss)."""


class Terms(NamedTuple):
    """Inputs of a surrogate for a micro-batch; tensors are `[B, L]`."""

    ratio: Ratio
    log_prob: Tensor
    advantage: Tensor
    low: float
    high: float
    config: Any
    """verl's `ActorConfig`"""


class Loss(NamedTuple):
    """Loss per token, `[B, L]` each."""

    loss: Tensor
    clipped: Tensor
    """bool: PPO's clip decided"""
    cut: Tensor | None = None
    """bool: the second clip, for bad actions, decided"""


def clip(terms: Terms) -> Loss:
    """Return PPO's clipped loss, with `clip_ratio_low` and `clip_ratio_high`."""
    return Loss(*surrogate.clip(terms.ratio.ratio, terms.advantage, terms.low, terms.high))


def dual_clip(terms: Terms) -> Loss:
    """Return the dual-clipped loss with `clip_ratio_c`, as verl's `vanilla` computes it."""
    single = clip(terms)
    bound = float(terms.config.clip_ratio_c)
    result = surrogate.dual_clip(
        terms.ratio.ratio, terms.advantage, terms.low, terms.high, bound=bound
    )
    return Loss(result.loss, single.clipped, result.clipped & ~single.clipped)


def sequence(terms: Terms) -> Loss:
    """Return GSPO's loss: one ratio for a sequence, the geometric mean of its tokens'.

    In its token form (GSPO-token in arXiv 2507.18071): each token has its own advantage's gradient.
    """
    sequence_log_ratio = surrogate.sequence_log_ratio(
        terms.ratio.log_ratio, terms.ratio.weight
    ).detach()
    token_gradient = terms.ratio.log_ratio - terms.ratio.log_ratio.detach()
    ratio = (sequence_log_ratio + token_gradient).exp()
    return Loss(*surrogate.clip(ratio, terms.advantage, terms.low, terms.high))


def cispo(terms: Terms) -> Loss:
    """Return CISPO's loss: the weight is clipped, not the gradient."""
    ratio = terms.ratio.ratio
    return Loss(*surrogate.cispo(terms.log_prob, ratio, terms.advantage, terms.low, terms.high))


def unclipped(terms: Terms) -> Loss:
    """Return TRPO's surrogate, where the step is bounded in another way."""
    return Loss(*surrogate.unclipped(terms.ratio.ratio, terms.advantage))


def penalty(terms: Terms) -> Loss:
    """Return `unclipped` plus `policy_loss.ppo_kl_coef` × KL(old‖new), with its gradient."""
    surrogate_loss = unclipped(terms)
    coef = float(terms.config.policy_loss.ppo_kl_coef)
    return surrogate_loss._replace(loss=surrogate_loss.loss + coef * _kl_old_new(terms.ratio))


POLICY_LOSSES: Mapping[str, Callable[[Terms], Loss]] = {
    "clip": clip,
    "dual_clip": dual_clip,
    "sequence": sequence,
    "cispo": cispo,
    "unclipped": unclipped,
    "penalty": penalty,
}


def policy_loss(
    name: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return a loss of `POLICY_LOSSES` in the form verl calls, and its metrics.

    Args:
        name: of the loss.
        old_log_prob: log π_old of the tokens `[B, L]`.
        log_prob: log π of the tokens `[B, L]`.
        advantages: `[B, L]`.
        response_mask: `[B, L]`, 1 for tokens that the policy wrote.
        loss_agg_mode: verl's name of the reduction.
        config: verl's `ActorConfig`.
        rollout_is_weights: `[B, L]`, correction for a sampler that differs from the trainer.
    """
    surrogate_of = POLICY_LOSSES[check_choice("policy loss", name, POLICY_LOSSES)]
    if config is None:
        raise InputError(f"{PREFIX}{name}: config is missing; verl's actor passes its own")
    mask = response_mask.to(log_prob.dtype)
    ratio = policy_ratio(log_prob, old_log_prob, mask)
    low, high = (
        float(config.clip_ratio if bound is None else bound)
        for bound in (config.clip_ratio_low, config.clip_ratio_high)
    )
    token_loss = surrogate_of(Terms(ratio, log_prob, advantages, low, high, config))
    loss = token_loss.loss if rollout_is_weights is None else token_loss.loss * rollout_is_weights
    info = config.global_batch_info
    return mean_loss(loss, ratio.weight, mask, loss_agg_mode, info), _metrics(token_loss, ratio)


def mean_loss(
    loss: Tensor, weight: Tensor, mask: Tensor, mode: str, info: Mapping[str, Any]
) -> Tensor:
    """Return Σ weight · loss over the denominator of the whole batch, as verl's `agg_loss` does.

    `info` is its `global_batch_info`; without it the denominator is that of this `mask` `[B, L]`.
    Ranks are averaged afterwards, so the denominator is divided by their number.
    """
    reduction = MODES[check_choice("loss_agg_mode", mode, MODES)]
    ranks = info.get("dp_size") or 1
    constant = None
    if reduction == "constant":
        constant = float(info.get("loss_scale_factor") or mask.shape[-1])
    batch_size = info.get("batch_num_tokens" if reduction == "token-mean" else "global_batch_size")
    if reduction == "token-sum" or batch_size is None:
        if ranks > 1 and reduction != "token-sum":
            raise InputError(
                f"loss_agg_mode {mode}: with {ranks} ranks the size of the whole batch is needed; "
                "verl's actor gives it in global_batch_info"
            )
        divisor = denominator(mask, reduction, constant=constant)
    else:
        divisor = torch.as_tensor(batch_size, dtype=loss.dtype, device=loss.device) * (
            constant or 1.0
        )
    return aggregate(
        loss, weight, reduction, denominator_of_batch=divisor / ranks, constant=constant
    )


def advantage(
    name: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any = None,
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return an advantage of `ADVANTAGES` in the form verl calls: `[B, L]`, and again as return.

    Args:
        name: of the estimator.
        token_level_rewards: `[B, L]`; the score of an answer is their sum.
        response_mask: `[B, L]`, 1 for tokens that the policy wrote.
        index: the prompt of each answer `[B]`.
        config: unused; verl passes it.
    """
    estimator = ADVANTAGES[check_choice("advantage", name, ADVANTAGES)]
    if index is None:
        raise InputError(f"{PREFIX}{name}: needs the prompt of every answer (uid), got none")
    score = token_level_rewards.sum(-1)
    names, group = np.unique(np.asarray(index), return_inverse=True)
    keys = torch.from_numpy(group.reshape(-1)).to(score.device)
    mask = response_mask.to(score.dtype)
    advantages = estimator(score, keys, len(names)).unsqueeze(-1) * mask
    return advantages, advantages


def _reinforce_pp(score: Tensor, group: Tensor, groups: int) -> Tensor:
    return reinforce_pp(score)


ADVANTAGES: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": _reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp,
}


def kl(name: str, log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return an estimate of KL(π‖π_ref) `[B, L]`: a term of the loss where π has a gradient."""
    check_choice("KL estimate", name, KL_FORMS)
    estimator = kl_loss if log_prob.requires_grad else kl_reward
    return estimator(name, log_prob, ref_log_prob)


_LOSSES = {name: partial(policy_loss, name) for name in POLICY_LOSSES}
_ADVANTAGES = {name: partial(advantage, name) for name in ADVANTAGES}


def register() -> tuple[str, ...]:
    """Register all of them with verl and return their names; a second call changes nothing."""
    core = _core_algos()
    for name, loss in _LOSSES.items():
        core.register_policy_loss(f"{PREFIX}{name}")(loss)
    for name, estimate in _ADVANTAGES.items():
        core.register_adv_est(f"{PREFIX}{name}")(estimate)
    _extend_kl(core)
    return tuple(f"{PREFIX}{name}" for name in (*POLICY_LOSSES, *ADVANTAGES, *KL_FORMS))


def _core_algos() -> Any:
    try:
        core = importlib.import_module("verl.trainer.ppo.core_algos")
    except ImportError as error:
        raise InputError(f"verl cannot be imported ({error}): pip install verl") from error
    required = ("register_policy_loss", "register_adv_est", "kl_penalty_forward")
    missing = [name for name in required if not hasattr(core, name)]
    if missing:
        raise InputError(f"verl: {', '.join(missing)} not found; Keel knows verl 0.9")
    return core


def _extend_kl(core: Any) -> None:
    """Add names to the function that all of verl's KL estimates pass: they have no registry."""
    original = core.kl_penalty_forward
    if hasattr(original, "without_keel"):
        return

    def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
        if kl_penalty.startswith(PREFIX):
            return kl(kl_penalty.removeprefix(PREFIX), logprob, ref_logprob)
        return cast(Tensor, original(logprob, ref_logprob, kl_penalty))

    kl_penalty_forward.without_keel = original  # type: ignore[attr-defined]
    core.kl_penalty_forward = kl_penalty_forward


def _kl_old_new(ratio: Ratio) -> Tensor:
    """Return r − 1 − log r `[B, L]`, an estimate of KL(old‖new), since the samples are old's."""
    return k3(torch.zeros_like(ratio.log_ratio), ratio.log_ratio)


@torch.no_grad()
def _metrics(token_loss: Loss, ratio: Ratio) -> dict[str, float]:
    """Return metrics under verl's names, so that its plots go on, and under Keel's."""

    def mean(x: Tensor) -> float:
        return float(aggregate(x.to(ratio.weight.dtype), ratio.weight))

    report = ratio_report(ratio)
    return {
        "actor/pg_clipfrac": mean(token_loss.clipped),
        "actor/pg_clipfrac_lower": 0.0 if token_loss.cut is None else mean(token_loss.cut),
        "actor/ppo_kl": mean(-ratio.log_ratio),
        "actor/keel_kl": mean(_kl_old_new(ratio)),
        "actor/keel_ratio_max": float(report.ratio_max),
        "actor/keel_effective_sample_size": float(report.effective_sample_size),
        "actor/keel_quarantined": float(report.non_finite_count),
    }


if importlib.util.find_spec("verl") is not None:
    register()
