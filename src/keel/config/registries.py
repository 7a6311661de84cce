"""Registries of what settings may name, with Keel's own entries; code of users adds its own.

Entries are texts, so that nothing is imported before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from tyro.conf import arg

from keel.registry import Registry

LOSSES: Registry[Callable[..., Any]] = Registry(
    "region.loss",
    {
        "clip": "keel.losses.surrogates:clip",
        "symmetric": "keel.losses.surrogates:symmetric",
        "unclipped": "keel.losses.surrogates:unclipped",
        "cispo": "keel.losses.surrogates:cispo",
        "sequence": "keel.losses.surrogates:sequence",
    },
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
    {
        "adaptive_kl": "keel.training.builder:adaptive_kl",
        "adaptive_rate": "keel.training.builder:adaptive_rate",
        "adaptive_clip": "keel.training.builder:adaptive_clip",
        "stabilizer": "keel.training.builder:stabilizer",
        "demos": "keel.training.builder:demos",
        "entropy_decay": "keel.training.builder:entropy_decay",
        "pulses": "keel.training.builder:pulses",
        "hierarchical": "keel.training.builder:hierarchical",
    },
)
"""Controllers: objects of the protocol `keel.controllers.controllers.Controller`, or what makes
them."""

ADVANTAGES: Registry[Callable[..., Any]] = Registry(
    "advantage.estimator", {"gae": "keel.functional:gae"}
)
"""Estimators of advantages of environments: rewards and values to advantages and targets."""

GROUPS: Registry[Callable[..., Any]] = Registry("advantage.group")
"""Functions of observations to the groups that advantages are normalized in."""


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
