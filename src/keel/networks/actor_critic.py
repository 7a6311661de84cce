"""Networks: observation trees to policy outputs and values.

A `Network` has an actor and a critic; `part` says which of them a call needs. What they share is in
`trunk`, so that every parameter has one role: actor, critic or shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from keel.errors import InputError, check_choice
from keel.keys import ENCODING, FIRST_ENCODING, MASK
from keel.types import Tree

Part = Literal["both", "actor", "critic"]
Activation = Literal["tanh", "relu", "gelu"]
MAX_SMALL = 256
"""The width above which matrix products are all that counts, and torch's threads help with them."""
NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Filters, size and stride of the convolutions of Mnih et al. 2015."""
SMALL = ((16, 8, 4), (32, 4, 2))
"""Those of Mnih et al. 2013: with 256 features a third of the arithmetic."""
MIDDLE = ((32, 5, 2), (64, 3, 2), (64, 3, 1))
"""Convolutions for images between 20 and 35 pixels high or wide, which those of 2015 do not fit."""
TINY = {"nature": ((32, 3, 1), (64, 3, 2)), "small": ((16, 3, 1), (32, 3, 2))}
"""Convolutions for images from 7×7, such as MiniGrid's."""
LARGEST_MAP = 65_536
"""Numbers that the last convolution may give; larger images get more layers of stride 2."""
SPACE_KEYS_IGNORED = (MASK,)


class Outputs(NamedTuple):
    """Outputs of a network; a part that was not asked for is None."""

    policy: Tensor | None
    """`[*lead, K]`"""
    value: Tensor | None
    """`[*lead, Q]`: raw critic output"""
    hidden_state: Tree | None = None
    """`[B, L, H]` after every row, of recurrent networks (`keel.networks.recurrent`)"""


def activation(name: Activation) -> Callable[[Tensor], Tensor]:
    """Return the non-linearity; tanh as 2·sigmoid(2x) − 1, which costs half as much on a CPU."""
    check_choice("activation", name, ("tanh", "relu", "gelu"))
    if name == "tanh":
        return lambda x: 2.0 * torch.sigmoid(2.0 * x) - 1.0
    return torch.relu if name == "relu" else nn.functional.gelu


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float, generator: torch.Generator) -> None:
    """Set orthogonal weights and zero bias (Saxe et al. 2014; "37 details" of PPO, number 2)."""
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


class Flatten(nn.Module):
    """A tree of observations as one float vector per row; Discrete and MultiDiscrete as one-hot."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], classes: dict[str, tuple[int, ...]]
    ) -> None:
        super().__init__()
        self.shapes = {k: v for k, v in shapes.items() if k not in SPACE_KEYS_IGNORED}
        self.classes = classes
        self.sizes = {
            key: sum(classes[key]) if key in classes else math.prod(shape)
            for key, shape in self.shapes.items()
        }
        self.size = sum(self.sizes.values())

    @property
    def is_vector(self) -> bool:
        """Whether there is one part alone, of numbers."""
        return len(self.shapes) == 1 and not self.classes

    def forward(self, obs: Tree) -> Tensor:
        """Concatenate the tree to one vector per row, `[*lead, size]`."""
        parts = []
        for key, shape in self.shapes.items():
            x = obs[key]
            if key in self.classes:
                counts = self.classes[key]
                columns = x.long().unbind(-1) if shape else (x.long(),)
                parts += [
                    nn.functional.one_hot(column, count).float()
                    for column, count in zip(columns, counts, strict=True)
                ]
            elif len(shape) == 1:
                parts.append(x.float())
            else:
                lead = x.shape[: x.ndim - len(shape)]
                parts.append(x.float().reshape(*lead, math.prod(shape)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class Image(nn.Module):
    """The one image of a tree of observations, as it is."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def forward(self, obs: Tree) -> Tensor:
        """Return the image, `[*lead, C, H, W]`."""
        return obs[self.key]


