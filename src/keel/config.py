"""The configuration of a run: small frozen dataclasses, one per stage.

An unknown or misspelt key, a wrong type or an impossible value is an error with a suggestion,
raised before anything is created. Nothing here imports torch, so that `--help` stays quick.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml
from tyro.conf import Suppress

from keel.errors import InputError, choose

Backend = Literal["auto", "vector", "sync", "async", "envpool", "ale"]
T = TypeVar("T")
SINKS = ("tensorboard", "wandb", "trackio")


@dataclass(frozen=True)
class Envs:
    """How environments are run."""

    num: int = 8
    """Environments stepped together."""
    backend: Backend = "auto"
    """`auto` takes the fastest that is installed."""
    normalise_obs: bool = False
    """Centre and scale observations by running moments, frozen through rollout and update."""
    normalise_reward: bool = False
    """Divide rewards by the standard deviation of the discounted return."""
    clip_reward: float | None = None
    """Bound on the (normalised) reward."""
    guard: bool = True
    """Stop at non-finite or misshapen observations and rewards, before they are stored."""
    timeout: float = 60.0
    """Seconds after which a silent worker counts as hung."""


@dataclass(frozen=True)
class Network:
    """The shape of actor and critic."""

    kind: Literal["auto", "mlp", "cnn", "decoupled"] = "auto"
    """`auto`: a CNN with shared trunk for pixels, else two MLPs."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers (MLP), or the width of the branches (decoupled)."""
    activation: Literal["tanh", "relu", "gelu"] = "tanh"
    """Between the layers of an MLP."""
    log_std: float = 0.0
    """Initial log standard deviation of continuous actions."""
    state_std: bool = False
    """Let the standard deviation depend on the observation."""
    squash: bool = False
    """Squash continuous actions into their bounds by tanh, in place of clipping."""
    features: int = 512
    """Width of the CNN's last layer, and of the decoupled network's projection."""
    memory: Literal["none", "actor", "critic", "both"] = "none"
    """Which of them remembers, by a GRU; minibatches are then whole sequences."""
    memory_size: int = 64
    """Width of the GRU."""


@dataclass(frozen=True)
class Advantage:
    """How advantages are estimated and scaled."""

    gamma: float = 0.99
    """Discount."""
    lam: float = 0.95
    """λ of GAE: 0 looks one step ahead, 1 to the end."""
    normalise: Literal["none", "batch", "global", "robust"] = "batch"
    """Centre and scale advantages over the rollout."""
    clamp: float | None = None
    """Bound on the normalised advantage (note 000: 10)."""
    recompute: bool = False
    """Compute advantages anew for every epoch, with the critic as it is by then."""


@dataclass(frozen=True)
class Region:
    """The trust region, and the optimisation inside of it."""

    max_kl: float = 0.05
    """The hard bound on the exact mean KL(old‖new) of an update, in nats."""
    certify: bool = True
    """Measure the exact KL after every update and walk back what is over `max_kl`."""
    gate: bool = True
    """Before the first step of an update, replaying must give ratio 1."""
    clip: float | None = 0.2
    """ε of PPO's clip; `None` takes the clip away."""
    clip_high: float | None = None
    """Another ε for the upper side (clip-higher)."""
    symmetric: bool = False
    """Clip to [1/(1+ε), 1+ε]."""
    dual_clip: float | None = None
    """For A < 0, no loss above −dual_clip·A."""
    value_clip: float | None = None
    """Keep the value within this distance of the old one, in the loss."""
    value_coef: float = 0.5
    """Weight of the critic's loss."""
    max_log_ratio: float = 10.0
    """Clamp on the log-ratio (note 001): a finite loss, not a trust region."""
    kl_coef: float = 0.0
    """Penalty: this times the exact KL(old‖new) is added to the loss."""
    adaptive_kl: bool = False
    """Double or halve `kl_coef` to keep the KL near `target_kl`."""
    target_kl: float | None = None
    """The soft level that early stopping and adaptive coefficients aim at."""
    early_stop: Literal["off", "minibatch", "epoch"] = "off"
    """Stop an update at 1.5 × `target_kl`."""
    epochs: int = 4
    """Passes over each rollout."""
    minibatch: int = 256
    """Rows per optimizer step; the remainder is used, not dropped."""
    learning_rate: float = 3e-4
    """Adam's step size."""
    schedule: Literal["constant", "linear"] = "linear"
    """How the learning rate goes: `linear` ends at 0."""
    adaptive_rate: bool = False
    """Steer the learning rate by the KL towards `target_kl`, in place of a schedule."""
    max_grad_norm: float = 0.5
    """Bound on the gradient's norm."""


