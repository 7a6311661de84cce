"""A pass over groups of completions by compiled loops, with gradients (`keel.models.pass_layers`).

It takes the place of torch's operations in `keel.models.shared_prefix` for small models in float32
on the CPU, whose numbers it gives, to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import rms_norm

from keel.models import compiling
from keel.models.decoding_lean import LOOPS_UP_TO
from keel.models.parallel import is_plain, parallel_for, parallel_map, threads

Arrays = tuple[np.ndarray, ...]

ROWS_ABREAST = 16
"""From here on rows are shared among threads; below, waking them takes longer."""


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

    @property
    def rows(self) -> int:
        """U·P + R·T"""
        return len(self.starts) * self.width + len(self.members) * self.steps

    def arguments(self) -> tuple[Any, ...]:
        """As the loops take them."""
        angles = self.angles[0].numpy(), self.angles[1].numpy()
        dials = np.float32(self.scale), np.float32(self.epsilon)
        shape = self.width, self.steps
        return shape, self.members.numpy(), self.starts.numpy(), angles, dials


def is_for_loops(x: Tensor) -> bool:
    """Whether compiled loops know how, of hidden states like x, and are faster."""
    return is_plain(x) and x.shape[-1] <= LOOPS_UP_TO


def loops_are_new() -> bool:
    """Whether nothing of them is on disk yet, and the first pass has to wait for the compiler."""
    from keel.models import pass_layers

    return not any(compiling.cache_folder(pass_layers.SOURCES).rglob("*.nbi"))


def scene_of(model: Any, real: Tensor, members: Tensor, steps: int) -> Scene:
    """For a backbone of the Llama family; `real` `[U, P]` are the tokens of prompts that are no
    padding, which stands at the left."""
    config, attention, width = model.config, model.layers[0].self_attn, real.shape[1]
    like = torch.empty(0, dtype=torch.float32)
    cos, sin = model.rotary_emb(like, torch.arange(width + steps)[None])
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
        return torch.stack(
            [
                torch.cat([parameters[f"layers.{i}.{name}.{kind}"] for name in names])
                for i in range(layers)
            ]
        )

    def if_there(kind: str, *names: str) -> Tensor:
        there = f"layers.0.{names[0]}.{kind}" in parameters
        return of_all(kind, *names) if there else torch.stack([nothing] * layers)

    q, k, v, out = (f"self_attn.{part}_proj" for part in "qkvo")
    gate, up, down = (f"mlp.{part}_proj" for part in ("gate", "up", "down"))
    return (
        of_all("weight", "input_layernorm"),
        of_all("weight", q, k, v),
        if_there("bias", q, k, v),
        if_there("weight", "self_attn.q_norm"),
        if_there("weight", "self_attn.k_norm"),
        of_all("weight", out),
        if_there("bias", out),
        of_all("weight", "post_attention_layernorm"),
        of_all("weight", gate, up),
        if_there("bias", gate, up),
        of_all("weight", down),
        if_there("bias", down),
    )


def workers(rows: int) -> int:
    """How many threads share so many rows."""
    return threads() if rows >= ROWS_ABREAST else 1


def layers(x: Tensor, weights: Sequence[Tensor], scenes: Sequence[Scene]) -> Tensor:
    """What comes of x `[N, hidden]` after all layers, before the last norm.

    Its rows are those of the scenes, one after the other, which threads take abreast. `weights` are
    `[L, …]` each, in the order of `keel.models.pass_layers.forward`.
    """
    if torch.is_grad_enabled() and any(w.requires_grad for w in (x, *weights)):
        found: Tensor = _Layers.apply(scenes, x, *weights)  # type: ignore[no-untyped-call]
        return found
    out = x.clone()
    _forward(out, weights, scenes, keep=False)
    return out


Kept = tuple[Arrays, np.ndarray]
"""What the way back needs, and the keys and values of the prompts."""


def _forward(
    x: Tensor, weights: Sequence[Tensor], scenes: Sequence[Scene], keep: bool
) -> list[Kept]:
    """In place."""
    from keel.models import pass_layers  # numba is a second, which others need not pay

    arrays = tuple(w.detach().numpy() for w in weights)
    widths = (x.shape[1], x.shape[1], arrays[1].shape[1], arrays[5].shape[2], arrays[8].shape[1])
    count = len(arrays[0])

    def through(piece: tuple[Scene, Tensor]) -> Kept:
        scene, rows = piece
        kept = _room(count, len(rows) if keep else 0, widths)
        size = scene.angles[0].shape[1]
        shape = count, len(scene.starts), 2, scene.key_heads, size, scene.width
        memories = np.empty(shape, np.float32)
        pass_layers.forward(rows.numpy(), *scene.arguments(), arrays, kept, memories)
        return kept, memories

    return parallel_map(through, _pieces(x, scenes), len(scenes))


_SPARE: list[np.ndarray] = []
"""Room that a pass has given back. Memory that is new has to be cleared by the system, page by
page: of 40 MB that took longer than writing to them."""


def _room(layers: int, rows: int, widths: Sequence[int]) -> Arrays:
    """Arrays `[L, rows, width]`, uninitialised."""
    sizes = [layers * rows * width for width in widths]
    room = np.empty(0, np.float32)
    if rows:
        with suppress(IndexError):
            room = _SPARE.pop()
    if room.size < sum(sizes):
        room = np.empty(sum(sizes), np.float32)
    parts = np.split(room[: sum(sizes)], np.cumsum(sizes)[:-1])
    return tuple(x.reshape(layers, rows, w) for x, w in zip(parts, widths, strict=True))


def _give_back(kept: Arrays) -> None:
    room = kept[0].base
    assert room is not None
    if len(_SPARE) < threads():
        _SPARE.append(room)


def _pieces(x: Tensor, scenes: Sequence[Scene]) -> list[tuple[Scene, Tensor]]:
    return list(zip(scenes, torch.split(x, [scene.rows for scene in scenes]), strict=True))


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scenes: Sequence[Scene], x: Tensor, *weights: Tensor) -> Tensor:
        out = x.detach().clone()
        ctx.kept, ctx.scenes = _forward(out, weights, scenes, keep=True), scenes
        ctx.save_for_backward(*weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from keel.models import pass_layers

        if ctx.kept is None:
            raise RuntimeError("a pass can be gone back through once: it uses up what it kept")
        all_kept, ctx.kept = ctx.kept, None
        weights = tuple(w.detach().numpy() for w in ctx.saved_tensors)
        to_x = gradient.clone(memory_format=torch.contiguous_format)

        def back(piece: tuple[tuple[Scene, Tensor], Kept]) -> Arrays:
            (scene, rows), (kept, memories) = piece
            to_weights = tuple(np.zeros_like(w) for w in weights)
            pass_layers.backward(
                rows.numpy(), *scene.arguments(), weights, to_weights, kept, memories
            )
            return to_weights

        pieces = list(zip(_pieces(to_x, ctx.scenes), all_kept, strict=True))
        first, *others = parallel_map(back, pieces, len(pieces))
        for kept, _ in all_kept:
            _give_back(kept)
        for other in others:
            for total, part in zip(first, other, strict=True):
                total += part
        return None, to_x, *map(torch.from_numpy, first)


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
) -> Written:
    """Completions of the prompts x `[U·P, hidden]`, as long as `chances` `[R, T]` reach.

    `ends` are the embedding, the last norm and the head; `temperature` 0 takes the likeliest.
    """
    from keel.models import generation_loops

    x = x.clone()
    alone = scene._replace(steps=0, members=scene.members[:0])
    ((_, memories),) = _forward(x, weights, [alone], keep=False)
    last = x.view(len(scene.starts), scene.width, -1)[:, -1]
    begin = rms_norm(last, ends[1].shape, ends[1], scene.epsilon).numpy()
    rows, most = chances.shape
    found = Written(
        tokens=torch.zeros(rows, most, dtype=torch.int64),
        log_prob=x.new_zeros(rows, most),
        hidden=x.new_zeros(rows, most, x.shape[1]),
        lengths=torch.zeros(rows, dtype=torch.int64),
    )
    arrays = tuple(w.numpy() for w in weights)
    sides = tuple(w.numpy() for w in ends)
    _, members, *others = scene.arguments()

    count, _, _, heads, size, width = memories.shape
    lanes = generation_loops.LANES
    capacity = (width + most + lanes - 1) // lanes * lanes
    used: list[Arrays] = []

    def write(part: slice) -> None:
        number = len(members[part])
        room = _room(2, count * number, [heads * size * capacity])
        keys, values = room[0]
        generation_loops.generate(
            arrays, sides, memories, begin, members[part], *others, chances[part].numpy(),
            temperature, stop, *(y[part].numpy() for y in found),
            keys.reshape(count, number, heads, size, capacity),
            values.reshape(count, number, heads, capacity, size),
        )  # fmt: skip
        used.append(room)

    parallel_for(write, rows, ROWS_ABREAST)
    for room in used:
        _give_back(room)
    return found
