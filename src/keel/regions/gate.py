"""The consistency gate: before the first step the policy must be the one that sampled.

The first minibatch's own pass tells the largest |log-ratio|; only one that is too large is looked
at again here, by what can speak.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from keel.errors import KeelError
from keel.models.agent import Agent
from keel.regions.faults import not_finite
from keel.regions.objective import Batch
from keel.rollout.batch import Rows
from keel.types import Knobs

GATE = 1e-3
"""Largest |log-ratio| in float32 with which a replay may differ from its sampling."""


class ConsistencyError(KeelError):
    """The policy that is trained is not the policy that sampled."""


def check_replay(
    agent: Agent, params: Tensor, batch: Batch | Rows, knobs: Knobs, enforce: bool
) -> float:
    """max |log-ratio| of a minibatch at the parameters that sampled it: 0, up to rounding.

    Raises:
        NumericError: the policy gives NaN.
        ConsistencyError: it is another policy, and `enforce` is on.
    """
    with torch.no_grad():
        policy = agent.policy(params, batch.obs, knobs.temperature)
        gap = agent.dist.log_prob(policy, batch.action) - batch.log_prob
    gap = torch.where(batch.weight > 0, gap, 0.0).abs()
    worst = gap.max().item()
    if math.isnan(worst):
        seen = {f"obs.{key}": x.float() for key, x in batch.obs.items()}
        raise not_finite("the policy's output", 0, params, seen | {"log_prob": batch.log_prob})
    if enforce and worst > GATE:
        raise ConsistencyError(
            f"consistency gate: replaying the first minibatch gives |log-ratio| up to {worst:.3g} "
            f"before any step (allowed {GATE:g}), on {(gap > GATE).double().mean():.0%} of its "
            "rows. The policy that is trained is not the one that sampled: look for another mask, "
            "network or temperature, dropout, exploration outside the log-prob, or observations "
            "normalised again"
        )
    return worst
