"""Checks before the first update; each failure names its cause.

Every check is a pass or two over a handful of completions. They cost a second, and what they find
would otherwise look like a run that learns badly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from keel.algorithms.optimizer import Minibatch, initial_opt_state
from keel.apps.language.source import PromptSource
from keel.apps.language.tasks import held_out
from keel.distributions.vocabulary import HEAD
from keel.errors import KeelError
from keel.experience.completions import Completions
from keel.functional import aggregate
from keel.losses.token import TokenObjective
from keel.networks.causal_lm import ATTENTION, RESPONSE_MASK, TOKENS
from keel.types import HyperParams, OptimizerState, Tree

TOLERANCE = 1e-3
"""Largest difference of log-probs in float32 that were computed in two ways."""
ROWS = 4


class PreflightError(KeelError):
    """A condition of training does not hold."""


class Check(NamedTuple):
    """One condition that must hold."""

    name: str
    value: float
    """how far from holding; 0 is perfect"""
    limit: float
    cause: str
    """what to look for where it does not"""

    @property
    def holds(self) -> bool:
        """Whether the value is inside its limit."""
        return self.value <= self.limit


def preflight(source: PromptSource, params: Tensor, reference: Tensor | None = None) -> list[Check]:
    """Run all checks, on completions of held-out prompts.

    Args:
        source: of the run.
        params: `[1, P]`, those that RL begins with.
        reference: `[1, P]` of the reference policy; None without one.
    """
    examples = held_out(source.task, ROWS)
    rng = torch.Generator(source.device).manual_seed(source.seeds.evaluation)
    completions = source.complete(params, examples, rng)
    if source.tools is not None:
        source.tools.report()
    again = _log_probs(source, params, completions.obs, completions)
    checks = [
        _dropout(source),
        Check(
            "ratio ≡ 1",
            _gap(again, completions.log_prob, completions),
            TOLERANCE,
            "the model that is trained does not give the log-probs that were sampled: dropout, "
            "another temperature, shifted labels, a cache that went wrong, or other weights",
        ),
        Check(
            "padding",
            _gap(
                _log_probs(source, params, _padded(source, completions), completions),
                again,
                completions,
            ),
            TOLERANCE,
            "padding at the left changes log-probs: attention mask or positions ignore it",
        ),
        Check(
            "shift",
            _shift(source, params, completions),
            1e-6,
            "a token's distribution changes with the token, or with what stands behind it: labels "
            "are off by one, or the model sees the future",
        ),
        Check(
            "micro-batch",
            _micro(source, params, completions),
            1e-4,
            "the gradient of a minibatch is not that of its micro-batches together: something is "
            "averaged per micro-batch",
        ),
    ]
    if reference is not None:
        kl = _reference_kl(source, params, reference, completions)
        checks.append(
            Check(
                "KL to the reference ≡ 0",
                kl,
                1e-6,
                "the reference is not where RL begins: other weights, or another temperature",
            )
        )
    return checks


def require(checks: list[Check]) -> None:
    """Raise a `PreflightError` that names every cause, unless all hold."""
    failed = [check for check in checks if not check.holds]
    if failed:
        causes = "; ".join(
            f"{check.name}: off by {check.value:.3g} (allowed {check.limit:g}): {check.cause}"
            for check in failed
        )
        raise PreflightError(f"preflight: {causes}")


def _dropout(source: PromptSource) -> Check:
    """Check that no part of the model drops what it computes."""
    active = [
        module.p
        for module in source.agent.network.modules()
        if isinstance(module, nn.Dropout) and module.training
    ]
    cause = "dropout is on: what is trained is never what sampled; put the model into eval mode"
    return Check("dropout off", max(active, default=0.0), 0.0, cause)


@torch.no_grad()
def _log_probs(source: PromptSource, params: Tensor, obs: Tree, completions: Completions) -> Tensor:
    policy = source.agent.policy(params, obs, source.sampling.temperature)
    return source.agent.dist.log_prob(policy, completions.action)


def _gap(a: Tensor, b: Tensor, completions: Completions) -> float:
    return torch.where(completions.response_mask > 0, a - b, 0.0).abs().max().item()


def _padded(source: PromptSource, completions: Completions, extra: int = 3) -> Tree:
    """Return the same texts with more padding at the left."""
    rows = completions.tokens.shape[0]
    tokens = completions.tokens.new_full((rows, extra), source.pad)
    return {
        TOKENS: torch.cat([tokens, completions.tokens], 1),
        ATTENTION: torch.cat([tokens.bool() & False, completions.attention], 1),
        RESPONSE_MASK: completions.response_mask,
    }


@torch.no_grad()
def _shift(source: PromptSource, params: Tensor, completions: Completions) -> float:
    """Return the KL in nats by which a distribution notices exchanged tokens at and behind it."""
    agent, temperature = source.agent, source.sampling.temperature
    length = completions.response_mask.shape[1]
    half = max(1, length // 2)
    tokens = completions.tokens.clone()
    tokens[:, -half:] = (tokens[:, -half:] + 1) % agent.dist.n  # type: ignore[attr-defined]
    before, after = (
        agent.policy(params, {**completions.obs, TOKENS: x}, temperature)
        for x in (completions.tokens, tokens)
    )
    kl = agent.dist.kl(before, after)[:, : length - half + 1]
    return (
        torch.where(completions.completion_mask[:, : length - half + 1] > 0, kl, 0.0).max().item()
    )


def _micro(source: PromptSource, params: Tensor, completions: Completions) -> float:
    """Return the relative distance between the gradient of all rows, and of one row at a time."""
    from keel.algorithms.optimizer import make_step

    agent, batch = source.agent, completions.batch()
    sign = torch.where(torch.arange(batch.rows) % 2 == 0, 1.0, -1.0).to(batch.weight)
    nothing = torch.zeros_like(batch.weight)
    batch = batch._replace(
        advantage=torch.where(batch.weight > 0, sign[:, None], 0.0),
        target=nothing,
        old_value=nothing[..., None],
        constants={HEAD: agent.head(params)},
    )
    objective = TokenObjective(value_coef=0.0)
    index = torch.arange(batch.rows, device=params.device)
    selection = (index, torch.ones_like(index, dtype=batch.weight.dtype))
    hparams = HyperParams(temperature=source.sampling.temperature).tensor().to(params.device)
    active = torch.ones(1, dtype=torch.bool, device=params.device)
    moments: list[OptimizerState] = []
    for micro in (None, 1):
        step = make_step(agent, objective, max_grad_norm=1e9, micro=micro)
        minibatch = Minibatch(batch, *selection, hparams, active)
        moments.append(step(initial_opt_state(params), minibatch).opt_state)
    full, parts = (x.first for x in moments)
    return float((full - parts).norm() / full.norm().clamp(min=1e-30))


@torch.no_grad()
def _reference_kl(
    source: PromptSource, params: Tensor, reference: Tensor, completions: Completions
) -> float:
    agent, temperature = source.agent, source.sampling.temperature
    kl = agent.dist.kl(
        *(agent.policy(x, completions.obs, temperature) for x in (params, reference))
    )
    return aggregate(kl, completions.response_mask).item()
