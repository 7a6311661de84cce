"""Checks of the configuration of a run on tokens, before anything is created."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from keel.apps.language.registries import REWARDS, TASKS
from keel.config import named_values
from keel.config.checks import check_numbers
from keel.config.registries import LOSSES
from keel.config.schema import SINKS
from keel.errors import InputError, check_choice
from keel.registry import texts

if TYPE_CHECKING:
    from keel.apps.language.config import Language


def check(config: Language) -> None:
    """Raise an `InputError` for what cannot be run, before anything is made."""
    check_numbers(config)
    for path, low in _AT_LEAST.items():
        value = _get(config, path)
        if value is not None and not value >= low:
            raise InputError(f"{path}: expected at least {low:g}, got {value:g}")
    for path in _POSITIVE:
        value = _get(config, path)
        if value is not None and not 0.0 < value < math.inf:
            raise InputError(f"{path}: expected a number above 0, got {value:g}")
    for path in _SHARES:
        share = _get(config, path)
        if share > 1.0:
            raise InputError(f"{path}: expected a number from 0 to 1, got {share:g}")
    for name in config.sinks:
        check_choice("log", name, SINKS)
    named_values(config.task_options, "task_options")
    TASKS.check(config.task)
    for name in texts(config.reward.functions):
        REWARDS.check(name)
    LOSSES.check(config.region.loss)
    if config.region.form != "token" and config.region.loss != "clip":
        raise InputError(
            f"region.form: {config.region.form} belongs to region.loss clip, this is "
            f"{config.region.loss}"
        )
    check_choice("algo", config.algo, ALGORITHMS)
    if config.algo in ("grpo", "rloo", "dr_grpo") and config.sample.group < 2:
        raise InputError(
            f"sample.group: {config.algo} compares the completions of a prompt with each other and "
            f"needs 2 or more of them, got {config.sample.group}"
        )
    if config.algo == "ppo" and config.critic == "none":
        raise InputError("model.critic: PPO needs a critic; take head or model, or algo grpo")
    if config.model.hidden % config.model.heads or config.model.hidden // config.model.heads % 2:
        raise InputError(
            f"model.heads: {config.model.hidden} numbers cannot be shared evenly, and by even "
            f"numbers, among {config.model.heads} heads"
        )
    if config.kl.low > config.kl.high:
        raise InputError(
            f"kl.low: expected at most kl.high ({config.kl.high:g}), got {config.kl.low:g}"
        )
    outside = not config.kl.low <= config.kl.coef <= config.kl.high
    if config.kl.controller == "adaptive" and outside:
        raise InputError(
            f"kl.coef: an adaptive β stays between kl.low and kl.high, {config.kl.low:g} and "
            f"{config.kl.high:g}; it cannot begin at {config.kl.coef:g}"
        )
    if config.region.covariance != "none" and config.region.micro:
        raise InputError(
            "region.covariance: is taken over a whole minibatch, so it goes without region.micro"
        )
    if config.kl.place != "none" and config.kl.refresh and config.kl.ema:
        raise InputError("kl.refresh: the reference is refreshed, or follows (kl.ema); not both")
    if config.model.lora_rank and config.critic == "model":
        raise InputError("model.critic: with adapters the critic is a head, or there is none")


ALGORITHMS = ("ppo", "grpo", "rloo", "reinforce_pp", "remax", "dr_grpo")
_AT_LEAST = {
    "seed": 0, "total_steps": 1, "sample.prompts": 1, "sample.group": 1, "sample.max_new_tokens": 0,
    "sample.top_k": 0, "sample.tool_calls": 0, "region.epochs": 1, "region.minibatch": 1,
    "region.micro": 0, "region.entropy_coef": 0.0, "region.value_coef": 0.0, "kl.coef": 0.0,
    "kl.refresh": 0, "kl.ema": 0.0, "warmup.examples": 0, "warmup.epochs": 1, "warmup.minibatch": 1,
    "warmup.every": 1, "evaluation.prompts": 1, "evaluation.every": 0, "model.layers": 1,
    "model.heads": 1, "model.hidden": 2, "model.lora_rank": 0, "threads": 0,
    "reward.soft_length": 0, "model.positions": 1,
}  # fmt: skip
_POSITIVE = (
    "region.max_kl", "region.learning_rate", "region.clip", "region.clip_high", "region.dual_clip",
    "region.max_grad_norm", "region.max_log_ratio", "region.target_kl", "region.value_clip",
    "sample.temperature", "sample.top_p", "sample.max_importance", "kl.target", "kl.horizon",
    "warmup.learning_rate", "reward.timeout", "advantage.clamp", "kl.high", "model.lora_alpha",
    "region.covariance_share",
)  # fmt: skip
_SHARES = (
    "sample.top_p", "kl.ema", "advantage.gamma", "advantage.lam", "reward.max_failures",
    "region.covariance_share", "warmup.until",
)  # fmt: skip


def _get(config: Language, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        assert name in {f.name for f in fields(value)}
        value = getattr(value, name)
    return value
