"""What a configuration must satisfy before anything is created."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from msgspec import Meta

from keel.config.common import (
    ADVANTAGES,
    CONTROLLERS,
    DISTRIBUTIONS,
    GROUPS,
    LOSSES,
    NETWORKS,
    NOT_NEGATIVE,
    SINKS,
)
from keel.config.values import describe
from keel.errors import InputError, check_choice
from keel.registry import texts

if TYPE_CHECKING:
    from keel.config.schema import Config

MOST = 2**63 - 1
"""The largest whole number that fits into 64 bits."""
FIRST_ORDER = (
    *("kl_coef", "adaptive_kl", "adaptive_rate", "adaptive_clip", "critic_learning_rate"),
    *("kl_measure", "target_kl", "early_stop", "clip_high", "loss", "symmetric", "dual_clip"),
)
"""Settings of `region` that TRPO has no use for."""


def check(config: Config) -> None:
    """Raise an `InputError` that names the first impossible value."""
    _check_entries(config)
    check_numbers(config)
    _check_critic(config)
    if config.faults.wrong_actor and (config.algo != "ppo" or config.agents.order != "together"):
        raise InputError("faults.wrong_actor: is a fault of PPO whose agents learn together")
    if config.faults.entropy_outside_acceptance and config.algo != "trpo":
        raise InputError("faults.entropy_outside_acceptance: is a fault of TRPO's line search")
    _check_trpo(config)
    _check_cloning(config)
    region = config.region
    if region.adaptive_clip and region.clip is None:
        raise InputError("region.adaptive_clip: needs region.clip")
    if region.dual_clip is not None and (region.clip is None or region.symmetric):
        raise InputError("region.dual_clip: goes with PPO's own clip (region.clip, not symmetric)")
    if region.minibatch > config.batch:
        raise InputError(
            f"region.minibatch: {region.minibatch} rows, but a rollout has only {config.batch} "
            f"({config.envs.num} environments × {config.rollout_steps} steps)"
        )
    if config.explore.hierarchical and config.explore.pulses:
        raise InputError(
            "explore.hierarchical: chooses the temperature in place of explore.pulses; say "
            "--explore.no-pulses"
        )
    for name in ("early_stop", "adaptive_kl", "adaptive_rate", "adaptive_clip"):
        if getattr(region, name) not in (False, "off") and not region.target_kl:
            raise InputError(f"region.{name}: needs region.target_kl")
    for name in config.log:
        check_choice("log", name, SINKS)
    if not config.network.hidden or min(config.network.hidden) < 1:
        raise InputError(f"network.hidden: expected widths above 0, got {config.network.hidden}")


def _check_entries(config: Config) -> None:
    """Check what names entries of registries; no code is imported."""
    region, advantage = config.region, config.advantage
    NETWORKS.check(config.network.kind)
    DISTRIBUTIONS.check(config.network.distribution)
    if config.network.distribution != "auto" and config.network.squash:
        raise InputError("network.squash: belongs to network.distribution auto")
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
    belongs = {
        "quantiles": ("quantile",),
        "kappa": ("quantile",),
        "ordered": ("quantile",),
        "atoms": ("two_hot", "hl_gauss"),
        "reach": ("two_hot", "hl_gauss"),
        "cvar": ("quantile", "two_hot", "hl_gauss"),
        "targets": ("quantile", "two_hot", "hl_gauss"),
    }
    changed = _changed(critic)
    for name, kinds in belongs.items():
        if name in changed and critic.kind not in kinds:
            raise InputError(
                f"critic.{name}: belongs to critic.kind {' or '.join(kinds)}, this is {critic.kind}"
            )


def _check_cloning(config: Config) -> None:
    cloning = config.demos
    changed = _changed(cloning)
    if not cloning.path:
        if changed:
            raise InputError(f"demos.{changed[0]}: needs demonstrations, --demos.path DIR")
        return
    if config.network.recurrent != "none":
        raise InputError(
            "demos.path: demonstrations are learned step by step, which a policy with memory "
            "(network.recurrent) cannot; use --network.recurrent none"
        )
    if config.algo == "trpo" and cloning.steer == "loss":
        raise InputError(
            "demos.steer: TRPO's surrogate loss is 0 before its one step, and no measure of "
            "anything; use gradient"
        )
    if cloning.control == "fixed" and "coef_min" in changed:
        raise InputError("demos.coef_min: belongs to demos.control decay or adaptive")
    belongs = {
        "temperature": ("loss", "weighted"),
        "cap": ("loss", "weighted"),
        "decay": ("control", "decay"),
        "max_ratio": ("control", "adaptive"),
    }
    for name, (switch, value) in belongs.items():
        if name in changed and getattr(cloning, switch) != value:
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
    if natural.max_kl_end is not None and natural.max_kl_end > region.max_kl:
        raise InputError(
            f"natural.max_kl_end: expected at most region.max_kl ({region.max_kl:g}), "
            f"got {natural.max_kl_end:g}"
        )
    if config.algo == "ppo":
        for part, given in (("natural", natural), ("stabilizer", stabilizer)):
            if changed := _changed(given):
                raise InputError(f"{part}.{changed[0]}: belongs to --algo trpo, this is ppo")
        return
    changed = _changed(region)
    first_order = [f"region.{name}" for name in FIRST_ORDER if name in changed]
    first_order += ["advantage.recompute"] * config.advantage.recompute
    if first_order:
        raise InputError(
            f"{first_order[0]}: belongs to --algo ppo; TRPO takes one step, bounded by "
            "region.max_kl"
        )


def _changed(part: Any) -> list[str]:
    """Return the fields that are not as they are by default."""
    default = type(part)()
    names = (field.name for field in dataclasses.fields(part))
    return [name for name in names if getattr(part, name) != getattr(default, name)]


def check_numbers(config: Any) -> None:
    """Raise an `InputError` for a number that is not finite, or outside of its bounds.

    Args:
        config: A dataclass of settings, of environments or of tokens.
    """
    for name, value, bound in _numbers(config):
        if isinstance(value, int) and abs(value) > MOST:
            raise InputError(f"{name}: expected at most {MOST:,}, got {describe(value)}")
        if not math.isfinite(value):
            raise InputError(f"{name}: expected a finite number, got {value}")
        if expected := _missed(bound, value):
            raise InputError(f"{name}: expected {expected}")


def _missed(bound: Meta, value: float) -> str:
    """Return what a number should have been, and what it is; nothing where it is in its bounds."""
    low, high = bound.ge, bound.le
    if bound.gt is not None and value <= bound.gt:
        expected = f"a number above {bound.gt:g}"
    elif low is not None and value < low:
        expected = f"at least {low:g}" if low else "no negative number"
    elif high is not None and value > high:
        if high > 1:
            return f"at most {high:,}, got {value:,}"
        expected = "a number from 0 to 1"
    elif bound.lt is None or value < bound.lt:
        return ""
    return f"{bound.description or expected}, got {value}"


def _numbers(config: Any, prefix: str = "") -> Iterator[tuple[str, float, Meta]]:
    kind: Any = type(config)
    for name, bound in _bounds(kind).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{name}.")
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, int | float) and not isinstance(part, bool):
                yield f"{prefix}{name}", part, bound


@cache
def _bounds(kind: type) -> dict[str, Meta]:
    hints = typing.get_type_hints(kind, include_extras=True)
    metadata = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {
        name: next((x for x in marks if isinstance(x, Meta)), NOT_NEGATIVE)
        for name, marks in metadata.items()
    }
