"""The minibatch objective of token-level RL: rows are sequences `[R, L]`, what does not count has
weight 0.

loss = surrogate + value_coef·value − entropy_coef·H + kl_coef·KL(π‖reference)

Every term is per token; one reduction averages all of them, with the denominator of the whole
minibatch, so that micro-batches add up to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from keel.config.common import LOSSES
from keel.distributions.vocabulary import HEAD, HIDDEN, Vocabulary
from keel.experience.batch import Batch
from keel.functional.estimators import kl_loss
from keel.functional.ratio import MAX_LOG_RATIO, Ratio, policy_ratio
from keel.functional.reduce import Reduction, aggregate, denominator
from keel.functional.surrogate import Surrogate
from keel.functional.vocabulary import MAX_ELEMENTS, vocabulary_kl
from keel.losses.ppo import Statistics, largest_log_ratio
from keel.losses.surrogates import SurrogateFunction, SurrogateHparams, evaluate
from keel.networks.agent import Agent
from keel.types import HPARAM_INDEX

REFERENCE, REFERENCE_HIDDEN, IMPORTANCE = "reference", "reference_hidden", "importance"
"""Keys beside the model's observations: log-probs `[R, L]` and hidden states `[R, L, H]` of the
reference, and weights `[R, L]` for tokens that another distribution drew."""
REFERENCE_HEAD = "reference_head"
"""Key among a batch's constants: `[V, H]` of the reference's hidden states."""


class Covariance(NamedTuple):
    """Tokens whose log-prob and advantage vary together most drain the entropy (arXiv 2505.22617).

    Of the tokens with a covariance in [`low`, `high`] the `share` with the largest ones loses its
    gradient (`clip`), or the `share` with the largest of all is held by |log-ratio| times `coef`
    (`kl`).
    """

    kind: Literal["clip", "kl"]
    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    coef: float = 1.0


@dataclass(frozen=True)
class TokenObjective:
    """The objective on tokens that is minimised; `kl_coef` and the clip are `HyperParams`."""

    surrogate: str | SurrogateFunction = "clip"
    """a name of `keel.config.common.LOSSES`, or a function"""
    dual_clip: float | None = None
    reduction: Reduction = "token-mean"
    constant: float | None = None
    """of the reduction `constant`: the longest answer permitted"""
    value_coef: float = 0.5
    value_clip: float | None = None
    max_log_ratio: float = MAX_LOG_RATIO
    kl: str | None = None
    """the term against the reference: `k2`, `ratio_k3`, `weighted_k2`, `straight_through`, `full`
    (exact); others warn"""
    covariance: Covariance | None = None
    track_kl: bool = False
    """measure the exact KL(old‖new) of every minibatch, which early stopping needs"""
    max_elements: int = MAX_ELEMENTS
    """logits held at once"""
    _function: SurrogateFunction = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Look up the surrogate."""
        object.__setattr__(self, "_function", LOSSES.get(self.surrogate))

    def denominator(self, batch: Batch) -> Tensor:
        """Return the divisor of the whole minibatch, for its micro-batches."""
        return denominator(batch.weight, self.reduction, constant=self.constant)

    def __call__(
        self,
        agent: Agent,
        params: Tensor,
        batch: Batch,
        hparams: Tensor,
        total: Tensor | None = None,
    ) -> tuple[Tensor, Statistics]:
        """Return the loss `[1]`, and its parts."""

        def hparam(name: str) -> Tensor:
            return hparams[HPARAM_INDEX[name]]

        dist = agent.dist
        assert isinstance(dist, Vocabulary)
        now = agent.evaluate(params, batch.obs, hparam("temperature"))
        log_prob, entropy = dist.both(now.dist, batch.action)
        ratio = policy_ratio(
            log_prob, batch.log_prob, batch.weight, max_log_ratio=self.max_log_ratio
        )
        total = self.denominator(batch) if total is None else total

        def mean(x: Tensor) -> Tensor:
            result = aggregate(x, ratio.weight, self.reduction, denominator_of_batch=total)
            return result.reshape(1)

        policy = self._surrogate(ratio, log_prob, batch, hparam("clip_low"), hparam("clip_high"))
        importance = batch.obs.get(IMPORTANCE, torch.ones_like(log_prob))
        policy_loss, entropy_mean = mean(policy.loss * importance), mean(entropy)
        loss = policy_loss - hparam("entropy_coef") * entropy_mean
        value_loss = torch.zeros_like(loss)
        if self.value_coef:
            critic = agent.critic.loss(now.value, batch.target, batch.old_value, self.value_clip)
            value_loss = mean(critic)
            loss = loss + self.value_coef * value_loss
        if self.kl is not None:
            loss = loss + hparam("kl_coef") * mean(
                self._to_reference(batch, now.dist, ratio, log_prob)
            )
        kl = torch.zeros_like(loss)
        if self.track_kl:
            with torch.no_grad():
                kl = mean(dist.kl(batch.old_policy, now.dist))
        return loss, Statistics(
            loss=loss.detach(),
            policy_loss=policy_loss.detach(),
            value_loss=value_loss.detach(),
            entropy=entropy_mean.detach(),
            kl=kl.detach(),
            clip_fraction=mean(policy.clipped.to(loss.dtype)),
            non_finite=ratio.quarantined.sum().to(loss.dtype).reshape(1),
            log_ratio_max=largest_log_ratio(ratio),
            bc_loss=torch.zeros_like(loss),
        )

    def _surrogate(
        self, ratio: Ratio, log_prob: Tensor, batch: Batch, low: Tensor, high: Tensor
    ) -> Surrogate:
        advantage = batch.advantage
        given = SurrogateHparams(low, high, self.dual_clip, log_prob, ratio.log_ratio, ratio.weight)
        surrogate = evaluate(self._function, ratio.ratio, advantage, given)
        if self.covariance is None:
            return surrogate
        return _held(surrogate, self.covariance, ratio, log_prob.detach(), advantage)

    def _to_reference(
        self, batch: Batch, now: dict[str, Tensor], ratio: Ratio, log_prob: Tensor
    ) -> Tensor:
        """Return KL(π‖reference) per token: exact, or a form of it."""
        assert self.kl is not None
        if self.kl == "full":
            return vocabulary_kl(
                now[HIDDEN],
                now[HEAD],
                batch.obs[REFERENCE_HIDDEN],
                batch.constants[REFERENCE_HEAD],
                max_elements=self.max_elements,
            )
        usable = ratio.weight > 0
        own = torch.where(usable, log_prob, 0.0)
        other = torch.where(usable, batch.obs[REFERENCE], 0.0)
        return kl_loss(self.kl, own, other, ratio.log_ratio)


