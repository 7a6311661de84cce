"""What settings of all kinds of runs share: bounds of numbers, registries of names, sections.

Entries of registries are texts, so that nothing is imported before it is used; code of users adds
its own. A number without a bound at its field must not be negative. A kind of run gives a shared
setting another default, or another bound, by repeating the field; the text below it is inherited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from msgspec import Meta
from tyro.conf import Suppress, arg

from keel.config.values import LISTED, settle_texts
from keel.registry import Registry

NOT_NEGATIVE = Meta(ge=0)
ANY_NUMBER = Meta()
ABOVE_0 = Meta(gt=0)
AT_LEAST_1 = Meta(ge=1)
AT_LEAST_2 = Meta(ge=2)
SHARE = Meta(ge=0, le=1)
SHARE_ABOVE_0 = Meta(gt=0, le=1)
BETWEEN_0_AND_1 = Meta(gt=0, lt=1, description="a number between 0 and 1")
DECAY = Meta(gt=0, le=1, description="a factor up to 1")
GROWTH = Meta(ge=1, description="a factor of at least 1")
THREADS = Meta(ge=0, le=1024)
"""Beyond some thousands of threads, torch and the system fail at work."""


def _entries(module: str, names: str) -> dict[str, str]:
    """Return entries that are called as the functions of one module that make them."""
    return {name: f"{module}:{name}" for name in names.split()}


LOSSES: Registry[Callable[..., Any]] = Registry(
    "region.loss",
    _entries("keel.losses.surrogates", "clip symmetric unclipped cispo sequence"),
)
"""Surrogates: `(ratio, advantage, hparams)` to a loss per element (`keel.losses.surrogates`)."""

NETWORKS: Registry[Callable[..., Any]] = Registry(
    "network.kind",
    {
        "mlp": "keel.networks.build:build_mlp",
        "cnn": "keel.networks.kinds:build_cnn",
        "decoupled": "keel.networks.kinds:build_decoupled",
        "pointer": "keel.networks.kinds:build_pointer",
    },
    keywords=("auto",),
)
"""Networks: `(observation_space, action_space)` to a module (`keel.networks.own`)."""

DISTRIBUTIONS: Registry[Callable[..., Any]] = Registry("network.distribution", keywords=("auto",))
"""Distributions of actions: `(action_space)` to one (`keel.distributions.actions.Dist`)."""

CONTROLLERS: Registry[Any] = Registry(
    "controllers",
    _entries(
        "keel.training.controllers",
        "adaptive_kl adaptive_rate adaptive_clip stabilizer "
        "demos entropy_decay pulses hierarchical",
    ),
)
"""Controllers: objects of the protocol `keel.controllers.controllers.Controller`, or what makes
them."""

ADVANTAGES: Registry[Callable[..., Any]] = Registry(
    "advantage.estimator", {"gae": "keel.functional:gae"}
)
"""Estimators of advantages of environments: rewards and values to advantages and targets."""

GROUPS: Registry[Callable[..., Any]] = Registry("advantage.group")
"""Functions of observations to the groups that advantages are normalized in."""

BACKENDS: Registry[Callable[..., Any]] = Registry(
    "backend",
    {
        "vector": "keel.envs.vector:make_vector",
        "sync": "keel.envs.sync:make_sync",
        "async": "keel.envs.workers:make_async",
        "envpool": "keel.envs.pool:make_pool",
        "ale": "keel.envs.atari:make_ale",
    },
    keywords=("auto",),
)
"""Backends of environments: `(request)` to environments (`keel.envs.protocol.Request`)."""


if TYPE_CHECKING:
    Backend = str
else:
    Backend = Literal[BACKENDS.names()]


class Pluggable(NamedTuple):
    """Annotation of a setting that names an entry of a registry, or several."""

    registry: Registry[Any]


Loss = Annotated[str, Pluggable(LOSSES), arg(metavar=LOSSES.choices)]
NetworkKind = Annotated[str, Pluggable(NETWORKS), arg(metavar=NETWORKS.choices)]
Distribution = Annotated[str, Pluggable(DISTRIBUTIONS), arg(metavar=DISTRIBUTIONS.choices)]
Estimator = Annotated[str, Pluggable(ADVANTAGES), arg(metavar=ADVANTAGES.choices)]
Group = Annotated[str, Pluggable(GROUPS), arg(metavar=GROUPS.choices)]
Controllers = Annotated[
    tuple[str, ...], Pluggable(CONTROLLERS), arg(metavar="[NAME|module:attribute …]")
]

SINKS = ("tensorboard", "wandb", "trackio")


@dataclass(frozen=True)
class TrustRegion:
    """The trust region, and the optimisation inside of it."""

    max_kl: Annotated[float, ABOVE_0] = 0.05
    """The hard bound on the exact mean KL(old‖new) of an update, in nats per action or token."""
    certify: bool = True
    """Measure the exact KL after every update and walk back what is over `max_kl`."""
    gate: bool = True
    """Before the first step of an update, replaying must give ratio 1."""
    loss: Loss = "clip"
    """The surrogate that is minimised; `module:attribute`: a function of your own, of ratio,
    advantage and hyperparameters."""
    clip: Annotated[float | None, BETWEEN_0_AND_1] = 0.2
    """ε of PPO's clip; `None` takes the clip away."""
    clip_high: float | None = None
    """Another ε for the upper side (clip-higher)."""
    dual_clip: float | None = None
    """For A < 0, no loss above −dual_clip·A."""
    value_clip: float | None = None
    """Keep the value within this distance of the old one, in the loss."""
    value_coef: float = 0.5
    """Weight of the critic's loss."""
    max_log_ratio: Annotated[float, ABOVE_0] = 10.0
    """Clamp on the log-ratio: it keeps the loss finite, and is no trust region."""
    target_kl: float | None = None
    """The soft level that early stopping and adaptive coefficients aim at."""
    epochs: Annotated[int, ABOVE_0] = 4
    """Passes over the data of each update."""
    minibatch: Annotated[int, ABOVE_0] = 256
    """Rows per optimizer step, of tokens completions; the remainder is used, not dropped."""
    learning_rate: Annotated[float, ABOVE_0] = 3e-4
    """Adam's step size."""
    schedule: Literal["constant", "linear"] = "linear"
    """How the learning rate goes: `linear` ends at 0."""
    max_grad_norm: Annotated[float, ABOVE_0] = 0.5
    """Bound on the gradient's norm."""


@dataclass(frozen=True)
class Checkpoints:
    """What is kept for resuming."""

    every: Annotated[int, ABOVE_0] = 100_000
    """Agent steps between checkpoints; the last and the best are always kept."""
    keep: Annotated[int, ABOVE_0] = 3
    """How many of the others to keep."""


@dataclass(frozen=True)
class RunSettings:
    """Settings of a whole run."""

    env: Suppress[str]
    """The environment, or the kind of run."""
    seed: int = 0
    """Random seed of environments or prompts, networks, sampling and shuffling."""
    total_steps: Annotated[int, ABOVE_0] = 100_000
    """Agent steps, over all environments."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, …"""
    threads: Annotated[int, THREADS] = 0
    """torch's threads; 0: all cores for CNNs and language models, one for everything else."""
    tag: str = ""
    """Stored with the run, for comparing."""
    log: Annotated[tuple[str, ...], LISTED] = ()
    """Copies of the metrics: tensorboard, wandb, trackio."""
    doctor: bool = True
    """Diagnose the run while it goes on, and at its end into doctor.json."""

    def __post_init__(self) -> None:
        settle_texts(self)
