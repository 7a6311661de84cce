"""Networks: observation trees to policy outputs and values; the usual one, two MLPs.

A `Network` has an actor and a critic; `part` says which of them a call needs. What they share is in
`trunk`, so that every parameter has one role: actor, critic or shared (`keel.networks.shared`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from keel.errors import InputError, check_choice
from keel.functional import value as losses
from keel.types import ENCODING, FIRST_ENCODING, MASK, Tree, is_image_shape

Part = Literal["both", "actor", "critic"]
Activation = Literal["tanh", "relu", "gelu"]
MAX_SMALL = 256
"""The width above which matrix products are all that counts, and torch's threads help with them."""
SPACE_KEYS_IGNORED = (MASK,)
FEATURES = "features"
"""Key of `Agent.critic_inputs`."""


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

    def without(self, key: str) -> Spaces:
        """Return the spaces of all other keys."""
        return self._replace(shapes={k: x for k, x in self.shapes.items() if k != key})

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


def spaces_of(observation: Space[object], encoding: int = ENCODING) -> Spaces:
    """Return shapes, classes and scales of an observation space, as `keel.envs` lays it out.

    Args:
        observation: the space.
        encoding: how its parts become numbers (`keel.types.ENCODING`).
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


@dataclass(frozen=True)
class Scalar:
    """A critic with one output, the mean of the return."""

    outputs: int = 1
    affine: int = 1
    """how many of the outputs, the first, can be moved to other units by way of the last layer"""
    normalized: bool = False
    """whether its outputs are in units of their own (`keel.networks.popart`)"""

    def value(self, raw: Tensor) -> Tensor:
        """Return the value, the baseline of advantages: `[*lead]`."""
        return raw.squeeze(-1)

    def loss(
        self, raw: Tensor, target: Tensor, old: Tensor | None = None, clip: float | None = None
    ) -> Tensor:
        """Return ½(V − R)² per element, `[*lead]`.

        Args:
            raw: outputs V, `[*lead, 1]`.
            target: returns R, `[*lead]`.
            old: outputs before the update, `[*lead, 1]`, around which `clip` holds them.
            clip: bound on the change of a value; None for none.
        """
        now = raw.squeeze(-1)
        if clip is None or old is None:
            return losses.squared(now, target)
        return losses.clipped(now, old.squeeze(-1), target, clip).loss
