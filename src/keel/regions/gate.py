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
from keel.regions.diagnosis import Replay, cause
from keel.regions.faults import not_finite
from keel.regions.objective import Batch
from keel.rollout.batch import Rows
from keel.types import Knobs, Tree

GATE = 1e-3
"""Largest |log-ratio| in float32 with which a replay may differ from its sampling."""
NARROW = 1e-2
"""A standard deviation below this, for means near 0, is allowed more in proportion."""


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
        log_prob = agent.dist.log_prob(policy, batch.action)
    counts = batch.weight > 0
    if bool((log_prob.isnan() & counts).any()):
        seen = {f"obs.{key}": x.float() for key, x in batch.obs.items()}
        raise not_finite("the policy's output", 0, params, seen | {"log_prob": batch.log_prob})
    # what was stored and is not finite will be quarantined: it is no other policy
    gap = torch.where(counts & batch.log_prob.isfinite(), log_prob - batch.log_prob, 0.0).abs()
    worst = gap.max().item()
    wrong = gap > _allowed(policy)
    if enforce and bool(wrong.any()):
        replay = Replay(
            agent,
            params,
            batch.obs,
            batch.behaviour,
            batch.action,
            batch.log_prob,
            wrong,
            knobs.temperature,
        )
        raise ConsistencyError(
            f"consistency gate: replaying the rollout gives |log-ratio| up to {worst:.3g} "
            f"before any step (allowed {GATE:g}), on {wrong.double().mean():.0%} of the "
            "rows looked at. The policy that is trained is not the one that sampled. "
            f"{cause(replay)}"
        )
    return worst


def check_objective(seen: float, replayed: float, enforce: bool) -> float:
    """The gap that counts, of what the first step saw and what replaying gives.

    A step that sees another policy than the replay learns from something else than was sampled: its
    objective forgets the temperature, say. What is not finite is quarantined, and not compared.
    """
    if not math.isfinite(seen):
        return replayed
    if enforce and seen > replayed + GATE:
        raise ConsistencyError(
            f"consistency gate: replaying the rollout gives |log-ratio| up to {replayed:.3g}, but "
            f"the objective's own pass sees {seen:.3g} before any step. It evaluates the policy "
            "in another way: at another temperature, with other masks, or on other observations."
        )
    return max(seen, replayed)


def _allowed(policy: Tree) -> Tensor | float:
    """Rounding of a Gaussian's mean counts by how narrow the Gaussian is."""
    if "log_std" not in policy:
        return GATE
    narrow = (1.0 + policy["mean"].abs()) * torch.exp(-policy["log_std"])
    return GATE * (NARROW * narrow.amax(-1)).clamp(min=1.0)
