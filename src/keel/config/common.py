"""Settings that runs on environments and on tokens share; each kind adds its own.

A kind of run gives a setting another default, or another bound, by repeating the field; the text
below it is inherited.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import Suppress

from keel.config import bounds
from keel.config.options import LISTED, settle_texts
from keel.config.registries import Loss

SINKS = ("tensorboard", "wandb", "trackio")


@dataclass(frozen=True)
class TrustRegion:
    """The trust region, and the optimisation inside of it."""

    max_kl: Annotated[float, bounds.ABOVE_0] = 0.05
    """The hard bound on the exact mean KL(old‖new) of an update, in nats per action or token."""
    certify: bool = True
    """Measure the exact KL after every update and walk back what is over `max_kl`."""
    gate: bool = True
    """Before the first step of an update, replaying must give ratio 1."""
    loss: Loss = "clip"
    """The surrogate that is minimised; `module:attribute`: a function of your own, of ratio,
    advantage and hyperparameters."""
    clip: Annotated[float | None, bounds.BETWEEN_0_AND_1] = 0.2
    """ε of PPO's clip; `None` takes the clip away."""
    clip_high: float | None = None
    """Another ε for the upper side (clip-higher)."""
    dual_clip: float | None = None
    """For A < 0, no loss above −dual_clip·A."""
    value_clip: float | None = None
    """Keep the value within this distance of the old one, in the loss."""
    value_coef: float = 0.5
    """Weight of the critic's loss."""
    max_log_ratio: Annotated[float, bounds.ABOVE_0] = 10.0
    """Clamp on the log-ratio: it keeps the loss finite, and is no trust region."""
    target_kl: float | None = None
    """The soft level that early stopping and adaptive coefficients aim at."""
    epochs: Annotated[int, bounds.ABOVE_0] = 4
    """Passes over the data of each update."""
    minibatch: Annotated[int, bounds.ABOVE_0] = 256
    """Rows per optimizer step, of tokens completions; the remainder is used, not dropped."""
    learning_rate: Annotated[float, bounds.ABOVE_0] = 3e-4
    """Adam's step size."""
    schedule: Literal["constant", "linear"] = "linear"
    """How the learning rate goes: `linear` ends at 0."""
    max_grad_norm: Annotated[float, bounds.ABOVE_0] = 0.5
    """Bound on the gradient's norm."""


@dataclass(frozen=True)
class Checkpoints:
    """What is kept for resuming."""

    every: Annotated[int, bounds.ABOVE_0] = 100_000
    """Agent steps between checkpoints; the last and the best are always kept."""
    keep: Annotated[int, bounds.ABOVE_0] = 3
    """How many of the others to keep."""


@dataclass(frozen=True)
class RunSettings:
    """Settings of a whole run."""

    env: Suppress[str]
    """The environment, or the kind of run."""
    seed: int = 0
    """Random seed of environments or prompts, networks, sampling and shuffling."""
    total_steps: Annotated[int, bounds.ABOVE_0] = 100_000
    """Agent steps, over all environments."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, …"""
    threads: Annotated[int, bounds.THREADS] = 0
    """torch's threads; 0: all cores for CNNs and language models, one for everything else."""
    tag: str = ""
    """Stored with the run, for comparing."""
    log: Annotated[tuple[str, ...], LISTED] = ()
    """Copies of the metrics: tensorboard, wandb, trackio."""

    def __post_init__(self) -> None:
        settle_texts(self)
