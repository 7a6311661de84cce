"""Supervised learning on perfect completions: the warm-up before RL, and the control beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from keel.algorithms.optimizer import initial_opt_state
from keel.algorithms.supervised import Likelihood, one_pass
from keel.apps.language.judge import judge
from keel.apps.language.source import PromptSource
from keel.apps.language.tasks import Example, held_out, segments, warmup_data
from keel.experience.batch import Batch
from keel.experience.completions import pad_left
from keel.networks.causal_lm import ATTENTION, RESPONSE_MASK, TOKENS
from keel.training.persist import EvaluationStopped
from keel.training.signals import stop_requested
from keel.training.source import ProgressCallback
from keel.types import HyperParams, OptimizerState


def examples_as_batch(source: PromptSource, examples: Sequence[Example]) -> Batch:
    """Return prompts and perfect answers as rows; only tokens that the policy would write count.

    Args:
        source: with task, tokenizer and device.
        examples: R examples; rows are `[R, L]`, `<eos>` included.
    """
    tokens, attention = pad_left(
        [source.encode(example.prompt) for example in examples], source.pad
    )
    answers, weights = [], []
    for example in examples:
        ids: list[int] = []
        counts: list[float] = []
        for text, own in segments(source.task, example):
            piece = source.encode(text)
            ids += piece
            counts += [float(own)] * len(piece)
        answers.append([*ids, source.eos])
        weights.append([*counts, 1.0])
    length = max(map(len, answers))
    response_mask = torch.zeros(len(answers), length)
    action = torch.full((len(answers), length), source.pad)
    completion_mask = torch.zeros(len(answers), length, dtype=torch.bool)
    for row, (ids, counts) in enumerate(zip(answers, weights, strict=True)):
        action[row, : len(ids)] = torch.tensor(ids)
        response_mask[row, : len(ids)] = torch.tensor(counts)
        completion_mask[row, : len(ids)] = True
    obs = {
        TOKENS: torch.cat([tokens, action], 1),
        ATTENTION: torch.cat([attention, completion_mask], 1),
        RESPONSE_MASK: response_mask,
    }
    nothing = torch.zeros_like(response_mask)
    return Batch(
        obs={key: x.to(source.device) for key, x in obs.items()},
        behavior={},
        action=action.to(source.device),
        log_prob=nothing.to(source.device),
        weight=response_mask.to(source.device),
    )


def warm_up(
    source: PromptSource, on_progress: ProgressCallback | None = None
) -> tuple[OptimizerState, dict[str, float]]:
    """Imitate until enough is solved; return the optimizer, and metrics."""
    settings = source.config.warmup
    state = initial_opt_state(source.agent.initial)
    if not settings.examples:
        return state, {}
    batch = examples_as_batch(source, warmup_data(source.task, settings.examples, 0))
    step, hparams = source.step(Likelihood()), HyperParams(learning_rate=settings.learning_rate)
    score, loss, passes, epoch = 0.0, float("nan"), 0.0, 0
    looks = held_out(source.task, min(100, source.config.evaluation.prompts))
    for epoch in range(1, settings.epochs + 1):
        if stop_requested():
            raise EvaluationStopped  # there is nothing to keep yet
        state, loss = one_pass(state, batch, settings.minibatch, hparams, source.shuffle, step)
        passes += 3.0 * batch.obs[ATTENTION].sum().item()
        if epoch % settings.every == 0:
            score = judge(source, state.params, looks).success
            if on_progress is not None:
                on_progress({"epoch": float(epoch), "loss": loss, "success": score})
            if score >= settings.until:
                break
    return state, {"epochs": float(epoch), "loss": loss, "success": score, "passes": passes}


def control(
    source: PromptSource, start: Tensor, passes: float, on_progress: ProgressCallback | None = None
) -> dict[str, float]:
    """Imitate the warm-up data until as many tokens went through the model as RL took.

    It begins where RL began, and its best look counts: what more imitation can give at most. Raises
    `EvaluationStopped` if the process was asked to stop.
    """
    settings = source.config.warmup
    batch = examples_as_batch(source, warmup_data(source.task, settings.examples, 0))
    step, hparams = source.step(Likelihood()), HyperParams(learning_rate=settings.learning_rate)
    cost = 3.0 * batch.obs[ATTENTION].sum().item()
    state = initial_opt_state(start)
    most, epochs = -1.0, max(1, round(passes / cost))
    looks = held_out(source.task, source.config.evaluation.prompts)
    every = max(1, epochs // 10)
    rng = torch.Generator().manual_seed(source.seeds.shuffle)
    last = 0.0
    for epoch in range(1, epochs + 1):
        if stop_requested():
            raise EvaluationStopped
        state, loss = one_pass(state, batch, settings.minibatch, hparams, rng, step)
        if epoch % every == 0 or epoch == epochs:
            last = judge(source, state.params, looks).success
            most = max(most, last)
            if on_progress is not None:
                on_progress(
                    {"epoch": float(epoch), "of": float(epochs), "loss": loss, "success": last}
                )
    return {"epochs": float(epochs), "success": most, "last": last, "passes": epochs * cost}
