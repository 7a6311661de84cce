"""The consistency gate: before the first step the policy must be the one that sampled.

All rows are replayed in the first updates, and in every tenth after them; in between the first pass
of the objective tells its largest |log-ratio|, and one that is too large, or a KL that is out of
all proportion, has all rows replayed at once. Numbers that are not finite stop an update, too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from keel.errors import KeelError
from keel.experience.batch import Batch, chunks
from keel.networks.agent import Agent
from keel.trust_region.measure import measure
from keel.types import Tree

GATE = 1e-3
"""Largest |log-ratio| in float32 with which a replay may differ from its sampling."""
KL_GATE = 1e-4
"""Largest KL, in nats, between the distribution that was stored with a row and the one replayed."""
NARROW = 1e-2
"""A standard deviation below this, for means near 0, is allowed more in proportion."""
FIRST_UPDATES, EVERY = 10, 10
"""All rows are replayed in so many updates at first, and once in so many after them."""
ODD = 100.0
"""A KL of this many times its bound is out of all proportion: the rows are replayed at once."""

BAD_STEPS = 10
"""So many steps of one update may be skipped for a gradient that is not finite."""


class ConsistencyError(KeelError):
    """The policy that is trained is not the policy that sampled."""


def is_due(update: int) -> bool:
    """Return whether all rows are replayed before an update, counted from 0."""
    return update < FIRST_UPDATES or update % EVERY == 0


def is_odd(gap: float, requested: Tensor, max_kl: float) -> bool:
    """Return whether what an update has seen asks for a replay of all rows.

    Args:
        gap: largest |log-ratio| of the objective's first pass; NaN if it cannot be judged by that.
        requested: `[G]`, the KL of the whole step.
        max_kl: its bound.
    """
    return gap > GATE or not bool((requested <= ODD * max_kl).all())


def check_replay(
    agent: Agent, params: Tensor, batch: Batch, temperature: float, enforce: bool
) -> float:
    """Replay all rows at the parameters that sampled them.

    Args:
        agent: whose policy it is.
        params: `[G, P]`, those that sampled.
        batch: a rollout; where it says how it was sampled, that counts.
        temperature: of the policy, for one that does not say.
        enforce: raise where the replay differs.

    Returns:
        The largest |log-ratio|: 0, up to rounding.

    Raises:
        NumericError: the policy gives NaN.
        ConsistencyError: it is another policy, and `enforce` is on.
    """
    temperature, batch = batch.sampled_at(temperature), batch.as_sampled()
    replayed = measure(agent, params, batch, temperature)
    usable = batch.log_prob.isfinite()  # what is not will be quarantined: it is no other policy
    lost = replayed.ratio.quarantined & usable
    gap = torch.where(lost, torch.inf, replayed.ratio.raw_log_ratio.abs())
    slack = _slack(batch.behavior)
    wrong = gap > GATE * slack
    other = (batch.weight > 0) & usable & ~(replayed.kl <= KL_GATE * slack**2)
    if enforce and bool((wrong | other).any()):
        raise ConsistencyError(_message(agent, params, batch, temperature, gap, wrong, other))
    return gap.max().item()


def _slack(policy: Tree) -> Tensor | float:
    """Return the factor on what is allowed: the rounding of a Gaussian's mean counts by how narrow
    the Gaussian is."""
    if not {"mean", "log_std"} <= policy.keys():
        return 1.0
    narrow = (1.0 + policy["mean"].abs()) * torch.exp(-policy["log_std"])
    return (NARROW * narrow.amax(-1)).clamp(min=1.0)


def _message(
    agent: Agent,
    params: Tensor,
    batch: Batch,
    temperature: float,
    gap: Tensor,
    wrong: Tensor,
    other: Tensor,
) -> str:
    """Say what is wrong, and why, as far as the first piece of the rows that is tells.

    Raises:
        NumericError: the policy gives NaN.
    """
    from keel.trust_region.diagnosis import Replay, cause

    bad = wrong | other
    index = next(index for index in chunks(batch) if bool(bad[index].any()))
    part = batch.part(index)
    replay = Replay(
        agent,
        params,
        part.obs,
        part.old_policy,
        part.action,
        part.log_prob,
        bad[index],
        temperature,
    )
    if bool((agent.dist.log_prob(replay.policy(), replay.action).isnan() & replay.wrong).any()):
        raise _not_a_number(params, batch)
    counts = (batch.weight > 0).sum().clamp(min=1)
    share = (bad.sum() / counts).item()
    fault = (
        f"replaying the rollout gives |log-ratio| up to {gap.max():.3g} before any step (allowed "
        f"{GATE:g})"
        if bool(wrong.any())
        else "the distributions stored with the rollout are not those that replaying it gives "
        "before any step, though the log-probs are"
    )
    return (
        f"consistency gate: {fault}, on {share:.2%} of the rows. The policy that is trained is not "
        f"the one that sampled. {cause(replay)}"
    )


def replay_gap(agent: Agent, params: Tensor, batch: Batch, temperature: float) -> float:
    """Return the largest |log-ratio| of a minibatch at `params`.

    Raises:
        NumericError: the policy gives NaN.
    """
    with torch.no_grad():
        policy = agent.policy(params, batch.obs, temperature)
        log_prob = agent.dist.log_prob(policy, batch.action)
    counts = batch.weight > 0
    if bool((log_prob.isnan() & counts).any()):
        raise _not_a_number(params, batch)
    gap = torch.where(counts & batch.log_prob.isfinite(), log_prob - batch.log_prob, 0.0)
    return gap.abs().max().item()


def _not_a_number(params: Tensor, batch: Batch) -> Exception:
    tensors = {f"obs.{key}": x.float() for key, x in batch.obs.items()}
    return not_finite("the policy's output", 0, params, tensors | {"log_prob": batch.log_prob})


def check_objective(gap: float, replayed: float, enforce: bool) -> None:
    """Raise if the first step sees another policy than a replay of the same rows.

    It would learn from something else than was sampled: its objective forgets the temperature, say.
    What is not finite is quarantined, and not compared.
    """
    if enforce and math.isfinite(gap) and gap > replayed + GATE:
        raise ConsistencyError(
            f"consistency gate: replaying the rollout gives |log-ratio| up to {replayed:.3g}, but "
            f"the objective's own pass sees {gap:.3g} before any step. It evaluates the policy "
            "in another way: at another temperature, with other masks, or on other observations."
        )


class NumericError(KeelError):
    """The loss or the gradients are not finite; `tensors` hold the minibatch and the parameters."""

    def __init__(self, message: str, tensors: Tree) -> None:
        super().__init__(message)
        self.tensors = tensors


def not_finite(what: str, skipped: int, params: Tensor, minibatch: Tree) -> NumericError:
    """Return the error of a step that was skipped; it names the columns that are to blame."""
    wrong = [name for name, x in minibatch.items() if not x.isfinite().all()]
    cause = f"not finite in the minibatch: {', '.join(wrong)}" if wrong else "the minibatch is fine"
    large = max((x.abs().max().item(), name) for name, x in minibatch.items() if x.numel())
    return NumericError(
        f"{what} is not finite (steps skipped, none applied: {skipped}); {cause}; "
        f"its largest number is {large[0]:.3g} ({large[1]}), the largest parameter "
        f"{params.abs().max().item():.3g}. Usual causes: rewards or observations of great size "
        "(normalize them), a learning rate that is too high",
        {**minibatch, "params": params},
    )
