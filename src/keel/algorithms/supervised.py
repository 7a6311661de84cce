"""Supervised steps on token sequences: the warm-up before RL, and the control beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keel.algorithms.optimizer import Minibatch, Step
from keel.distributions.vocabulary import Vocabulary
from keel.experience.batch import Batch, minibatches
from keel.functional.reduce import aggregate, denominator
from keel.losses.ppo import Statistics
from keel.networks.agent import Agent
from keel.types import HyperParams, OptimizerState


@dataclass(frozen=True)
class Likelihood:
    """The objective −log π of every token that counts, averaged over all of them."""

    def denominator(self, batch: Batch) -> Tensor:
        """Return the number of tokens."""
        return denominator(batch.weight)

    def __call__(
        self,
        agent: Agent,
        params: Tensor,
        batch: Batch,
        hparams: Tensor,
        total: Tensor | None = None,
    ) -> tuple[Tensor, Statistics]:
        """Return the loss `[1]`; of its statistics only loss and entropy mean anything."""
        dist = agent.dist
        assert isinstance(dist, Vocabulary)
        log_prob, entropy = dist.both(agent.policy(params, batch.obs), batch.action)
        total = self.denominator(batch) if total is None else total
        loss = aggregate(-log_prob, batch.weight, denominator_of_batch=total).reshape(1)
        spread = aggregate(entropy, batch.weight, denominator_of_batch=total).reshape(1)
        nothing = torch.zeros_like(loss.detach())
        return loss, Statistics(
            loss=loss.detach(),
            policy_loss=loss.detach(),
            value_loss=nothing,
            entropy=spread.detach(),
            kl=nothing,
            clip_fraction=nothing,
            non_finite=nothing,
            log_ratio_max=nothing,
            bc_loss=loss.detach(),
        )


def one_pass(
    state: OptimizerState,
    batch: Batch,
    size: int,
    hparams: HyperParams,
    rng: torch.Generator,
    step: Step,
) -> tuple[OptimizerState, float]:
    """Take every sequence once, in shuffled minibatches; return the mean loss per step."""
    zero = torch.zeros_like(batch.weight)
    batch = batch._replace(advantage=zero, target=zero, old_value=zero[..., None])
    hparam_values = hparams.tensor().to(state.params.device)
    active = torch.ones(1, dtype=torch.bool, device=state.params.device)
    losses = []
    for index, real in minibatches(batch.rows, size, rng):
        index, real = index.to(state.params.device), real.to(state.params.device)
        result = step(state, Minibatch(batch, index, real, hparam_values, active))
        state = result.opt_state
        losses.append(result.statistics.loss.item())
    return state, sum(losses) / len(losses)
