"""Builders of Keel's own kinds of networks but the MLP, entries of
`keel.config.common.NETWORKS`."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from keel.networks.actor_critic import MLP, Spaces
from keel.networks.build import Plan, items_key
from keel.networks.multi_input import JoinedEncoder, SeparateJoined
from keel.networks.pointer import PointerActorCritic
from keel.networks.recurrent import RecurrentActorCritic, Tower
from keel.networks.shared import CNN, Branch, Image, Projection, SharedActorCritic, convolutions_for


def build_cnn(plan: Plan) -> nn.Module:
    """Build a CNN for one image, or an encoder for images beside other things."""
    shapes = plan.parts.shapes
    if plan.parts.images != list(shapes) or len(shapes) != 1:
        return _joined(plan)
    (key,) = shapes
    return _image_network(key, plan)


def build_decoupled(plan: Plan) -> nn.Module:
    """Build the decoupled network: a shared projection, then branches of their own."""
    if plan.config.recurrent != "none":
        return recurrent_network("decoupled", plan)
    width, generator = plan.config.hidden[-1], plan.generator

    def branch(outputs: int, gain: float) -> nn.Module:
        return nn.Sequential(
            Branch(width, generator), MLP((width, outputs), "relu", generator, gain)
        )

    encoder, head = plan.parts.flatten(), plan.head
    trunk = Projection(encoder.size, plan.config.features, width, generator)
    actor, critic = branch(head.outputs, 0.01), branch(plan.values, 1.0)
    return SharedActorCritic(encoder, trunk, actor, critic, head)


def build_pointer(plan: Plan) -> nn.Module:
    """Build a network that scores the rows of a matrix."""
    if plan.config.recurrent != "none":
        return recurrent_network("pointer", plan)
    shapes = plan.parts.shapes
    key = items_key(shapes, plan.dist)
    assert key is not None
    critic = plan.critic_parts
    return PointerActorCritic(
        plan.parts.without(key).flatten(),
        key,
        (shapes[key][0], shapes[key][1]),
        plan.dist.outputs,
        plan.config.hidden,
        plan.config.activation,
        plan.values,
        plan.generator,
        None if critic is None else critic.without(key).flatten(),
    )


def _image_network(key: str, plan: Plan) -> nn.Module:
    """Build a network for one image: a CNN for both, or one each, before their last layers."""
    parts, config, generator = plan.parts, plan.config, plan.generator
    shape, width = parts.shapes[key], config.features
    convolutions = convolutions_for(shape, config.cnn, plan.encoding)

    def make_cnn() -> nn.Module:
        scale = parts.scales[key]
        return CNN(shape, generator, width, convolutions=convolutions, scale=scale)

    trunk = make_cnn() if config.share else nn.Identity()
    body = nn.Identity if config.share else make_cnn
    if config.recurrent != "none":
        return _recurrent_actor_critic(Image(key), trunk, body, width, plan)

    def branch(outputs: int, gain: float) -> nn.Module:
        features = body()
        last = MLP((width, outputs), "relu", generator, gain)
        return last if config.share else nn.Sequential(features, last)

    head = plan.head
    actor, critic = branch(head.outputs, 0.01), branch(plan.values, 1.0)
    return SharedActorCritic(Image(key), trunk, actor, critic, head)


def _joined(plan: Plan) -> nn.Module:
    """Build a network for images beside other things: one or two encoders, then the MLPs."""
    parts, config, generator = plan.parts, plan.config, plan.generator
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

        def body() -> nn.Module:
            return behind(MLP(sizes, act, generator, gain, act_last=True))

        return _recurrent_actor_critic(parts.flatten(), trunk, body, config.hidden[-1], plan)
    head = plan.head
    actor = behind(MLP((width, *config.hidden, head.outputs), act, generator, 0.01))
    critic = behind(MLP((width, *config.hidden, plan.values), act, generator, 1.0))
    return SharedActorCritic(parts.flatten(), trunk, actor, critic, head)


def joined_apart(plan: Plan) -> SeparateJoined:
    """Build networks of one of several agents, whose critic may see more than its actor."""
    config, generator, head = plan.config, plan.generator, plan.head

    def tower(parts: Spaces, outputs: int, gain: float) -> nn.Module:
        encoder = JoinedEncoder(parts, generator, config.features, config.cnn)
        sizes = (encoder.size, *config.hidden, outputs)
        return nn.Sequential(encoder, MLP(sizes, config.activation, generator, gain))

    critic_parts = plan.critic_parts or plan.parts
    actor, critic = tower(plan.parts, head.outputs, 0.01), tower(critic_parts, plan.values, 1.0)
    return SeparateJoined(plan.parts.flatten(), critic_parts.flatten(), actor, critic, head)


def recurrent_network(kind: str, plan: Plan) -> RecurrentActorCritic:
    """Build the MLP or the decoupled network with a GRU before the last layers."""
    encoder, config, generator = plan.parts.flatten(), plan.config, plan.generator
    width, sizes = config.hidden[-1], (encoder.size, *config.hidden)
    trunk: nn.Module = nn.Identity()
    if kind == "decoupled":
        trunk = Projection(encoder.size, config.features, width, generator)

    def body() -> nn.Module:
        if kind == "decoupled":
            return Branch(width, generator)
        return MLP(sizes, config.activation, generator, math.sqrt(2.0), act_last=True)

    return _recurrent_actor_critic(encoder, trunk, body, width, plan)


def _recurrent_actor_critic(
    encoder: nn.Module, trunk: nn.Module, body: Callable[[], nn.Module], width: int, plan: Plan
) -> RecurrentActorCritic:
    config, head = plan.config, plan.head

    def tower(name: str, outputs: int, gain: float) -> Tower:
        hidden_size = config.recurrent_size if config.recurrent in (name, "both") else None
        return Tower(body(), width, outputs, hidden_size, plan.generator, gain)

    actor, critic = tower("actor", head.outputs, 0.01), tower("critic", plan.values, 1.0)
    return RecurrentActorCritic(encoder, trunk, actor, critic, head)
