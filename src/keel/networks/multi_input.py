"""Observations of several parts: every image through a CNN of its own, the rest as it is, joined.

What Stable-Baselines3 calls MultiInputPolicy. `Flatten` lays all parts out in one vector, so that
everything around the network (rollouts, sequences, several agents) sees rows of numbers; the
`JoinedEncoder` cuts the images out of it again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from keel.networks.actor_critic import Flatten, Head, Outputs, Part, Spaces
from keel.networks.shared import CNN, convolutions_for
from keel.types import Tree, is_image_shape


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

    one_by_one = True

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