@dataclass(frozen=True)
class Explore:
    """What keeps the policy from settling too early."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    entropy_decay: float = 1.0
    """Factor on `entropy_coef` after every update (note 002: 0.9995)."""
    entropy_coef_min: float = 0.0
    """Where that decay ends (note 002: 0.01)."""
    entropy_floor: float | None = None
    """Below this entropy, in nats, a differentiable penalty sets in (note 004: 0.5)."""
    pulses: bool = False
    """Raise the temperature of the policy in pulses (note 004)."""
    pulse_interval: int = 8
    """Updates between pulses."""
    pulse_magnitude: float = 2.0
    """The temperature during a pulse."""
    stagnation_threshold: float = 0.005
    """A relative change of the return below this counts as stagnation."""
    stagnation_memory: int = 5
    """Updates over which stagnation is judged; it triggers a pulse by itself."""


@dataclass(frozen=True)
class Evaluation:
    """Evaluation episodes beside training, in environments of their own."""

    every: int = 0
    """Agent steps between evaluations; 0: only at the end."""
    episodes: int = 10
    """Episodes per evaluation."""
    deterministic: bool = True
    """Take the likeliest action, in place of sampling."""


@dataclass(frozen=True)
class Checkpoints:
    """What is kept for resuming."""

    every: int = 100_000
    """Agent steps between checkpoints; the last and the best are always kept."""
    keep: int = 3
    """How many of the others to keep."""


@dataclass(frozen=True)
class Config:
    """A whole run."""

    env: Suppress[str] = "CartPole-v1"
    """A Gymnasium id, or an alias such as Breakout."""
    algo: Literal["ppo"] = "ppo"
    """The algorithm."""
    seed: int = 0
    """Of everything: environments, networks, sampling, shuffling."""
    total_steps: int = 100_000
    """Agent steps, over all environments."""
    rollout_steps: int = 128
    """Steps per environment between updates."""
    envs: Envs = field(default_factory=Envs)
    network: Network = field(default_factory=Network)
    advantage: Advantage = field(default_factory=Advantage)
    region: Region = field(default_factory=Region)
    explore: Explore = field(default_factory=Explore)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, …"""
    threads: int = 0
    """torch's threads; 0: all cores for CNNs, one for everything else."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Let torch compile the optimizer step. Small MLPs have loops of their own, which `on` passes
    by; `auto` compiles what else gains by it, in runs long enough to earn it back."""
    tag: str = ""
    """Stored with the run, for comparing."""
    log: str = ""
    """Copies of the metrics, separated by commas: tensorboard, wandb, trackio."""

    @property
    def sinks(self) -> tuple[str, ...]:
        """The names in `log`."""
        return tuple(name.strip() for name in self.log.split(",") if name.strip())

    @property
    def batch(self) -> int:
        """Rows per rollout."""
        return self.envs.num * self.rollout_steps

    @property
    def iterations(self) -> int:
        """Rollouts until `total_steps` are reached."""
        return math.ceil(self.total_steps / self.batch)


