"""Checks of the configuration of a run on tokens, before anything is created."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keel.apps.language.registries import ESTIMATORS, REWARDS, TASKS
from keel.config.checks import check_numbers
from keel.config.common import LOSSES, SINKS
from keel.errors import InputError, check_choice
from keel.registry import texts

if TYPE_CHECKING:
    from keel.apps.language.config import Language


def check(config: Language) -> None:
    """Raise an `InputError` for what cannot be run, before anything is made."""
    check_numbers(config)
    for name in config.log:
        check_choice("log", name, SINKS)
    TASKS.check(config.task)
    ESTIMATORS.check(config.algo)
    for name in texts(config.reward.functions):
        REWARDS.check(name)
    LOSSES.check(config.region.loss)
    if config.region.form != "token" and config.region.loss != "clip":
        raise InputError(
            f"region.form: {config.region.form} belongs to region.loss clip, this is "
            f"{config.region.loss}"
        )
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
