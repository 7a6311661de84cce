"""A pass over groups of completions by compiled loops, with gradients (`keel.models.pass_layers`).

It takes the place of torch's operations in `keel.models.shared_prefix` for small models in float32
on the CPU, whose numbers it gives, to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import rms_norm

from keel.models.abreast import abreast
from keel.models.decoding_lean import LOOPS_UP_TO

Arrays = tuple[np.ndarray, ...]


class Scene(NamedTuple):
    """Where the tokens of a pass stand: U prompts of P tokens, then R completions of T."""

    width: int
    """P"""
    steps: int
    """T"""
    members: Tensor
    """`[R]` int64: the prompt of every completion"""
    starts: Tensor
    """`[U]` int64: how much of a prompt is padding"""
    angles: tuple[Tensor, Tensor]
    """cos and sin `[positions, D]`"""
    key_heads: int
    scale: float
    """of q·k"""
    epsilon: float

    def arguments(self) -> tuple[Any, ...]:
        """As the loops take them, but for the shape."""
        angles = self.angles[0].numpy(), self.angles[1].numpy()
        dials = np.float32(self.scale), np.float32(self.epsilon)
        return self.members.numpy(), self.starts.numpy(), angles, dials


def is_for_loops(x: Tensor) -> bool:
    """Whether compiled loops know how, of hidden states like x, and are faster."""
    known = x.device.type == "cpu" and x.dtype == torch.float32
    return known and x.shape[-1] <= LOOPS_UP_TO


def scene_of(model: Any, real: Tensor, members: Tensor, steps: int) -> Scene:
    """For a backbone of the Llama family; `real` `[U, P]` are the tokens of prompts that are no
    padding, which stands at the left."""
    config, attention, width = model.config, model.layers[0].self_attn, real.shape[1]
    cos, sin = model.rotary_emb(torch.empty(0), torch.arange(width + steps)[None])
    return Scene(
        width=width,
        steps=steps,
        members=members,
        starts=(~real).sum(1),
        angles=(cos[0].contiguous(), sin[0].contiguous()),
        key_heads=config.num_key_value_heads,
        scale=attention.scaling,
        epsilon=config.rms_norm_eps,
    )


def stacked(parameters: Mapping[str, Tensor], layers: int) -> tuple[Tensor, ...]:
    """The weights of all layers of a Llama as loops take them, `[L, …]` each, from its parameters
    by name; what it does not have is empty."""
    nothing = parameters["norm.weight"].new_empty(0)

    def of_all(kind: str, *names: str) -> Tensor:
        found = []
        for i in range(layers):
            every = (parameters.get(f"layers.{i}.{name}.{kind}") for name in names)
            parts = [part for part in every if part is not None]
            found.append(torch.cat(parts) if parts else nothing)
        return torch.stack(found)

    q, k, v, out = (f"self_attn.{part}_proj" for part in "qkvo")
    gate, up, down = (f"mlp.{part}_proj" for part in ("gate", "up", "down"))
    return (
        of_all("weight", "input_layernorm"),
        of_all("weight", q, k, v),
        of_all("bias", q, k, v),
        of_all("weight", "self_attn.q_norm"),
        of_all("weight", "self_attn.k_norm"),
        of_all("weight", out),
        of_all("bias", out),
        of_all("weight", "post_attention_layernorm"),
        of_all("weight", gate, up),
        of_all("bias", gate, up),
        of_all("weight", down),
        of_all("bias", down),
    )


def layers(x: Tensor, weights: Sequence[Tensor], scene: Scene) -> Tensor:
    """What comes of x `[U·P + R·T, hidden]` after all layers, before the last norm.

    `weights` are `[L, …]` each, in the order of `keel.models.pass_layers.forward`.
    """
    if torch.is_grad_enabled() and any(w.requires_grad for w in (x, *weights)):
        found: Tensor = _Layers.apply(scene, x, *weights)  # type: ignore[no-untyped-call]
        return found
    out = x.clone()
    _forward(out, weights, scene, keep=False)
    return out


def _forward(
    x: Tensor, weights: Sequence[Tensor], scene: Scene, keep: bool
) -> tuple[Arrays, np.ndarray]:
    """In place; what the way back needs, and the keys and values of the prompts."""
    from keel.models import pass_layers  # numba is a second, which others need not pay

    arrays = tuple(w.detach().numpy() for w in weights)
    count, size = len(arrays[0]), scene.angles[0].shape[1]
    rows = len(x) if keep else 0
    widths = (x.shape[1], x.shape[1], arrays[1].shape[1], arrays[5].shape[2], arrays[8].shape[1])
    kept = tuple(np.empty((count, rows, width), np.float32) for width in widths)
    memories = np.empty(
        (count, len(scene.starts), 2, scene.key_heads, size, scene.width), np.float32
    )
    shape = scene.width, scene.steps
    pass_layers.forward(x.numpy(), shape, arrays, *scene.arguments(), kept, memories)
    return kept, memories


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scene: Scene, x: Tensor, *weights: Tensor) -> Tensor:
        out = x.detach().clone()
        ctx.kept, ctx.memories = _forward(out, weights, scene, keep=True)
        ctx.scene = scene
        ctx.save_for_backward(*weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from keel.models import pass_layers

        if ctx.kept is None:
            raise RuntimeError("a pass can be gone back through once: it uses up what it kept")
        kept, ctx.kept = ctx.kept, None
        scene, weights = ctx.scene, [w.detach().numpy() for w in ctx.saved_tensors]
        to_weights = [np.zeros_like(w) for w in weights]
        to_x = gradient.contiguous().clone()
        pass_layers.backward(
            to_x.numpy(), (scene.width, scene.steps), tuple(weights), tuple(to_weights),
            *scene.arguments(), kept, ctx.memories,
        )  # fmt: skip
        return None, to_x, *map(torch.from_numpy, to_weights)


class Written(NamedTuple):
    """Completions of rows: `[R, T]`, filled as far as a row goes."""

    tokens: Tensor
    log_prob: Tensor
    """at the temperature"""
    hidden: Tensor
    """`[R, T, H]`, divided by the temperature"""
    lengths: Tensor
    """`[R]`"""


def generate(
    x: Tensor,
    weights: Sequence[Tensor],
    scene: Scene,
    ends: tuple[Tensor, Tensor, Tensor],
    chances: Tensor,
    temperature: float,
    stop: int,
    workers: int,
) -> Written:
    """Completions of the prompts x `[U·P, hidden]`, as long as `chances` `[R, T]` reach.

    `ends` are the embedding, the last norm and the head; `temperature` 0 takes the likeliest.
    """
    from keel.models import generation_loops

    x = x.clone()
    alone = scene._replace(steps=0, members=scene.members[:0])
    _, memories = _forward(x, weights, alone, keep=False)
    last = x.view(len(scene.starts), scene.width, -1)[:, -1]
    begin = rms_norm(last, ends[1].shape, ends[1], scene.epsilon).numpy()
    rows, most = chances.shape
    found = Written(
        tokens=torch.zeros(rows, most, dtype=torch.int64),
        log_prob=torch.zeros(rows, most),
        hidden=torch.zeros(rows, most, x.shape[1]),
        lengths=torch.zeros(rows, dtype=torch.int64),
    )
    arrays = tuple(w.numpy() for w in weights)
    sides = tuple(w.numpy() for w in ends)
    members, *others = scene.arguments()

    def write(part: slice) -> None:
        generation_loops.generate(
            arrays, sides, memories, begin, members[part], *others, chances[part].numpy(),
            temperature, stop, *(y[part].numpy() for y in found),
        )  # fmt: skip

    size = -(-rows // workers)
    abreast(write, [slice(i, i + size) for i in range(0, rows, size)], workers)
    return found
