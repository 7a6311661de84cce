"""Build an agent from spaces and a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from keel.config import Agents, Network
from keel.config import Critic as CriticConfig
from keel.distributions.actions import (
    Bernoulli,
    Categorical,
    Dist,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
)
from keel.errors import InputError
from keel.keys import AGENT, ENCODING, STATE
from keel.networks.actor_critic import (
    CNN,
    MLP,
    Branch,
    Flatten,
    Head,
    Image,
    Projection,
    SeparateActorCritic,
    SharedActorCritic,
    convolutions_for,
)
from keel.networks.agent import Agent
from keel.networks.critics import Critic, Histogram, Quantile, Scalar
from keel.networks.multi_input import JoinedEncoder, SeparateJoined, Spaces, spaces_of
from keel.networks.pointer import PointerActorCritic
from keel.networks.recurrent import RecurrentActorCritic, Tower


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
    dist = build_dist(action, squash=config.squash)
    parts = spaces_of(observation, encoding)
    if agents:
        return _build_many(parts, dist, returns, config, generator, agents, many or Agents())
    shapes, classes, scales = parts
    kind = _kind(config, shapes, dist)
    encoder, head = parts.flatten(), _head(dist, config)
    network: nn.Module
    if kind == "cnn" and parts.images == list(shapes) and len(shapes) == 1:
        (key,) = shapes
        convolutions = convolutions_for(shapes[key], config.cnn, encoding)
        make_cnn = partial(
            CNN, shapes[key], generator, config.features,
            convolutions=convolutions, scale=scales[key],
        )  # fmt: skip
        network = _image_network(key, make_cnn, head, values, config, generator)
    elif kind == "cnn":
        network = _joined(parts, head, values, config, generator)
    elif config.recurrent != "none":
        network = _recurrent_network(kind, encoder, head, values, config, generator)
    elif kind == "decoupled":
        network = _decoupled(encoder, head, values, config, generator)
    elif kind == "pointer":
        network = _pointer(shapes, shapes, classes, dist, values, config, generator)
    else:
        network = SeparateActorCritic(
            encoder, config.hidden, config.activation, head, values, generator
        )
    if config.state_std and isinstance(dist, Gaussian | SquashedGaussian):
        _start_std(network, config.log_std)
    return Agent(network, dist, critic=returns)


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
            return _pointer(
                actor_shapes, critic_shapes, classes, dist, returns.outputs, config, generator
            )
        built: nn.Module
        if kind == "cnn" or parts.of([STATE]).images:
            views = parts.of(list(actor_shapes)), parts.of(list(critic_shapes))
            built = _joined_apart(*views, _head(dist, config), returns.outputs, config, generator)
        else:
            built = SeparateActorCritic(
                Flatten(actor_shapes, classes),
                config.hidden,
                config.activation,
                _head(dist, config),
                returns.outputs,
                generator,
                None if critic_shapes == actor_shapes else Flatten(critic_shapes, classes),
            )
        if config.state_std and isinstance(dist, Gaussian | SquashedGaussian):
            _start_std(built, config.log_std)
        return built

    agents_by_row = [Agent(network(), dist, critic=returns) for _ in rows]
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
    if config.kind == "pointer" and _items_key(shapes, dist) is None:
        raise InputError(
            "network.kind items: needs Discrete actions and one matrix in the observation, with as "
            f"many rows as there are items to choose from; this observation is {shapes}"
        )
    return config.kind


def _items_key(shapes: dict[str, tuple[int, ...]], dist: Dist) -> str | None:
    """Return the key of the matrix whose rows are what an action chooses from."""
    matrices = [key for key, shape in shapes.items() if len(shape) == 2]
    if len(matrices) != 1 or not isinstance(dist, Categorical):
        return None
    count = shapes[matrices[0]][0]
    return matrices[0] if dist.n >= count and dist.n % count < count else None


def _pointer(
    actor_shapes: dict[str, tuple[int, ...]],
    critic_shapes: dict[str, tuple[int, ...]],
    classes: dict[str, tuple[int, ...]],
    dist: Dist,
    values: int,
    config: Network,
    generator: torch.Generator,
) -> PointerActorCritic:
    key = _items_key(actor_shapes, dist)
    assert key is not None
    others = [{k: v for k, v in x.items() if k != key} for x in (actor_shapes, critic_shapes)]
    return PointerActorCritic(
        Flatten(others[0], classes),
        key,
        (actor_shapes[key][0], actor_shapes[key][1]),
        dist.outputs,
        config.hidden,
        config.activation,
        values,
        generator,
        None if critic_shapes == actor_shapes else Flatten(others[1], classes),
    )


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


def _image_network(
    key: str,
    make_cnn: Callable[[], nn.Module],
    head: Head,
    values: int,
    config: Network,
    generator: torch.Generator,
) -> nn.Module:
    """Build a network for one image: a CNN for both, or one each, before their last layers."""
    image, width = Image(key), config.features
    trunk = make_cnn() if config.share else nn.Identity()
    body = nn.Identity if config.share else make_cnn
    if config.recurrent != "none":
        return _recurrent_actor_critic(image, trunk, body, width, head, values, config, generator)

    def branch(outputs: int, gain: float) -> nn.Module:
        features = body()
        last = MLP((width, outputs), "relu", generator, gain)
        return last if config.share else nn.Sequential(features, last)

    return SharedActorCritic(image, trunk, branch(head.outputs, 0.01), branch(values, 1.0), head)


def _joined(
    parts: Spaces, head: Head, values: int, config: Network, generator: torch.Generator
) -> nn.Module:
    """Build a network for images beside other things: one or two encoders, then the MLPs."""
    encoders = [
        JoinedEncoder(parts, generator, config.features, config.cnn)
        for _ in range(1 if config.share else 2)
    ]
    width, act = encoders[0].size, config.activation
    trunk = encoders[0] if config.share else nn.Identity()

    def behind(layers: nn.Module) -> nn.Module:
        return layers if config.share else nn.Sequential(encoders.pop(0), layers)

    if config.recurrent != "none":
        sizes, gain = (width, *config.hidden), math.sqrt(2.0)
        return _recurrent_actor_critic(
            parts.flatten(),
            trunk,
            lambda: behind(MLP(sizes, act, generator, gain, act_last=True)),
            config.hidden[-1],
            head,
            values,
            config,
            generator,
        )
    actor = behind(MLP((width, *config.hidden, head.outputs), act, generator, 0.01))
    critic = behind(MLP((width, *config.hidden, values), act, generator, 1.0))
    return SharedActorCritic(parts.flatten(), trunk, actor, critic, head)


def _joined_apart(
    actor_parts: Spaces,
    critic_parts: Spaces,
    head: Head,
    values: int,
    config: Network,
    generator: torch.Generator,
) -> SeparateJoined:
    """Build networks of one of several agents, whose critic may see more than its actor."""

    def tower(parts: Spaces, outputs: int, gain: float) -> nn.Module:
        encoder = JoinedEncoder(parts, generator, config.features, config.cnn)
        sizes = (encoder.size, *config.hidden, outputs)
        return nn.Sequential(encoder, MLP(sizes, config.activation, generator, gain))

    actor, critic = tower(actor_parts, head.outputs, 0.01), tower(critic_parts, values, 1.0)
    return SeparateJoined(actor_parts.flatten(), critic_parts.flatten(), actor, critic, head)


def _decoupled(
    encoder: Flatten, head: Head, values: int, config: Network, generator: torch.Generator
) -> SharedActorCritic:
    """Build the decoupled network: a shared projection, then branches of their own."""
    width = config.hidden[-1]

    def branch(outputs: int, gain: float) -> nn.Module:
        return nn.Sequential(
            Branch(width, generator), MLP((width, outputs), "relu", generator, gain)
        )

    trunk = Projection(encoder.size, config.features, width, generator)
    return SharedActorCritic(encoder, trunk, branch(head.outputs, 0.01), branch(values, 1.0), head)


def _recurrent_network(
    kind: str,
    encoder: Flatten,
    head: Head,
    values: int,
    config: Network,
    generator: torch.Generator,
) -> RecurrentActorCritic:
    """Build the MLP or the decoupled network with a GRU before the last layers."""
    width, sizes = config.hidden[-1], (encoder.size, *config.hidden)
    if kind == "decoupled":
        trunk: nn.Module = Projection(encoder.size, config.features, width, generator)

        def body() -> nn.Module:
            return Branch(width, generator)
    else:
        trunk = nn.Identity()

        def body() -> nn.Module:
            return MLP(sizes, config.activation, generator, math.sqrt(2.0), act_last=True)

    return _recurrent_actor_critic(encoder, trunk, body, width, head, values, config, generator)


def _recurrent_actor_critic(
    encoder: nn.Module,
    trunk: nn.Module,
    body: Callable[[], nn.Module],
    width: int,
    head: Head,
    values: int,
    config: Network,
    generator: torch.Generator,
) -> RecurrentActorCritic:
    def tower(name: str, outputs: int, gain: float) -> Tower:
        hidden_size = config.recurrent_size if config.recurrent in (name, "both") else None
        return Tower(body(), width, outputs, hidden_size, generator, gain)

    actor, critic = tower("actor", head.outputs, 0.01), tower("critic", values, 1.0)
    return RecurrentActorCritic(encoder, trunk, actor, critic, head)


def build_dist(action: spaces.Space[Any], *, squash: bool = False) -> Dist:
    """Build the distribution of an action space.

    Args:
        action: Discrete, MultiDiscrete, MultiBinary or Box.
        squash: whether a Gaussian is squashed to the bounds of a Box.
    """
    if isinstance(action, spaces.Discrete):
        return Categorical(int(action.n))
    if isinstance(action, spaces.MultiDiscrete):
        return MultiCategorical(tuple(int(n) for n in action.nvec.reshape(-1)))
    if isinstance(action, spaces.MultiBinary):
        return Bernoulli(math.prod(action.shape))
    if isinstance(action, spaces.Box):
        if not squash:
            return Gaussian(math.prod(action.shape))
        low, high = action.low.reshape(-1).tolist(), action.high.reshape(-1).tolist()
        if not all(map(math.isfinite, (*low, *high))):
            raise InputError("network.squash: needs an action space with finite bounds")
        return SquashedGaussian(tuple(low), tuple(high))
    raise InputError(f"action space {action}: expected Discrete, MultiDiscrete, MultiBinary or Box")


def _head(dist: Dist, config: Network) -> Head:
    if isinstance(dist, Gaussian | SquashedGaussian) and not config.state_std:
        dim = dist.outputs // 2
        return Head(dim, torch.full((dim,), config.log_std))
    return Head(dist.outputs, None)


def _start_std(network: nn.Module, log_std: float) -> None:
    """Set the initial log-std, as the bias of the outputs that are log-stds."""
    biases = [p for name, p in network.named_parameters() if name.startswith("actor")]
    with torch.no_grad():
        biases[-1][len(biases[-1]) // 2 :] = log_std
