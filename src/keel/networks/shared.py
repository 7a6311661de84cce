"""CNNs, and networks whose actor and critic share a trunk."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from keel.errors import InputError
from keel.networks.actor_critic import Head, Outputs, Part, orthogonal
from keel.types import ENCODING, FIRST_ENCODING, Tree

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


class Image(nn.Module):
    """The one image of a tree of observations, as it is."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def forward(self, obs: Tree) -> Tensor:
        """Return the image, `[*lead, C, H, W]`."""
        return obs[self.key]


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