def covariances(log_prob: Tensor, advantage: Tensor, weight: Tensor) -> Tensor:
    """Return (log π − mean)·(A − mean) of every token that counts, `[R, L]`; −inf for others."""
    counts = weight > 0
    number = counts.sum().clamp(min=1)

    def centered(x: Tensor) -> Tensor:
        x = torch.where(counts, x, 0.0)
        return x - x.sum() / number

    return torch.where(counts, centered(log_prob) * centered(advantage), -torch.inf)


def _held(
    surrogate: Surrogate,
    limit: Covariance,
    ratio: Ratio,
    log_prob: Tensor,
    advantage: Tensor,
) -> Surrogate:
    """Cut the gradient of the tokens with the largest covariance, or add a penalty on them.

    The largest are taken, not a random draw among them: what is repeated comes out the same.
    """
    together = covariances(log_prob, advantage, ratio.weight)
    if limit.kind == "clip":
        inside = (together >= limit.low) & (together <= limit.high) & ~surrogate.clipped
        together = torch.where(inside, together, -torch.inf)
    count = int(limit.share * int((ratio.weight > 0).sum()))
    count = min(max(count, 1), int((together > -torch.inf).sum()))
    if not count:
        return surrogate
    chosen = torch.zeros_like(together, dtype=torch.bool).flatten()
    chosen[together.flatten().topk(count).indices] = True
    chosen = chosen.reshape(together.shape)
    if limit.kind == "clip":
        cut = torch.where(chosen, surrogate.loss.detach(), surrogate.loss)
        return Surrogate(cut, surrogate.clipped | chosen)
    penalty = limit.coef * ratio.log_ratio.abs()
    return Surrogate(
        torch.where(chosen, surrogate.loss + penalty, surrogate.loss), surrogate.clipped
    )