def check(config: Config) -> None:
    """Raise an `InputError` that names the first impossible value."""
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
        "network.memory_size": config.network.memory_size,
        "explore.pulse_interval": config.explore.pulse_interval,
        "explore.pulse_magnitude": config.explore.pulse_magnitude,
        "evaluation.episodes": config.evaluation.episodes,
        "checkpoints.every": config.checkpoints.every,
        "checkpoints.keep": config.checkpoints.keep,
    }
    for name, value in positive.items():
        if not value > 0:
            raise InputError(f"{name}: expected a number above 0, got {value}")
    for name, value in _numbers(config):
        if not math.isfinite(value):
            raise InputError(f"{name}: expected a finite number, got {value}")
        if value < 0 and name != "network.log_std":
            raise InputError(f"{name}: expected no negative number, got {value}")
    for name, share in (("gamma", config.advantage.gamma), ("lam", config.advantage.lam)):
        if share > 1.0:
            raise InputError(f"advantage.{name}: expected a number from 0 to 1, got {share}")
    region = config.region
    if region.clip is not None and not 0.0 < region.clip < 1.0:
        raise InputError(f"region.clip: expected a number between 0 and 1, got {region.clip}")
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
        )
        if on
    ]
    if needs and not region.target_kl:
        raise InputError(f"region.{needs[0]}: needs region.target_kl")
    for name in config.sinks:
        choose("log", name, SINKS)
    if not config.network.hidden or min(config.network.hidden) < 1:
        raise InputError(f"network.hidden: expected widths above 0, got {config.network.hidden}")


def _numbers(value: Any, prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for item in dataclasses.fields(value):
        content = getattr(value, item.name)
        name = f"{prefix}{item.name}"
        if dataclasses.is_dataclass(content):
            found += _numbers(content, f"{name}.")
        elif isinstance(content, int | float) and not isinstance(content, bool):
            found.append((name, float(content)))
    return found


def to_dict(config: Config) -> dict[str, Any]:
    """As plain data, for YAML."""
    plain = dataclasses.asdict(config)
    plain["network"]["hidden"] = list(config.network.hidden)
    return plain


def from_dict(data: Mapping[str, Any], base: Config | None = None) -> Config:
    """Strictly: every key must exist and have its type; what is missing comes from `base`."""
    config = _merge(base if base is not None else Config(), data, "")
    check(config)
    return config


def load(path: Path, base: Config | None = None) -> Config:
    """A YAML file, read as data only."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not a plain YAML file ({str(error).splitlines()[0]})") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected keys and values, got {type(data).__name__}")
    return from_dict(data, base)


def _merge(base: T, data: Mapping[str, Any], prefix: str) -> T:
    hints = typing.get_type_hints(type(base))
    changes: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            raise InputError(f"unknown key {prefix}{name}{hint}")
        current = getattr(base, name)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, Mapping):
                raise InputError(f"{prefix}{name}: expected keys and values, got {value!r}")
            changes[name] = _merge(current, value, f"{prefix}{name}.")
        else:
            changes[name] = _convert(hints[name], value, f"{prefix}{name}")
    return dataclasses.replace(base, **changes)  # type: ignore[type-var]


def _convert(hint: Any, value: Any, name: str) -> Any:
    """`value` as the field's type; numbers may be written as integers, integers as 1e6."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (option for option in typing.get_args(hint) if option is not type(None))
        return _convert(inner, value, name)
    if origin is Literal:
        options = typing.get_args(hint)
        if isinstance(value, bool) and "off" in options:
            value = "on" if value else "off"
        if value in options:
            return value
        near = difflib.get_close_matches(str(value), options, n=1)
        hint_text = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{name}: {value!r} is not one of {', '.join(options)}{hint_text}")
    if origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_convert(int, item, name) for item in value)
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint in (int, float):
        number = _number(value)
        if number is not None and (hint is float or number == int(number)):
            return hint(number)
    elif isinstance(value, hint):
        return value
    raise InputError(f"{name}: expected {_name(hint)}, got {value!r}")


def _number(value: Any) -> float | None:
    """YAML reads 1e6 (without a dot) as text: it is a number all the same."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _name(hint: Any) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
        hint, "a list of whole numbers"
    )