class MLP(nn.Module):
    """Linear layers with one non-linearity between them, and none at the end unless asked for.

    Args:
        sizes: widths of all layers, input first.
        act: non-linearity.
        generator: source of the orthogonal initial weights.
        last_gain: gain of the last layer's initial weights.
        act_last: whether a non-linearity follows the last layer, too.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        act: Activation,
        generator: torch.Generator,
        last_gain: float,
        *,
        act_last: bool = False,
    ) -> None:
        super().__init__()
        self.act_name = act
        self.act_last = act_last
        self.sizes = np.array(sizes, np.int64)
        self.act = activation(act)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            last = index == len(self.layers) - 1
            orthogonal(layer, last_gain if last else math.sqrt(2.0), generator)

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers: `[*lead, sizes[-1]]`."""
        for layer in self.layers[:-1]:
            x = self.act(layer(x))
        x = self.layers[-1](x)
        return self.act(x) if self.act_last else x

    @property
    def is_small(self) -> bool:
        """Whether `keel.kernels.mlp` can run it, and faster than torch."""
        simple = self.act_name in ("tanh", "relu") and not self.act_last
        return simple and int(self.sizes[1:].max()) <= MAX_SMALL

    def pure(self, params: Tree, prefix: str, x: Tensor) -> Tensor:
        """Apply the layers with other parameters, named as in the network that holds this one."""
        last = len(self.layers) - 1
        for i in range(last + 1):
            weight, bias = (params[f"{prefix}.layers.{i}.{kind}"] for kind in ("weight", "bias"))
            x = affine(x, weight, bias)
            if i < last or self.act_last:
                x = self.act(x)
        return x


Convolutions = Sequence[tuple[int, int, int]]
"""Filters, size and stride of each."""


def feature_map(shape: tuple[int, ...], convolutions: Convolutions) -> tuple[int, int, int]:
    """Return channels, height and width after the convolutions; below 1 where they do not fit."""
    channels, height, width = shape
    for filters, kernel, stride in convolutions:
        channels = filters
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
    return channels, height, width


def convolutions_for(shape: tuple[int, ...], kind: str, encoding: int = ENCODING) -> Convolutions:
    """Return the convolutions that fit an image `[C, H, W]`, from 7×7 to any size.

    Args:
        shape: of the image.
        kind: `nature` or `small`; taken as they are wherever they fit.
        encoding: in the first, they are taken as they are everywhere.
    """
    standard: Convolutions = NATURE if kind == "nature" else SMALL
    if encoding == FIRST_ENCODING:
        return standard
    for convolutions in (standard, MIDDLE, TINY[kind]):
        if min(feature_map(shape, convolutions)) >= 1:
            break
    while math.prod(feature_map(shape, convolutions)) > LARGEST_MAP:
        deeper = (*convolutions, (64, 3, 2))
        if min(feature_map(shape, deeper)) < 1:
            break
        convolutions = deeper
    return convolutions


class CNN(nn.Module):
    """Convolutions and a layer of `features`, on images `[*lead, C, H, W]`.

    Runs in channels_last memory, which lifts the CPU's convolutions by about a third.

    Args:
        shape: `[C, H, W]` of an image.
        generator: source of the orthogonal initial weights.
        features: width of the last layer.
        convolutions: filters, size and stride of each.
        scale: factor on the pixels.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator,
        features: int = 512,
        *,
        convolutions: Convolutions = NATURE,
        scale: float = 1.0 / 255.0,
    ) -> None:
        super().__init__()
        self.scale = scale
        layers, channels = [], shape[0]
        for filters, kernel, stride in convolutions:
            layers.append(nn.Conv2d(channels, filters, kernel, stride=stride))
            channels = filters
        channels, height, width = feature_map(shape, convolutions)
        if height < 1 or width < 1:
            raise InputError(
                f"observation {shape}: too small for the CNN, which wants channels first and at "
                "least 7×7; take `--network.kind mlp`"
            )
        self.convolutions = nn.ModuleList(layers)
        self.linear = nn.Linear(channels * height * width, features)
        for layer in (*self.convolutions, self.linear):
            assert isinstance(layer, nn.Linear | nn.Conv2d)
            orthogonal(layer, math.sqrt(2.0), generator)
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        """Return features `[*lead, features]` of images `[*lead, C, H, W]`."""
        lead = x.shape[:-3]
        x = x.reshape(-1, *x.shape[-3:]).to(memory_format=torch.channels_last).float()
        first, *others = self.convolutions
        assert isinstance(first, nn.Conv2d)
        # pixels are scaled to [0, 1] by way of the first weights: the images are a thousand times
        # larger, and a copy of them took a sixth of the pass
        scaled = first.weight * self.scale
        x = torch.relu_(nn.functional.conv2d(x, scaled, first.bias, first.stride))
        for layer in others:
            x = torch.relu_(layer(x))
        x = x.permute(0, 2, 3, 1).flatten(1)  # as it lies: channels last, and no copy
        x = torch.relu_(self.linear(x))
        return x.reshape(*lead, self.features)


class Head(nn.Module):
    """The policy's last operation: logits as they are, or means beside initial `log_std` `[D]`."""

    def __init__(self, outputs: int, log_std: Tensor | None) -> None:
        super().__init__()
        self.outputs = outputs
        self.log_std = None if log_std is None else nn.Parameter(log_std)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the policy, `[*lead, K]`."""
        return x if self.log_std is None else widen(x, self.log_std)


def widen(means: Tensor, log_std: Tensor) -> Tensor:
    """Join means `[*lead, D]` and log-stds `[D]`; of agents `[A, R, D]` and `[A, D]`."""
    if log_std.ndim == 2:
        log_std = log_std[:, None]
    return torch.cat([means, log_std.expand(*means.shape[:-1], -1)], -1)


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return x·Wᵀ + b; with weights of their own for several agents, `[A, R, I]` by `[A, O, I]`."""
    if weight.ndim == 2:
        return nn.functional.linear(x, weight, bias)
    return torch.baddbmm(bias[:, None], x, weight.mT)


