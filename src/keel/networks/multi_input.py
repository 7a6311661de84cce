"""Observations of several parts: every image through a CNN of its own, the rest as it is, joined.

What Stable-Baselines3 calls MultiInputPolicy. `Flatten` lays all parts out in one vector, so that
everything around the network (rollouts, sequences, several agents) sees rows of numbers; the
`JoinedEncoder` cuts the images out of it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from keel.errors import InputError
from keel.keys import ENCODING, FIRST_ENCODING, is_image_shape
from keel.networks.actor_critic import CNN, Flatten, Head, Outputs, Part, convolutions_for
from keel.types import Tree


class Spaces(NamedTuple):
    """Spaces of an observation, by key."""

    shapes: dict[str, tuple[int, ...]]
    classes: dict[str, tuple[int, ...]]
    """numbers of classes, of keys that hold integers"""
    scales: dict[str, float]
    """what the numbers of keys of rank 3 are multiplied by"""

    def of(self, keys: list[str]) -> Spaces:
        """Return the spaces of some keys, in their order."""
        parts = ({k: part[k] for k in keys if k in part} for part in self)
        return Spaces(*parts)  # type: ignore[arg-type]

    def flatten(self) -> Flatten:
        """Return the encoder that lays them out in one vector."""
        return Flatten(self.shapes, self.classes)

    @property
    def images(self) -> list[str]:
        """The keys that a CNN can take."""
        return [key for key, shape in self.shapes.items() if is_image_shape(shape)]

    def describe(self) -> str:
        """Return what is taken for what, in words."""
        words = []
        for key, shape in self.shapes.items():
            if key in self.scales:
                kind = "image" if is_image_shape(shape) else "numbers"
                channels, height, width = shape
                scaled = "" if self.scales[key] == 1.0 else f", scaled by {self.scales[key]:.4g}"
                words.append(f"{key}: {kind} {height}×{width}, {channels} channels{scaled}")
            elif key in self.classes:
                words.append(f"{key}: one-hot of {'+'.join(map(str, self.classes[key]))}")
            else:
                words.append(f"{key}: {math.prod(shape)} numbers")
        return "; ".join(words)


def image_scale(space: Space[object], encoding: int = ENCODING) -> float:
    """Return what an image is multiplied by: one from 0 to more than 1 is brought to [0, 1].

    Args:
        space: of the image.
        encoding: in the first, the dtype alone decided.
    """
    if encoding == FIRST_ENCODING:
        return 1.0 / 255.0 if space.dtype == np.uint8 else 1.0
    if not isinstance(space, spaces.Box) or np.min(space.low) < 0:
        return 1.0
    high = float(np.max(space.high))
    return 1.0 / high if 1.0 < high < math.inf else 1.0


class JoinedEncoder(nn.Module):
    """An encoder of what `Flatten` gives: vectors and the features of images side by side.

    Args:
        parts: spaces of the observation.
        generator: source of the initial weights.
        features: numbers per image.
        kind: convolutions, `nature` or `small`.
    """

    def __init__(
        self, parts: Spaces, generator: torch.Generator, features: int, kind: str = "nature"
    ) -> None:
        super().__init__()
        flat = parts.flatten()
        self.shapes, self.scales, self.sizes = flat.shapes, parts.scales, list(flat.sizes.values())
        self.images = nn.ModuleDict()
        size = 0
        for index, (key, shape) in enumerate(self.shapes.items()):
            if is_image_shape(shape):
                self.images[str(index)] = CNN(
                    shape,
                    generator,
                    features,
                    convolutions=convolutions_for(shape, kind),
                    scale=parts.scales.get(key, 1.0),
                )
                size += features
            else:
                size += self.sizes[index]
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Return `[*lead, size]`, in the order of the keys."""
        joined = []
        pieces = torch.split(x, self.sizes, -1)
        for index, (key, shape) in enumerate(self.shapes.items()):
            piece = pieces[index]
            if str(index) in self.images:
                piece = self.images[str(index)](piece.reshape(*piece.shape[:-1], *shape))
            elif self.scales.get(key, 1.0) != 1.0:
                piece = piece * self.scales[key]
            joined.append(piece)
        return torch.cat(joined, -1)


class SeparateJoined(nn.Module):
    """Actor and critic with nothing in common, each with encoders of its own.

    The critic sees what the actor does, or more (`critic_encoder`): the networks of several agents.
    """

    def __init__(
        self,
        encoder: Flatten,
        critic_encoder: Flatten,
        actor: nn.Module,
        critic: nn.Module,
        head: Head,
    ) -> None:
        super().__init__()
        self.encoder, self.critic_encoder = encoder, critic_encoder
        self.trunk = nn.Identity()
        self.head, self.actor, self.critic = head, actor, critic

    def forward(self, obs: Tree, part: Part = "both") -> Outputs:
        """Run actor and critic, or the part asked for."""
        return Outputs(
            None if part == "critic" else self.head(self.actor(self.encoder(obs))),
            None if part == "actor" else self.critic(self.critic_encoder(obs)),
        )


def spaces_of(observation: Space[object], encoding: int = ENCODING) -> Spaces:
    """Return shapes, classes and scales of an observation space, as `keel.envs` lays it out.

    Args:
        observation: the space.
        encoding: how its parts become numbers (`keel.keys.ENCODING`).
    """
    parts: Mapping[str, Space[object]]
    parts = observation.spaces if isinstance(observation, spaces.Dict) else {"obs": observation}
    shapes: dict[str, tuple[int, ...]] = {}
    classes: dict[str, tuple[int, ...]] = {}
    scales: dict[str, float] = {}
    for key, space in parts.items():
        if isinstance(space, spaces.Discrete):
            shapes[key], classes[key] = (), (int(space.n),)
        elif isinstance(space, spaces.MultiDiscrete) and encoding != FIRST_ENCODING:
            shapes[key] = tuple(space.shape)
            classes[key] = tuple(int(n) for n in space.nvec.reshape(-1))
        elif space.shape is None:
            raise InputError(f"observation {key!r}: {space} has no fixed shape")
        else:
            shapes[key] = tuple(space.shape) or (1,)
            if len(space.shape) == 3:
                scales[key] = image_scale(space, encoding)
    return Spaces(shapes, classes, scales)
