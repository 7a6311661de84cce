"""From the settings of a run on tokens to its source, its algorithm and its controllers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from keel.algorithms.ppo import PPO
from keel.apps.language.advantages import check_estimator
from keel.apps.language.config import Language
from keel.apps.language.models import load_model
from keel.apps.language.rewards import Overlong, Rewards, load_function
from keel.apps.language.source import PromptSource
from keel.apps.language.tasks import Task, held_out, task_named
from keel.apps.language.tools import tool_loop
from keel.controllers.controllers import Controller, ProportionalPenalty
from keel.errors import InputError, import_extra
from keel.experience.completions import Sampling
from keel.functional.reduce import Reduction
from keel.losses.token import Covariance, TokenObjective
from keel.networks.causal_lm import TokenAgent
from keel.resources import cores, expect_memory, find_device, set_threads
from keel.training.loop import derive_seeds
from keel.training.session import Session
from keel.trust_region.certify import Certified
from keel.types import HyperParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_source(
    config: Language, task: Task | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> PromptSource:
    """Make everything ready that completions need.

    Args:
        config: of the run.
        task: one of your own making; by default the one that is named.
        tokenizer: of a model that is made; by default one of single characters.
    """
    import_extra("transformers", "language")
    seeds = derive_seeds(config.seed)
    device = find_device(config.device)
    set_threads(config.threads or cores())
    task = task_named(config.task, **config.task_options) if task is None else task
    held_out(task, config.evaluation.prompts)  # whether there are so many, before work begins
    _expect_completions(config, task)
    model, tokenizer = load_model(config, seeds.network, tokenizer)
    agent = TokenAgent(model, config.critic)
    agent.to(device)
    sample = config.sample
    longest = sample.max_new_tokens or task.max_new_tokens
    tools = None
    if task.stop is not None and sample.tool_calls:
        tools = tool_loop(task, max_calls=sample.tool_calls)
    return PromptSource(
        config=config,
        seeds=seeds,
        task=task,
        tokenizer=tokenizer,
        agent=agent,
        rewards=build_rewards(config, task, longest),
        sampling=Sampling(longest, sample.temperature, sample.top_k, sample.top_p),
        tools=tools,
        device=device,
        draws=torch.Generator(device).manual_seed(seeds.actions),
        shuffle=torch.Generator().manual_seed(seeds.shuffle),
        examples=np.random.default_rng(seeds.envs),
    )


def open_session(
    config: Language, task: Task | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> Session:
    """Make everything ready that training needs, and say what was chosen; see `open_source`."""
    check_estimator(config)
    source = open_source(config, task, tokenizer)
    return Session(
        config=config,
        source=source,
        algorithm=build_algorithm(config, source),
        controllers=build_controllers(config),
        schedule=partial(_scheduled, config=config),
        initial_hparams=initial_hparams(config),
        shuffle=source.shuffle,
        choices={"threads": config.threads or cores(), "device": str(source.device)},
    )


def build_algorithm(config: Language, source: PromptSource) -> Certified:
    """Return the certified algorithm that the settings ask for."""
    region = config.region
    objective = build_objective(config, source.sampling.max_new_tokens)
    algorithm = PPO(
        source.agent,
        source.step(objective),
        epochs=region.epochs,
        minibatch=region.minibatch,
        early_stop="off" if region.target_kl is None else "minibatch",
        target_kl=region.target_kl,
        max_grad_norm=region.max_grad_norm,
        objective=objective,
        gate=region.gate,
    )
    return Certified(algorithm, region.certify, region.gate)


def initial_hparams(config: Language) -> HyperParams:
    """Return the values that schedules and controllers begin with."""
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


def build_controllers(config: Language) -> tuple[Controller, ...]:
    """Return what turns β."""
    if config.kl.place == "none" or config.kl.controller == "fixed":
        return ()
    kl = config.kl
    return (ProportionalPenalty(kl.target, kl.horizon, config.batch, kl.low, kl.high),)


def _scheduled(
    hparams: HyperParams, steps: int, set_by_hand: Collection[str], config: Language
) -> HyperParams:
    """Return the values of an iteration; the schedule follows completions."""
    if config.region.schedule == "constant" or "learning_rate" in set_by_hand:
        return hparams
    left = max(0.0, 1.0 - steps / config.total_steps)
    return replace(hparams, learning_rate=config.region.learning_rate * left)


def _expect_completions(config: Language, task: Task) -> None:
    """Refuse, before the model is made, more tokens at once than this machine can hold."""
    length = config.sample.max_new_tokens or task.max_new_tokens
    expect_memory(
        f"sample: {config.batch:,} completions of {length:,} tokens",
        64 * config.batch * length,  # the least that is kept of a token: what it is, how likely
        "use fewer sample.prompts, a smaller sample.group or sample.max_new_tokens",
    )


def build_objective(config: Language, longest: int) -> TokenObjective:
    """What the settings of the region and of the KL come down to."""
    region = config.region
    reduction: Reduction
    if region.reduction == "auto":
        reduction = "constant" if config.algo == "dr_grpo" else "token-mean"
    else:
        reduction = region.reduction
    covariance = None
    if region.covariance != "none":
        covariance = Covariance(region.covariance, region.covariance_share)
    free = region.clip is None and region.form == "token"
    loss = region.loss if region.form == "token" else region.form
    return TokenObjective(
        surrogate="unclipped" if free and loss == "clip" else loss,
        dual_clip=region.dual_clip,
        reduction=reduction,
        constant=float(longest) if reduction == "constant" else None,
        value_coef=region.value_coef if config.critic != "none" else 0.0,
        value_clip=region.value_clip,
        max_log_ratio=region.max_log_ratio,
        kl=config.kl.loss if config.kl.place in ("loss", "both") else None,
        covariance=covariance,
        track_kl=region.target_kl is not None,
    )


def build_rewards(config: Language, task: Task, longest: int) -> Rewards:
    """The task's verifier, or the functions that the settings name."""
    settings = config.reward
    functions: dict[str, Any] = {"task": task.verify}
    weights: dict[str, float] = {}
    if settings.functions:
        functions = {}
        for part in settings.functions:
            name, star, weight = part.partition("*")
            name = name.strip()
            label = name.rpartition(":")[2]
            functions[label] = task.verify if name == "task" else load_function(name)
            try:
                weights[label] = float(weight) if star else 1.0
            except ValueError:
                raise InputError(f"reward.functions: {part!r} has no number behind *") from None
    overlong = Overlong(settings.soft_length, longest) if settings.soft_length else None
    return Rewards(
        functions,
        weights or None,
        timeout=settings.timeout,
        max_failures=settings.max_failures,
        overlong=overlong,
    )
