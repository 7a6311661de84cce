"""Builders of Keel's own kinds of networks but the MLP, entries of
`keel.config.common.NETWORKS`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from keel.config import Network
from keel.distributions.actions import Dist
from keel.networks.actor_critic import MLP, Flatten, Head, Spaces
from keel.networks.build import Plan, items_key
from keel.networks.multi_input import JoinedEncoder, SeparateJoined
from keel.networks.pointer import PointerActorCritic
from keel.networks.recurrent import RecurrentActorCritic, Tower
from keel.networks.shared import (
    CNN,
    Branch,
    Image,
    Projection,
    SharedActorCritic,
    convolutions_for,
)


def build_cnn(plan: Plan) -> nn.Module:
    """Build a CNN for one image, or an encoder for images beside other things."""
    parts, _, values, config, generator, encoding = plan
    shapes = parts.shapes
    if parts.images != list(shapes) or len(shapes) != 1:
        return _joined(parts, plan.head, values, config, generator)
    (key,) = shapes
    convolutions = convolutions_for(shapes[key], config.cnn, encoding)
    make_cnn = partial(
        CNN, shapes[key], generator, config.features,
        convolutions=convolutions, scale=parts.scales[key],
    )  # fmt: skip
    return _image_network(key, make_cnn, plan.head, values, config, generator)


def build_decoupled(plan: Plan) -> nn.Module:
    """Build the decoupled network: a shared projection, then branches of their own."""
    parts, _, values, config, generator, _ = plan
    encoder, head = parts.flatten(), plan.head
    if config.recurrent != "none":
        return recurrent_network("decoupled", encoder, head, values, config, generator)
    width = config.hidden[-1]

    def branch(outputs: int, gain: float) -> nn.Module:
        return nn.Sequential(
            Branch(width, generator), MLP((width, outputs), "relu", generator, gain)
        )

    trunk = Projection(encoder.size, config.features, width, generator)
    return SharedActorCritic(encoder, trunk, branch(head.outputs, 0.01), branch(values, 1.0), head)


def build_pointer(plan: Plan) -> nn.Module:
    """Build a network that scores the rows of a matrix."""
    parts, dist, values, config, generator, _ = plan
    if config.recurrent != "none":
        return recurrent_network("pointer", parts.flatten(), plan.head, values, config, generator)
    return pointer_network(
        parts.shapes, parts.shapes, parts.classes, dist, values, config, generator
    )


def pointer_network(
    actor_shapes: dict[str, tuple[int, ...]],
    critic_shapes: dict[str, tuple[int, ...]],
    classes: dict[str, tuple[int, ...]],
    dist: Dist,
    values: int,
    config: Network,
    generator: torch.Generator,
) -> PointerActorCritic:
    key = items_key(actor_shapes, dist)
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


def joined_apart(
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


def recurrent_network(
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
