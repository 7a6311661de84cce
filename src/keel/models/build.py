"""From spaces and a configuration to an agent."""

from __future__ import annotations

import math
from typing import Any

import torch
from gymnasium import spaces

from keel.config import Network
from keel.errors import InputError
from keel.models.agent import Agent
from keel.models.distributions import (
    Bernoulli,
    Categorical,
    Dist,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
)
from keel.models.networks import Decoupled, Flatten, Head, NatureCNN, Separate, Shared


def build_agent(
    observation: spaces.Space[Any], action: spaces.Space[Any], config: Network, seed: int
) -> Agent:
    """The agent for one environment's spaces; its initial weights depend on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    dist = build_dist(action, squash=config.squash)
    head = _head(dist, config.log_std)
    shapes, classes = _layout(observation)
    pixels = [key for key, shape in shapes.items() if len(shape) == 3]
    kind = config.kind if config.kind != "auto" else "cnn" if pixels else "mlp"
    if kind == "cnn":
        if len(pixels) != 1 or len(shapes) != 1:
            raise InputError(f"network.kind: a CNN needs one image, the observation is {shapes}")
        trunk = NatureCNN(shapes[pixels[0]], generator, config.features)
        return Agent(Shared(pixels[0], trunk, head, 1, generator), dist)
    encoder = Flatten(shapes, classes)
    if kind == "decoupled":
        width = config.hidden[-1]
        return Agent(Decoupled(encoder, config.features, width, head, 1, generator), dist)
    return Agent(Separate(encoder, config.hidden, config.activation, head, 1, generator), dist)


def build_dist(action: spaces.Space[Any], *, squash: bool = False) -> Dist:
    """The distribution of an action space."""
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


def _head(dist: Dist, log_std: float) -> Head:
    if isinstance(dist, Gaussian | SquashedGaussian):
        dim = dist.outputs // 2
        return Head(dim, torch.full((dim,), log_std))
    return Head(dist.outputs, None)


def _layout(
    observation: spaces.Space[Any],
) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Shapes by key, and the number of classes of keys that hold integers."""
    parts = observation.spaces if isinstance(observation, spaces.Dict) else {"obs": observation}
    shapes: dict[str, tuple[int, ...]] = {}
    classes: dict[str, int] = {}
    for key, space in parts.items():
        if isinstance(space, spaces.Discrete):
            shapes[key], classes[key] = (), int(space.n)
        elif space.shape is None:
            raise InputError(f"observation {key!r}: {space} has no fixed shape")
        else:
            shapes[key] = tuple(space.shape) or (1,)
    return shapes, classes