class SeparateActorCritic(nn.Module):
    """Actor and critic with nothing in common: two MLPs.

    Args:
        encoder: from observation trees to vectors.
        hidden: widths of the hidden layers of both.
        act: non-linearity.
        head: from the actor's outputs to those of the policy.
        values: outputs Q of the critic.
        generator: source of the initial weights.
        critic_encoder: encoder of a critic that sees more than the actor; the same by default.
    """

    def __init__(
        self,
        encoder: Flatten,
        hidden: Sequence[int],
        act: Activation,
        head: Head,
        values: int,
        generator: torch.Generator,
        critic_encoder: Flatten | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.critic_encoder = critic_encoder or encoder
        self.head = head
        critic_inputs = self.critic_encoder.size
        self.actor = MLP((encoder.size, *hidden, head.outputs), act, generator, last_gain=0.01)
        self.critic = MLP((critic_inputs, *hidden, values), act, generator, last_gain=1.0)

    def forward(self, obs: Tree, part: Part = "both") -> Outputs:
        """Run actor and critic, or the part asked for."""
        return self.pure(dict(self.named_parameters()), obs, part)

    def pure(self, params: Tree, obs: Tree, part: Part = "both") -> Outputs:
        """Run with other parameters; `torch.func.functional_call` would take 0.3 ms more."""
        policy = value = x = None
        if part != "critic":
            x = self.encoder(obs)
            policy = self.actor.pure(params, "actor", x)
            if self.head.log_std is not None:
                policy = widen(policy, params["head.log_std"])
        if part != "actor":
            if x is None or self.critic_encoder is not self.encoder:
                x = self.critic_encoder(obs)
            value = self.critic.pure(params, "critic", x)
        return Outputs(policy, value)


class SharedActorCritic(nn.Module):
    """A shared trunk (`nn.Identity` for none), and two branches: actor and critic.

    With a CNN for a trunk the usual choice for pixels; with `Projection` the decoupled network.
    `encoder` maps observation trees to one tensor, `head` the actor's outputs to the policy's.
    """

    def __init__(
        self, encoder: nn.Module, trunk: nn.Module, actor: nn.Module, critic: nn.Module, head: Head
    ) -> None:
        super().__init__()
        self.encoder, self.trunk = encoder, trunk
        self.head, self.actor, self.critic = head, actor, critic

    def forward(self, obs: Tree, part: Part = "both") -> Outputs:
        """Run actor and critic, or the part asked for."""
        x = self.trunk(self.encoder(obs))
        return Outputs(
            None if part == "critic" else self.head(self.actor(x)),
            None if part == "actor" else self.critic(x),
        )


class Branch(nn.Module):
    """A branch of the decoupled network: Linear → LayerNorm → ReLU of width `size`, twice."""

    def __init__(self, size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            orthogonal(layer, math.sqrt(2.0), generator)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both layers: `[*lead, size]`."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        return x


class Projection(nn.Module):
    """The trunk of the decoupled network, `hidden` numbers: LayerNorm → Linear → GELU → Linear."""

    def __init__(
        self, inputs: int, projection: int, hidden: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(inputs)
        self.first, self.second = nn.Linear(inputs, projection), nn.Linear(projection, hidden)
        for layer in (self.first, self.second):
            orthogonal(layer, math.sqrt(2.0), generator)

    def forward(self, x: Tensor) -> Tensor:
        """Project observations `[*lead, inputs]`: `[*lead, hidden]`."""
        projected: Tensor = self.second(nn.functional.gelu(self.first(self.norm(x))))
        return projected
