"""The loop over tokens: complete, score, learn inside the trust region, and keep the books."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.optimizer import initial_opt_state
from keel.apps.language.advantages import TokenTargets, token_targets
from keel.apps.language.config import Language
from keel.apps.language.kl_accounting import (
    Reference,
    compare_with,
    kl_spent_metrics,
    reference_metrics,
)
from keel.apps.language.session import Session
from keel.apps.language.tasks import Example, prompts
from keel.controllers.controllers import Controller, Outcome, ProportionalPenalty
from keel.experience.batch import Rows, Targets, chunks
from keel.experience.completions import Completions, Sampling
from keel.functional import explained_variance, kl_reward
from keel.losses.token import IMPORTANCE, REFERENCE, REFERENCE_HIDDEN
from keel.types import HyperParams, OptimizerState, UpdateReport


@dataclass(frozen=True)
class State:
    """Everything between two updates: what is not in here cannot be resumed."""

    steps: int
    """completions"""
    iteration: int
    opt_state: OptimizerState
    hparams: HyperParams
    reference: Tensor | None = None
    """its parameters `[1, P]`; None where nothing is pulled towards one"""
    rollbacks: int = 0
    kl_exact_max: float = 0.0
    best_return: float = -math.inf
    seconds: float = 0.0
    passes: float = 0.0
    """tokens through the model, a backward pass counting twice"""
    spent: float = 0.0
    """nats per token, over all updates"""
    start: Tensor | None = None
    """parameters `[1, P]` after the warm-up, for the control; None where there is none"""
    warm_up: dict[str, float] = dataclasses.field(default_factory=dict)
    """what came of the warm-up"""

    def replace(self, **changes: Any) -> State:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Sampled:
    """The completions of an update, for those who want to look at them."""

    examples: list[Example]
    texts: list[str]
    found: Completions
    score: Tensor
    targets: TokenTargets
    rows: Rows
    before: Tensor
    """parameters `[1, P]` that sampled"""
    reference: Reference | None


@dataclass(frozen=True)
class Iteration:
    """One update: what happened, and where the run stands."""

    state: State
    report: UpdateReport
    metrics: dict[str, float]
    session: Session
    sampled: Sampled

    @property
    def steps(self) -> int:
        """Completions so far."""
        return self.state.steps


def initial_hparams(config: Language) -> HyperParams:
    """Where schedules and controllers begin."""
    region = config.region
    low = region.clip if region.clip is not None else 0.2
    return HyperParams(
        learning_rate=region.learning_rate,
        clip_low=low,
        clip_high=region.clip_high if region.clip_high is not None else low,
        entropy_coef=region.entropy_coef,
        kl_coef=config.kl.coef if config.kl.place != "none" else 0.0,
        temperature=config.sample.temperature,
        max_kl=region.max_kl,
    )


def initial_state(session: Session, opt_state: OptimizerState | None = None) -> State:
    """Before the first update, from parameters as they are: the reference is where RL begins."""
    opt_state = initial_opt_state(session.agent.initial) if opt_state is None else opt_state
    fresh = initial_opt_state(opt_state.params)  # Adam begins anew: RL is another objective
    pulled = session.config.kl.place != "none"
    reference = opt_state.params.clone() if pulled else None
    return State(0, 0, fresh, initial_hparams(session.config), reference)


def controllers(config: Language) -> tuple[Controller, ...]:
    """What turns β."""
    if config.kl.place == "none" or config.kl.controller == "fixed":
        return ()
    kl = config.kl
    return (ProportionalPenalty(kl.target, kl.horizon, config.batch, kl.low, kl.high),)


def run(session: Session, state: State) -> Generator[Iteration, None, State]:
    """Iterate until the configured number of completions."""
    while state.steps < session.config.total_steps:
        iteration = iterate(session, state)
        state = iteration.state
        yield iteration
    return state


def iterate(session: Session, state: State) -> Iteration:
    """One update: complete, score, learn, certify, adapt."""
    config, params = session.config, state.opt_state.params
    hparams = _scheduled(state.hparams, config, state.steps)
    started = time.perf_counter()
    examples = prompts(session.task, config.sample.prompts, session.examples)
    group = config.sample.group
    found = session.complete(params, examples, session.draws, group=group)
    asked = [example for example in examples for _ in range(group)]
    texts = session.texts(found)
    completed = time.perf_counter()
    score, valid, scores = _scored(session, asked, texts, found)
    baseline = None
    if config.algo == "remax":
        baseline, judged = _likeliest(session, params, examples)
        valid = valid & judged
    weight = _weights(config, found, valid)
    agent = session.agent.sampled_by(params)
    reference = None
    if state.reference is not None:
        reference = compare_with(agent, params, state.reference, found, weight, hparams.temperature)
    rows = _rows(config, found, weight, reference)
    penalty = torch.zeros_like(weight)
    if reference is not None and config.kl.place in ("reward", "both"):
        penalty = hparams.kl_coef * kl_reward(config.kl.reward, found.log_prob, reference.log_prob)
    learned: list[TokenTargets] = []

    def targets(now: Tensor) -> Targets:
        raw = _values(session, now, rows)
        value = torch.where(weight > 0, raw[..., 0], 0.0)
        learned.append(token_targets(config, score, weight, penalty, value, baseline))
        return Targets(learned[-1].advantage, learned[-1].target, raw)

    region, step = session.region(session.objective(None if reference is None else reference.head))
    scored = time.perf_counter()
    opt_state, report = region.update(
        agent, state.opt_state, rows, targets, hparams, session.shuffle, step, state.iteration
    )
    ended = time.perf_counter()
    outcome = Outcome(
        kl=report.kl_requested.max().item(),
        return_mean=score[valid].mean().item() if bool(valid.any()) else math.nan,
        kl_reference=_measured(config, reference),
    )
    for controller in controllers(config):
        _, next_hparams = controller(
            {}, outcome, replace(hparams, learning_rate=state.hparams.learning_rate)
        )
        state = state.replace(hparams=next_hparams)
    tokens = found.response_mask.sum().item()
    state = state.replace(
        steps=state.steps + config.batch,
        iteration=state.iteration + 1,
        opt_state=opt_state,
        reference=_refreshed(config, state, opt_state.params),
        rollbacks=state.rollbacks + int(report.verdict != "accepted"),
        kl_exact_max=max(state.kl_exact_max, report.kl_exact.max().item()),
        seconds=state.seconds + ended - started,
        passes=state.passes + _passes(config, found),
        spent=state.spent + report.kl_exact.max().item(),
    )
    metrics = {
        **_completion_metrics(session, asked, texts, found, score, valid, scores),
        **report.metrics,
        **_advantage_metrics(learned[0], weight, config),
        **kl_spent_metrics(state.spent, report, found, weight),
        **(reference_metrics(reference, found, weight) if reference is not None else {}),
        "train/rollbacks": float(state.rollbacks),
        "train/learning_rate": hparams.learning_rate,
        "train/clip_range": hparams.clip_high,
        "train/entropy_coef": hparams.entropy_coef,
        "train/kl_coef": hparams.kl_coef,
        "train/temperature": hparams.temperature,
        "time/steps": float(state.steps),
        "time/seconds": state.seconds,
        "time/rollout_seconds": completed - started,
        "time/score_seconds": scored - completed,
        "time/update_seconds": ended - scored,
        "time/steps_per_second": config.batch / (ended - started),
        "time/tokens_per_second": tokens / (ended - started),
    }
    seen = Sampled(asked, texts, found, score, learned[0], rows, params, reference)
    return Iteration(state, report, metrics, session, seen)


def _scheduled(hparams: HyperParams, config: Language, steps: int) -> HyperParams:
    if config.region.schedule == "constant":
        return hparams
    left = max(0.0, 1.0 - steps / config.total_steps)
    return replace(hparams, learning_rate=config.region.learning_rate * left)


def _scored(
    session: Session, asked: list[Example], texts: list[str], found: Completions
) -> tuple[Tensor, Tensor, Any]:
    """Scores `[R]`, 0 where there is none, which of them are real, and what they are made of."""
    lengths = found.response_mask.sum(1).long().tolist()
    scores = session.rewards(asked, texts, lengths)
    valid = torch.from_numpy(scores.valid).to(session.device)
    score = torch.from_numpy(np.nan_to_num(scores.score)).float().to(session.device)
    return score, valid, scores


def _weights(config: Language, found: Completions, valid: Tensor) -> Tensor:
    """`[R, L]`: which tokens are learned from; none of completions that could not be scored."""
    weight = found.response_mask if config.sample.state_masking else found.completion_mask
    return torch.where(valid[:, None], weight, 0.0)


def _rows(
    config: Language, found: Completions, weight: Tensor, reference: Reference | None
) -> Rows:
    more: dict[str, Tensor] = {}
    if reference is not None and config.kl.place in ("loss", "both"):
        more = {REFERENCE: reference.log_prob}
        if config.kl.loss == "full":
            more[REFERENCE_HIDDEN] = reference.hidden
    if config.sample.max_importance is not None:
        gap = torch.where(found.response_mask > 0, found.log_prob - found.sampler_log_prob, 0.0)
        more[IMPORTANCE] = gap.exp().clamp(max=config.sample.max_importance)
    return replace(found.rows(**more), weight=weight)


@torch.no_grad()
def _values(session: Session, params: Tensor, rows: Rows) -> Tensor:
    """What the critic says of every token, `[R, L, 1]`; 0 without one."""
    if session.config.critic == "none":
        return torch.zeros_like(rows.weight)[..., None]
    parts = [
        session.agent.raw_value(params, {key: x[index] for key, x in rows.obs.items()})
        for index in chunks(rows)
    ]
    return torch.cat(parts)


def _likeliest(session: Session, params: Tensor, examples: list[Example]) -> tuple[Tensor, Tensor]:
    """`[R]`: what the likeliest completion of each prompt scores (ReMax 2023, arXiv 2310.10505),
    and whether it could be scored; a prompt where it could not has no baseline."""
    greedy = Sampling(session.sampling.max_new_tokens, temperature=0.0)
    found = session.complete(params, examples, session.draws, sampling=greedy)
    lengths = found.response_mask.sum(1).long().tolist()
    scores = session.rewards(examples, session.texts(found), lengths)
    known = torch.from_numpy(np.nan_to_num(scores.score)).float().to(session.device)
    valid = torch.from_numpy(scores.valid).to(session.device)
    group = session.config.sample.group
    return known.repeat_interleave(group), valid.repeat_interleave(group)


def _measured(config: Language, reference: Reference | None) -> float:
    if reference is None:
        return math.nan
    return reference.per_token if config.kl.unit == "token" else reference.per_sequence


def _refreshed(config: Language, state: State, params: Tensor) -> Tensor | None:
    """The reference after an update: as it was, a copy of the policy now and then, a follower."""
    if state.reference is None:
        return None
    if config.kl.ema:
        return torch.lerp(state.reference, params, config.kl.ema)
    due = config.kl.refresh and (state.iteration + 1) % config.kl.refresh == 0
    return params.clone() if due else state.reference


def _passes(config: Language, found: Completions) -> float:
    """Tokens through the model: once to sample, once for the reference and the certificate each,
    three times for every epoch of learning."""
    size = float(found.attention.sum().item())
    return size * (2.0 + (config.kl.place != "none") + 3.0 * config.region.epochs)


def _completion_metrics(
    session: Session,
    asked: list[Example],
    texts: list[str],
    found: Completions,
    score: Tensor,
    valid: Tensor,
    scores: Any,
) -> dict[str, float]:
    true = session.true_scores(asked, texts)
    lengths = found.response_mask.sum(1)
    known = score[valid]
    group = session.config.sample.group
    metrics = {
        "rollout/return_mean": known.mean().item() if known.numel() else math.nan,
        "rollout/return_std": known.std(unbiased=False).item() if known.numel() else math.nan,
        "rollout/success": float(true.mean()),
        "rollout/length_mean": lengths.mean().item(),
        "rollout/ended": found.ended.float().mean().item(),
        "rollout/episodes": float(len(asked)),
        "rollout/informative": _informative(score, valid, group),
        "rollout/failures": float(sum(scores.failures.values())),
        **{f"rollout/reward/{name}": value for name, value in scores.means().items()},
    }
    if session.tools is not None:
        report = session.tools.report()
        metrics["rollout/tool_calls"] = report.calls / len(asked)
        metrics["rollout/tool_failures"] = float(sum(report.failures.values()))
    return metrics


def _informative(score: Tensor, valid: Tensor, group: int) -> float:
    """The share of prompts whose completions scored differently; NaN where they are alone."""
    if group < 2:
        return math.nan
    table, good = score.reshape(-1, group), valid.reshape(-1, group)
    high = torch.where(good, table, -torch.inf).amax(1)
    low = torch.where(good, table, torch.inf).amin(1)
    return (high > low).float().mean().item()


def _advantage_metrics(found: TokenTargets, weight: Tensor, config: Language) -> dict[str, float]:
    counts = weight > 0
    raw = found.raw[counts]
    metrics = {
        "train/advantage_raw_mean": raw.mean().item() if raw.numel() else math.nan,
        "train/advantage_raw_std": raw.std(unbiased=False).item() if raw.numel() else math.nan,
    }
    if config.algo == "ppo" and raw.numel():
        value = found.target[counts] - raw
        metrics["train/explained_variance"] = explained_variance(value, found.target[counts]).item()
    return metrics
