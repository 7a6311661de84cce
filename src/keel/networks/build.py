"""Build an agent from spaces and a configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from gymnasium import spaces
from torch import nn

from keel.config import Agents, Network
from keel.config import Critic as CriticConfig
from keel.config.common import DISTRIBUTIONS, NETWORKS
from keel.distributions.actions import Categorical, Dist, Gaussian
from keel.errors import InputError
from keel.networks.actor_critic import Head, Scalar, SeparateActorCritic, Spaces, spaces_of
from keel.networks.agent import Agent
from keel.types import ENCODING

if TYPE_CHECKING:
    from keel.networks.critics import Critic


def build_agent(
    observation: spaces.Space[Any],
    action: spaces.Space[Any],
    config: Network,
    seed: int,
    critic: CriticConfig | None = None,
    agents: Sequence[str] = (),
    many: Agents | None = None,
    encoding: int = ENCODING,
) -> Agent:
    """Build the agent for one environment's spaces; its initial weights depend on `seed` alone.

    Args:
        observation: observation space.
        action: action space.
        config: settings of the network.
        seed: seed of the initial weights.
        critic: settings of the critic.
        agents: names of several agents: a row of parameters for each, or for those that share one.
        many: settings of several agents.
        encoding: how observations become numbers (`keel.types.ENCODING`).
    """
    generator = torch.Generator().manual_seed(seed)
    returns = build_critic(critic or CriticConfig())
    values = returns.outputs
    dist = build_dist(action, squash=config.squash, kind=config.distribution)
    parts = spaces_of(observation, encoding)
    if agents:
        from keel.networks import several

        many = many or Agents()
        if config.kind != "auto" and not NETWORKS.is_builtin(config.kind):
            return several.own_many(observation, action, dist, returns, config, seed, agents, many)
        return several.build_many(parts, dist, returns, config, generator, agents, many)
    kind = kind_of(config, parts.shapes, dist)
    network: nn.Module
    if NETWORKS.is_builtin(kind):
        network = NETWORKS.get(kind)(Plan(parts, dist, values, config, generator, encoding))
        start_state_std(network, dist, config)
    else:
        from keel.networks.own import build_own

        make = NETWORKS.get(kind)
        network = build_own(make, observation, action, dist, returns, config, seed)
    return Agent(network, dist, critic=returns)


class Plan(NamedTuple):
    """What the builder of a kind of network is told."""

    parts: Spaces
    dist: Dist
    values: int
    """numbers that the critic gives"""
    config: Network
    generator: torch.Generator
    encoding: int = ENCODING
    critic_parts: Spaces | None = None
    """what the critic sees, where it is not the same"""

    @property
    def head(self) -> Head:
        """The policy's last operation."""
        dim = 0 if self.config.state_std else self.dist.log_stds
        log_std = torch.full((dim,), self.config.log_std) if dim else None
        return Head(self.dist.outputs - dim, log_std)


def build_mlp(plan: Plan) -> nn.Module:
    """Build two MLPs, or two with a GRU before their last layers."""
    parts, config, critic = plan.parts, plan.config, plan.critic_parts
    if config.recurrent != "none":
        from keel.networks.kinds import recurrent_network

        return recurrent_network("mlp", plan)
    return SeparateActorCritic(
        parts.flatten(),
        config.hidden,
        config.activation,
        plan.head,
        plan.values,
        plan.generator,
        None if critic is None else critic.flatten(),
    )


def start_state_std(network: nn.Module, dist: Dist, config: Network) -> None:
    """Set the initial log-std, as the bias of the outputs that are log-stds."""
    if not (config.state_std and dist.log_stds):
        return
    biases = [p for name, p in network.named_parameters() if name.startswith("actor")]
    with torch.no_grad():
        biases[-1][-dist.log_stds :] = config.log_std


def items_key(shapes: dict[str, tuple[int, ...]], dist: Dist) -> str | None:
    """Return the key of the matrix whose rows are what an action chooses from."""
    matrices = [key for key, shape in shapes.items() if len(shape) == 2]
    if len(matrices) != 1 or not isinstance(dist, Categorical):
        return None
    count = shapes[matrices[0]][0]
    return matrices[0] if dist.n >= count and dist.n % count < count else None


def kind_of(config: Network, shapes: dict[str, tuple[int, ...]], dist: Dist) -> str:
    """Return the kind of network that is asked for, or that fits."""
    ranks = [len(shape) for shape in shapes.values()]
    if config.kind == "auto":
        return "cnn" if 3 in ranks else "mlp"
    if config.kind == "cnn" and 3 not in ranks:
        raise InputError(
            f"network.kind: a CNN needs an image, the observation is {shapes}; take "
            "`--network.kind mlp`"
        )
    if config.kind == "pointer" and items_key(shapes, dist) is None:
        raise InputError(
            "network.kind items: needs Discrete actions and one matrix in the observation, with as "
            f"many rows as there are items to choose from; this observation is {shapes}"
        )
    return config.kind


def build_critic(config: CriticConfig) -> Critic:
    """Build the meaning of the critic's outputs: a scalar, quantiles or a histogram."""
    normalized = config.normalize == "on" or (
        config.normalize == "auto" and config.kind != "scalar"
    )
    if config.kind == "scalar":
        return Scalar(normalized=normalized)
    from keel.networks.critics import Histogram, Quantile

    if config.kind == "quantile":
        return Quantile(
            config.quantiles, config.kappa, config.ordered, config.cvar, normalized=normalized
        )
    return Histogram(config.atoms, config.reach, config.kind, config.cvar, normalized=normalized)


def build_dist(action: spaces.Space[Any], *, squash: bool = False, kind: str = "auto") -> Dist:
    """Build the distribution of an action space.

    Args:
        action: Discrete, MultiDiscrete, MultiBinary or Box; of a distribution from outside, any.
        squash: whether a Gaussian is squashed to the bounds of a Box.
        kind: `auto`, or what names a distribution from outside.
    """
    if kind != "auto":
        from keel.networks.own_distribution import build_own_distribution

        return build_own_distribution(DISTRIBUTIONS.get(kind), action)
    if isinstance(action, spaces.Discrete):
        return Categorical(int(action.n))
    if isinstance(action, spaces.Box) and not squash:
        return Gaussian(math.prod(action.shape))
    from keel.distributions.composed import Bernoulli, MultiCategorical, SquashedGaussian

    if isinstance(action, spaces.MultiDiscrete):
        return MultiCategorical(tuple(int(n) for n in action.nvec.reshape(-1)))
    if isinstance(action, spaces.MultiBinary):
        return Bernoulli(math.prod(action.shape))
    if isinstance(action, spaces.Box):
        low, high = action.low.reshape(-1).tolist(), action.high.reshape(-1).tolist()
        if not all(map(math.isfinite, (*low, *high))):
            raise InputError("network.squash: needs an action space with finite bounds")
        return SquashedGaussian(tuple(low), tuple(high))
    raise InputError(f"action space {action}: expected Discrete, MultiDiscrete, MultiBinary or Box")
