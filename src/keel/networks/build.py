"""Build an agent from spaces and a configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from keel.config import Agents, Network
from keel.config import Critic as CriticConfig
from keel.config.common import DISTRIBUTIONS, NETWORKS
from keel.distributions.actions import Categorical, Dist, Gaussian
from keel.errors import InputError
from keel.keys import AGENT, ENCODING, STATE
from keel.networks.actor_critic import (
    Flatten,
    SeparateActorCritic,
)
from keel.networks.agent import Agent
from keel.networks.critics import Critic, Histogram, Quantile, Scalar
from keel.networks.kinds import (
    Plan,
    items_key,
    joined_apart,
    pointer_network,
    policy_head,
    start_state_std,
)
from keel.networks.multi_input import Spaces, spaces_of
from keel.networks.own import OwnActorCritic, build_own


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
        encoding: how observations become numbers (`keel.keys.ENCODING`).
    """
    generator = torch.Generator().manual_seed(seed)
    returns = build_critic(critic or CriticConfig())
    values = returns.outputs
    dist = build_dist(action, squash=config.squash, kind=config.distribution)
    parts = spaces_of(observation, encoding)
    if agents:
        many = many or Agents()
        if config.kind != "auto" and not NETWORKS.is_builtin(config.kind):
            return _own_many(observation, action, dist, returns, config, seed, agents, many)
        return _build_many(parts, dist, returns, config, generator, agents, many)
    kind = _kind(config, parts.shapes, dist)
    network: nn.Module
    if NETWORKS.is_builtin(kind):
        network = NETWORKS.get(kind)(Plan(parts, dist, values, config, generator, encoding))
        start_state_std(network, dist, config)
    else:
        network = _own(kind, observation, action, dist, returns, config, seed)
    return Agent(network, dist, critic=returns)


def _own(
    kind: str,
    observation: spaces.Space[Any],
    action: spaces.Space[Any],
    dist: Dist,
    returns: Critic,
    config: Network,
    seed: int,
) -> OwnActorCritic:
    return build_own(
        NETWORKS.get(kind),
        observation,
        action,
        dist,
        returns,
        log_std=config.log_std,
        recurrent=config.recurrent,
        seed=seed,
    )


def _build_many(
    parts: Spaces,
    dist: Dist,
    returns: Critic,
    config: Network,
    generator: torch.Generator,
    agents: Sequence[str],
    many: Agents,
) -> Agent:
    """Build a network for every row of parameters; critics may see more than actors."""
    shapes, classes, _ = parts
    kind = _kind(config, {k: x for k, x in shapes.items() if k != STATE}, dist)
    if kind not in ("mlp", "cnn", "pointer") or config.recurrent != "none":
        raise InputError(
            "network: several agents have networks of kind mlp, cnn or pointer without memory, "
            f"not {kind}" + ("" if config.recurrent == "none" else " with memory")
        )
    rows, members = sharing(agents, many.sharing)
    hidden = {STATE} | (set() if len(rows) < len(agents) else {AGENT})
    actor_shapes = {key: shape for key, shape in shapes.items() if key not in hidden}
    critic_shapes = dict(actor_shapes)
    if many.critic == "central" and STATE in shapes:
        critic_shapes = {STATE: shapes[STATE], **actor_shapes}

    def network() -> nn.Module:
        if kind == "pointer":
            return pointer_network(
                actor_shapes, critic_shapes, classes, dist, returns.outputs, config, generator
            )
        built: nn.Module
        if kind == "cnn" or parts.of([STATE]).images:
            views = parts.of(list(actor_shapes)), parts.of(list(critic_shapes))
            built = joined_apart(
                *views, policy_head(dist, config), returns.outputs, config, generator
            )
        else:
            built = SeparateActorCritic(
                Flatten(actor_shapes, classes),
                config.hidden,
                config.activation,
                policy_head(dist, config),
                returns.outputs,
                generator,
                None if critic_shapes == actor_shapes else Flatten(critic_shapes, classes),
            )
        start_state_std(built, dist, config)
        return built

    return _stack([network() for _ in rows], dist, returns, members, rows)


def _own_many(
    observation: spaces.Space[Any],
    action: spaces.Space[Any],
    dist: Dist,
    returns: Critic,
    config: Network,
    seed: int,
    agents: Sequence[str],
    many: Agents,
) -> Agent:
    """Build a network from outside for every row of parameters; it sees what its agent sees."""
    assert isinstance(observation, spaces.Dict)
    if many.critic == "central" and STATE in observation.spaces:
        raise InputError(
            f"network.kind {config.kind}: a network of your own sees what its agent sees; "
            "use agents.critic own"
        )
    rows, members = sharing(agents, many.sharing)
    hidden = {STATE} | (set() if len(rows) < len(agents) else {AGENT})
    seen = {key: space for key, space in observation.spaces.items() if key not in hidden}
    networks = [
        _own(config.kind, spaces.Dict(seen), action, dist, returns, config, seed + row)
        for row in range(len(rows))
    ]
    return _stack(networks, dist, returns, members, rows)


def _stack(
    networks: Sequence[nn.Module],
    dist: Dist,
    returns: Critic,
    members: tuple[int, ...],
    rows: tuple[str, ...],
) -> Agent:
    """Return one agent of equal networks, a row of parameters each."""
    agents_by_row = [Agent(network, dist, critic=returns) for network in networks]
    agent = Agent(agents_by_row[0].network, dist, len(rows), returns, members, rows)
    agent.initial = torch.cat([one.initial for one in agents_by_row])
    return agent


def sharing(agents: Sequence[str], how: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the rows of parameters by name, and the row of each agent.

    Args:
        agents: names of the agents.
        how: `none`, `all`, or by the kind that a name without its number tells.
    """
    if how == "none":
        return tuple(agents), tuple(range(len(agents)))
    kinds = ["all" if how == "all" else name.rstrip("0123456789").rstrip("_-") for name in agents]
    rows = tuple(dict.fromkeys(kinds))
    return rows, tuple(rows.index(kind) for kind in kinds)


def _kind(config: Network, shapes: dict[str, tuple[int, ...]], dist: Dist) -> str:
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
