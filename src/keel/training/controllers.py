"""Keel's own controllers, made of a run's settings; imported by runs that have any."""

from __future__ import annotations

from dataclasses import asdict

from keel.config import Config
from keel.controllers.bandit import TemperatureLadder
from keel.controllers.controllers import (
    AdaptiveClip,
    AdaptivePenalty,
    AdaptiveRate,
    Controller,
    Decay,
    Stabilizer,
    TemperaturePulses,
)
from keel.controllers.demos import CloningTrust, LossBalance
from keel.training.builder import initial_hparams


def adaptive_kl(config: Config) -> Controller:
    """Steer the KL penalty towards `region.target_kl`."""
    return AdaptivePenalty(_target(config))


def adaptive_rate(config: Config) -> Controller:
    """Steer the learning rate towards `region.target_kl`."""
    return AdaptiveRate(_target(config))


def adaptive_clip(config: Config) -> Controller:
    """Steer the clip towards `region.target_kl`."""
    return AdaptiveClip(_target(config), initial_hparams(config).clip_high)


def stabilizer(config: Config) -> Controller:
    """Tighten the trust region after line searches that failed."""
    settings = asdict(config.stabilizer)
    return Stabilizer(max_kl=config.region.max_kl, damping=config.natural.damping, **settings)


def demos(config: Config) -> Controller:
    """Weigh demonstrations beside the reward."""
    cloning = config.demos
    if cloning.control == "decay":
        return Decay("bc_coef", cloning.decay, cloning.coef_min)
    if cloning.steer == "gradient":
        return CloningTrust(cloning.coef, cloning.coef_min)
    return LossBalance(cloning.coef, cloning.max_ratio, cloning.coef_min)


def entropy_decay(config: Config) -> Controller:
    """Lower the entropy bonus by a factor."""
    return Decay("entropy_coef", config.explore.entropy_decay, config.explore.entropy_coef_min)


def pulses(config: Config) -> Controller:
    """Raise the temperature in pulses."""
    explore = config.explore
    return TemperaturePulses(
        explore.pulse_interval,
        explore.pulse_magnitude,
        explore.stagnation_threshold,
        explore.stagnation_memory,
    )


def hierarchical(config: Config) -> Controller:
    """Choose the temperature of blocks of updates by their returns."""
    return TemperatureLadder(config.explore.pulse_interval, config.explore.pulse_magnitude)


def _target(config: Config) -> float:
    assert config.region.target_kl is not None
    return config.region.target_kl
