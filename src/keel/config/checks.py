"""What a configuration must satisfy before anything is created."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from keel.config.options import OPTIONS, named_values
from keel.config.registries import ADVANTAGES, CONTROLLERS, GROUPS, LOSSES, NETWORKS
from keel.config.schema import SINKS, Config
from keel.config.values import describe
from keel.errors import InputError, check_choice
from keel.registry import texts

MOST = 2**63 - 1
"""The largest whole number that fits into 64 bits."""
MOST_THREADS = 1024
"""Upper bound on threads: beyond some thousands, torch and the system fail at work."""


def check(config: Config) -> None:
    """Raise an `InputError` that names the first impossible value."""
    named_values(config.envs.options, OPTIONS)
    _check_entries(config)
    positive = {
        "total_steps": config.total_steps,
        "rollout_steps": config.rollout_steps,
        "envs.num": config.envs.num,
        "envs.timeout": config.envs.timeout,
        "region.max_kl": config.region.max_kl,
        "region.epochs": config.region.epochs,
        "region.minibatch": config.region.minibatch,
        "region.learning_rate": config.region.learning_rate,
        "region.max_grad_norm": config.region.max_grad_norm,
        "region.max_log_ratio": config.region.max_log_ratio,
        "network.features": config.network.features,
        "network.recurrent_size": config.network.recurrent_size,
        "critic.reach": config.critic.reach,
        "critic.cvar": config.critic.cvar,
        "natural.cg_iters": config.natural.cg_iters,
        "natural.backtrack_iters": config.natural.backtrack_iters,
        "natural.fisher_fraction": config.natural.fisher_fraction,
        "atari.frame_skip": config.atari.frame_skip,
        "atari.frame_stack": config.atari.frame_stack,
        "demos.temperature": config.demos.temperature,
        "demos.cap": config.demos.cap,
        "demos.max_ratio": config.demos.max_ratio,
        "explore.pulse_interval": config.explore.pulse_interval,
        "explore.pulse_magnitude": config.explore.pulse_magnitude,
        "faults.reward_gain": config.faults.reward_gain,
        "checkpoints.every": config.checkpoints.every,
        "checkpoints.keep": config.checkpoints.keep,
    }
    for name, value in positive.items():
        if not value > 0:
            raise InputError(f"{name}: expected a number above 0, got {value}")
    check_numbers(config, may_be_negative=("network.log_std",))
    shares = {
        "critic.cvar": config.critic.cvar,
        "advantage.gamma": config.advantage.gamma,
        "advantage.lam": config.advantage.lam,
        "natural.fisher_fraction": config.natural.fisher_fraction,
        "atari.sticky": config.atari.sticky,
        "natural.max_kl_hold": config.natural.max_kl_hold,
        "demos.decay": config.demos.decay,
        "faults.epsilon_greedy": config.faults.epsilon_greedy,
    }
    for name, share in shares.items():
        if share > 1.0:
            raise InputError(f"{name}: expected a number from 0 to 1, got {share}")
    _check_critic(config)
    if config.faults.wrong_actor and (config.algo != "ppo" or config.agents.order != "together"):
        raise InputError("faults.wrong_actor: is a fault of PPO whose agents learn together")
    if config.faults.entropy_outside_acceptance and config.algo != "trpo":
        raise InputError("faults.entropy_outside_acceptance: is a fault of TRPO's line search")
    _check_trpo(config)
    _check_cloning(config)
    region = config.region
    if region.critic_learning_rate is not None and not region.critic_learning_rate > 0.0:
        raise InputError(
            "region.critic_learning_rate: expected a number above 0, "
            f"got {region.critic_learning_rate}"
        )
    if region.clip is not None and not 0.0 < region.clip < 1.0:
        raise InputError(f"region.clip: expected a number between 0 and 1, got {region.clip}")
    if region.adaptive_clip and region.clip is None:
        raise InputError("region.adaptive_clip: needs region.clip")
    if region.dual_clip is not None and (region.clip is None or region.symmetric):
        raise InputError("region.dual_clip: goes with PPO's own clip (region.clip, not symmetric)")
    if region.minibatch > config.batch:
        raise InputError(
            f"region.minibatch: {region.minibatch} rows, but a rollout has only {config.batch} "
            f"({config.envs.num} environments × {config.rollout_steps} steps)"
        )
    needs = [
        name
        for name, on in (
            ("early_stop", region.early_stop != "off"),
            ("adaptive_kl", region.adaptive_kl),
            ("adaptive_rate", region.adaptive_rate),
            ("adaptive_clip", region.adaptive_clip),
        )
        if on
    ]
    if config.explore.hierarchical and config.explore.pulses:
        raise InputError(
            "explore.hierarchical: chooses the temperature in place of explore.pulses; say "
            "--explore.no-pulses"
        )
    if needs and not region.target_kl:
        raise InputError(f"region.{needs[0]}: needs region.target_kl")
    for name in config.sinks:
        check_choice("log", name, SINKS)
    if not config.network.hidden or min(config.network.hidden) < 1:
        raise InputError(f"network.hidden: expected widths above 0, got {config.network.hidden}")


def _check_entries(config: Config) -> None:
    """Check what names entries of registries; no code is imported."""
    region, advantage = config.region, config.advantage
    NETWORKS.check(config.network.kind)
    LOSSES.check(region.loss)
    ADVANTAGES.check(advantage.estimator)
    if advantage.group:
        GROUPS.check(advantage.group)
    if region.loss == "sequence":
        raise InputError("region.loss: sequence is of runs on tokens; these are single actions")
    if region.loss not in ("clip", "symmetric") and region.symmetric:
        raise InputError(f"region.symmetric: belongs to region.loss clip, this is {region.loss}")
    if region.loss != "clip" and region.dual_clip is not None:
        raise InputError(f"region.dual_clip: belongs to region.loss clip, this is {region.loss}")
    switches = {
        "adaptive_kl": "region.adaptive_kl",
        "adaptive_rate": "region.adaptive_rate",
        "adaptive_clip": "region.adaptive_clip",
        "stabilizer": "stabilizer.ls_fail_threshold",
        "demos": "demos.control",
        "entropy_decay": "explore.entropy_decay",
        "pulses": "explore.pulses",
        "hierarchical": "explore.hierarchical",
    }
    for name in texts(config.controllers):
        CONTROLLERS.check(name)
        if name in switches:
            raise InputError(f"controllers: {name} is switched on by {switches[name]}")
    if advantage.estimator == "gae":
        return
    if config.critic.kind != "scalar" and config.critic.targets == "sampled":
        raise InputError(
            "critic.targets: samples of the return are drawn by GAE's λ; with another "
            "advantage.estimator use critic.targets mean"
        )
    if config.faults.interleaved_gae:
        raise InputError("faults.interleaved_gae: belongs to advantage.estimator gae")


def _check_critic(config: Config) -> None:
    critic = config.critic
    for name, number in (("quantiles", critic.quantiles), ("atoms", critic.atoms)):
        if number < 2:
            raise InputError(f"critic.{name}: expected at least 2, got {number}")
    belongs = {
        "quantiles": ("quantile",),
        "kappa": ("quantile",),
        "ordered": ("quantile",),
        "atoms": ("two_hot", "hl_gauss"),
        "reach": ("two_hot", "hl_gauss"),
        "cvar": ("quantile", "two_hot", "hl_gauss"),
        "targets": ("quantile", "two_hot", "hl_gauss"),
    }
    for name, kinds in belongs.items():
        if getattr(critic, name) != getattr(type(critic)(), name) and critic.kind not in kinds:
            raise InputError(
                f"critic.{name}: belongs to critic.kind {' or '.join(kinds)}, this is {critic.kind}"
            )


def _check_cloning(config: Config) -> None:
    cloning = config.demos
    if not cloning.path:
        if changed := _changed(cloning):
            raise InputError(f"demos.{changed}: needs demonstrations, --demos.path DIR")
        return
    if config.network.recurrent != "none":
        raise InputError(
            "demos.path: demonstrations are learned step by step, which a policy with memory "
            "(network.recurrent) cannot; use --network.recurrent none"
        )
    if cloning.episodes is not None and cloning.episodes < 1:
        raise InputError(f"demos.episodes: expected at least 1, got {cloning.episodes}")
    if config.algo == "trpo" and cloning.steer == "loss":
        raise InputError(
            "demos.steer: TRPO's surrogate loss is 0 before its one step, and no measure of "
            "anything; use gradient"
        )
    if cloning.control == "fixed" and cloning.coef_min != type(cloning)().coef_min:
        raise InputError("demos.coef_min: belongs to demos.control decay or adaptive")
    belongs = {
        "temperature": ("loss", "weighted"),
        "cap": ("loss", "weighted"),
        "decay": ("control", "decay"),
        "max_ratio": ("control", "adaptive"),
    }
    for name, (switch, value) in belongs.items():
        given = getattr(cloning, name) != getattr(type(cloning)(), name)
        if given and getattr(cloning, switch) != value:
            raise InputError(f"demos.{name}: belongs to demos.{switch} {value}")
    if not cloning.coef > 0.0:
        raise InputError(f"demos.coef: expected a number above 0, got {cloning.coef:g}")
    if cloning.control != "fixed" and cloning.coef_min > cloning.coef:
        raise InputError(
            f"demos.coef_min: expected at most demos.coef ({cloning.coef:g}), "
            f"got {cloning.coef_min:g}"
        )


def _check_trpo(config: Config) -> None:
    natural, stabilizer, region = config.natural, config.stabilizer, config.region
    if not 0.0 < natural.backtrack_coeff < 1.0:
        raise InputError(
            "natural.backtrack_coeff: expected a number between 0 and 1, "
            f"got {natural.backtrack_coeff}"
        )
    if not 0.0 < stabilizer.max_kl_decay <= 1.0:
        raise InputError(
            f"stabilizer.max_kl_decay: expected a factor up to 1, got {stabilizer.max_kl_decay}"
        )
    if stabilizer.damping_growth < 1.0:
        raise InputError(
            "stabilizer.damping_growth: expected a factor of at least 1, "
            f"got {stabilizer.damping_growth}"
        )
    if natural.max_kl_end is not None and not natural.max_kl_end > 0:
        raise InputError(f"natural.max_kl_end: expected a number above 0, got {natural.max_kl_end}")
    if natural.max_kl_end is not None and natural.max_kl_end > region.max_kl:
        raise InputError(
            f"natural.max_kl_end: expected at most region.max_kl ({region.max_kl:g}), "
            f"got {natural.max_kl_end:g}"
        )
    if config.algo == "ppo":
        for part, given in (("natural", natural), ("stabilizer", stabilizer)):
            changed = _changed(given)
            if changed:
                raise InputError(f"{part}.{changed}: belongs to --algo trpo, this is ppo")
        return
    first_order = {
        "region.kl_coef": region.kl_coef > 0.0,
        "region.adaptive_kl": region.adaptive_kl,
        "region.adaptive_rate": region.adaptive_rate,
        "region.adaptive_clip": region.adaptive_clip,
        "region.critic_learning_rate": region.critic_learning_rate is not None,
        "region.kl_measure": region.kl_measure != "exact",
        "region.target_kl": region.target_kl is not None,
        "region.early_stop": region.early_stop != "off",
        "region.clip_high": region.clip_high is not None,
        "region.loss": region.loss != "clip",
        "region.symmetric": region.symmetric,
        "region.dual_clip": region.dual_clip is not None,
        "advantage.recompute": config.advantage.recompute,
    }
    for name, on in first_order.items():
        if on:
            raise InputError(
                f"{name}: belongs to --algo ppo; TRPO takes one step, bounded by region.max_kl"
            )


def _changed(part: Any) -> str | None:
    """The first field that is not as it is by default."""
    default = type(part)()
    names = (field.name for field in dataclasses.fields(part))
    return next((n for n in names if getattr(part, n) != getattr(default, n)), None)


def check_numbers(config: Any, may_be_negative: Collection[str] = ()) -> None:
    """Raise an `InputError` for a number that is not finite, negative, or too large to count with.

    Args:
        config: A dataclass of settings, of environments or of tokens.
        may_be_negative: Dotted names of the fields that may be below 0.
    """
    for name, value in _numbers(config):
        if isinstance(value, int) and abs(value) > MOST:
            raise InputError(f"{name}: expected at most {MOST:,}, got {describe(value)}")
        if not math.isfinite(value):
            raise InputError(f"{name}: expected a finite number, got {value}")
        if value < 0 and name not in may_be_negative:
            raise InputError(f"{name}: expected no negative number, got {value}")
    if config.threads > MOST_THREADS:
        raise InputError(f"threads: expected at most {MOST_THREADS:,}, got {config.threads:,}")


def _numbers(value: Any, prefix: str = "") -> list[tuple[str, float]]:
    numbers: list[tuple[str, float]] = []
    for item in dataclasses.fields(value):
        content = getattr(value, item.name)
        name = f"{prefix}{item.name}"
        if dataclasses.is_dataclass(content):
            numbers += _numbers(content, f"{name}.")
        parts = content if isinstance(content, tuple) else (content,)
        numbers += [
            (name, part)
            for part in parts
            if isinstance(part, int | float) and not isinstance(part, bool)
        ]
    return numbers
