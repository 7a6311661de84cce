"""The minibatch objective: surrogate, value, entropy and KL, each per element, then averaged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from keel.config.common import LOSSES
from keel.distributions.actions import Dist
from keel.errors import InputError
from keel.experience.batch import Batch, DemoBatch
from keel.functional.ratio import MAX_LOG_RATIO, Ratio, policy_ratio
from keel.functional.reduce import aggregate, denominator
from keel.losses.surrogates import SurrogateFunction, SurrogateHparams, evaluate
from keel.networks.agent import Agent
from keel.types import HPARAM_INDEX, Tree


class Statistics(NamedTuple):
    """Means over a minibatch, `[G]` each."""

    loss: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    kl: Tensor
    """exact KL(old‖new) on the minibatch, before its step"""
    clip_fraction: Tensor
    non_finite: Tensor
    """how many samples were quarantined"""
    log_ratio_max: Tensor
    """largest |log-ratio| before the step; NaN if any is not finite"""
    bc_loss: Tensor
    """loss on demonstrations, before its coefficient; 0 without"""


@dataclass(frozen=True)
class Objective:
    """loss = surrogate + value_coef·value − entropy_coef·H + kl_coef·KL(old‖new) + floor
    + bc_coef·cloning."""

    surrogate: str | SurrogateFunction = "clip"
    """a name of `keel.config.common.LOSSES`, or a function"""
    dual_clip: float | None = None
    value_coef: float = 0.5
    value_clip: float | None = None
    max_log_ratio: float = MAX_LOG_RATIO
    penalize: bool = False
    """add `HyperParams.kl_coef` × the exact KL"""
    track_kl: bool = True
    """measure the KL of every minibatch, which early stopping needs"""
    kl_measure: Literal["exact", "k1", "k3"] = "exact"
    """by the whole distribution, or estimated from the actions taken; a penalty is always exact"""
    entropy_bonus: bool = True
    """add `HyperParams.entropy_coef` × the entropy"""
    entropy_floor: float | None = None
    """entropy in nats below which a differentiable penalty sets in"""
    entropy_floor_coef: float = 0.1
    _function: SurrogateFunction = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Look up the surrogate; refuse a floor under an entropy that is not computed: its gradient
        would be 0."""
        object.__setattr__(self, "_function", LOSSES.get(self.surrogate))
        if self.entropy_floor is not None and not self.entropy_bonus:
            raise InputError("entropy_floor: needs entropy_bonus, which computes the entropy")

    def __call__(
        self, agent: Agent, params: Tensor, batch: Batch, hparams: Tensor
    ) -> tuple[Tensor, Statistics]:
        """Return the loss per group `[G]`, and its parts.

        Args:
            agent: the agent.
            params: `[G, P]`.
            batch: a minibatch.
            hparams: values in the order of `HPARAM_INDEX`.
        """
        group_axis, dist = batch.group_axis, agent.dist
        temperature = hparam(hparams, "temperature")
        evaluation = agent.evaluate(params, batch.obs, temperature)
        log_prob = dist.log_prob(evaluation.dist, batch.action)
        bound = self.max_log_ratio
        ratio = policy_ratio(log_prob, batch.log_prob, batch.weight, max_log_ratio=bound)
        weight, total = ratio.weight, denominator(ratio.weight, group_axis=group_axis)

        def mean(x: Tensor) -> Tensor:
            average = aggregate(x, weight, group_axis=group_axis, denominator_of_batch=total)
            return average.reshape(-1)

        low, high = hparam(hparams, "clip_low"), hparam(hparams, "clip_high")
        given = SurrogateHparams(low, high, self.dual_clip, log_prob, ratio.log_ratio, weight)
        policy = evaluate(self._function, ratio.ratio, batch.advantage, given)
        critic = agent.critic.loss(evaluation.value, batch.target, batch.old_value, self.value_clip)
        policy_loss, value_loss = mean(policy.loss), mean(critic)
        loss = policy_loss + self.value_coef * value_loss
        nothing = torch.zeros_like(policy_loss)
        entropy = mean(dist.entropy(evaluation.dist)) if self.entropy_bonus else nothing
        if self.entropy_bonus:
            loss = loss - hparam(hparams, "entropy_coef") * entropy
        if self.entropy_floor is not None:
            loss = loss + self.entropy_floor_coef * torch.relu(self.entropy_floor - entropy)
        kl = nothing
        if self.penalize or self.track_kl:
            kl = mean(self._kl(dist, batch.old_policy, evaluation.dist))
        if self.penalize:
            loss = loss + hparam(hparams, "kl_coef") * kl
        if self.track_kl and self.kl_measure != "exact":
            kl = mean(self._estimate(ratio.raw_log_ratio))
        cloned = nothing
        if batch.demos is not None:
            cloned = cloning_loss(agent, params, batch.demos, temperature)
            loss = loss + hparam(hparams, "bc_coef") * cloned
        return loss, Statistics(
            loss=loss.detach(),
            policy_loss=policy_loss.detach(),
            value_loss=value_loss.detach(),
            entropy=entropy.detach(),
            kl=kl.detach(),
            clip_fraction=mean(policy.clipped.to(kl.dtype)),
            non_finite=count_quarantined(ratio, group_axis),
            log_ratio_max=largest_log_ratio(ratio, group_axis),
            bc_loss=cloned.detach(),
        )

    def _kl(self, dist: Dist, old: Tree, new: Tree) -> Tensor:
        """Return KL(old‖new) per element; it has a gradient only where it is a penalty."""
        with torch.set_grad_enabled(self.penalize):
            return dist.kl(old, new)

    def _estimate(self, log_ratio: Tensor) -> Tensor:
        """Estimate KL(old‖new) from actions of the old policy; 0 where quarantined."""
        from keel.functional.estimators import kl_estimate

        moved = log_ratio.detach().nan_to_num(0.0, 0.0, 0.0)
        return kl_estimate(self.kl_measure, -moved, torch.zeros_like(moved))


def hparam(hparams: Tensor, name: str) -> Tensor:
    """Return one of the values in force, 0-d."""
    return hparams[HPARAM_INDEX[name]]


def count_quarantined(ratio: Ratio, group_axis: int | None = None) -> Tensor:
    """Return how many elements per group were quarantined, `[G]`."""
    lost = ratio.quarantined.to(ratio.ratio.dtype)
    return aggregate(lost, reduction="token-sum", group_axis=group_axis).reshape(-1)


def largest_log_ratio(ratio: Ratio, group_axis: int | None = None) -> Tensor:
    """Return the largest |log-ratio| per group, `[G]`; NaN if any is not finite."""
    size = torch.where(ratio.quarantined, torch.nan, ratio.raw_log_ratio.abs())
    if group_axis is None:
        return size.max().reshape(1)
    return size.movedim(group_axis, 0).flatten(1).amax(1)


def cloning_loss(
    agent: Agent, params: Tensor, demos: DemoBatch, temperature: float | Tensor
) -> Tensor:
    """Return the mean of −weight · log π over demonstrated steps that are no padding, `[1]`.

    Args:
        agent: a single agent.
        params: `[1, P]`.
        demos: demonstrated steps.
        temperature: of the policy.
    """
    policy = agent.policy(params, demos.obs, temperature)
    log_prob = agent.dist.log_prob(policy, demos.action)
    return -(demos.weight * log_prob).sum().reshape(1) / demos.real.sum().clamp(min=1.0)
