"""The Llama family over groups of completions, with gradients, reading every prompt once.

A group of eight completions of forty tokens shares a prompt of twenty: Hugging Face's forward reads
it eight times, in the learning pass, for the reference and for the certificate. Here prompts are
rows of their own, and completions look at the keys and values of theirs. What lies between the
products is fused: one product for q, k and v, one for gate and up, torch's own norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from keel.models import compiled_pass
from keel.models.decoding_lean import fits, is_plain

Parameters = Mapping[str, Tensor]


def can_share(model: Any) -> bool:
    """Whether a backbone is one of the family, in its plain form and without adapters."""
    return is_plain(model) and fits(model, dict(model.named_parameters()))


class Group(NamedTuple):
    """Completions of T tokens and their prompts of P, each prompt once."""

    tokens: Tensor
    """`[U·P + R·T]`: prompts, then completions"""
    real: Tensor
    """bool `[U, P]`: what of the prompts is no padding"""
    member: Tensor
    """`[R]`: whose prompt is whose"""
    steps: int
    """T"""

    def before_each(self, x: Tensor) -> Tensor:
        """`[R, T + 1, ·]`: what is known before each token and after the last, of x `[U·P + R·T,
        ·]`, what is known after each."""
        count, width = self.real.shape
        cut, size = count * width, x.shape[1]
        begin = x[:cut].view(count, width, size)[:, -1:].index_select(0, self.member)
        return torch.cat([begin, x[cut:].view(len(self.member), self.steps, size)], 1)


def states(
    model: Any, parameters: Parameters, tokens: Tensor, attention: Tensor, last: int
) -> Tensor:
    """What the model knows before each of the `last` tokens, `[R, last, H]`.

    `tokens` and `attention` are `[R, T]`: prompts padded at the left, `last` tokens behind them
    padded at the right. As the model's own forward, to rounding.
    """
    words, weight = parameters["embed_tokens.weight"], parameters["norm.weight"]
    prompts = attention[:, : tokens.shape[1] - last]
    padded_left = not bool((prompts[:, :-1] & ~prompts[:, 1:]).any())
    by_loops = compiled_pass.is_for_loops(words) and padded_left
    groups, order = _grouped(
        tokens, attention, last, compiled_pass.workers(len(tokens)) if by_loops else 1
    )
    x = embedding(torch.cat([group.tokens for group in groups]), words)
    if by_loops:
        scenes = [compiled_pass.scene_of(model, g.real, g.member, g.steps) for g in groups]
        stacked = compiled_pass.stacked(parameters, len(model.layers))
        x = compiled_pass.layers(x, stacked, scenes)
    else:
        x = _by_torch(model, parameters, x, groups[0])
    x = rms_norm(x, weight.shape, weight, model.config.rms_norm_eps)
    parts = torch.split(x, [len(group.tokens) for group in groups])
    found = [group.before_each(part) for group, part in zip(groups, parts, strict=True)]
    whole = found[0] if len(found) == 1 else torch.cat(found)
    return whole if order is None else whole.index_select(0, order.argsort())


def _grouped(
    tokens: Tensor, attention: Tensor, last: int, pieces: int
) -> tuple[list[Group], Tensor | None]:
    """All rows in so many pieces, those of a prompt next to each other; and in which order, if that
    is not theirs."""
    width, steps = tokens.shape[1] - last, last - 1
    known = torch.where(attention[:, :width], tokens[:, :width], -1)
    order = None
    if pieces > 1:
        member = torch.unique(known, dim=0, return_inverse=True)[1]
        if bool((member[1:] < member[:-1]).any()):
            order = member.argsort(stable=True)
            tokens, known = tokens[order], known[order]
    found = []
    for part, prompts in zip(tokens.chunk(pieces), known.chunk(pieces), strict=True):
        shared, member = torch.unique(prompts, dim=0, return_inverse=True)
        written = part[:, width : width + steps]
        every = torch.cat([shared.clamp(min=0).flatten(), written.flatten()])
        found.append(Group(every, shared >= 0, member, steps))
    return found, order


def _by_torch(model: Any, parameters: Parameters, x: Tensor, group: Group) -> Tensor:
    """All layers, in torch's operations."""
    config = model.config
    _, real, member, steps = group
    count, width = real.shape
    rows = len(member)
    lengths = real.sum(1)
    places = torch.cat(
        [
            (real.long().cumsum(1) - 1).clamp(min=0).flatten(),
            (lengths[member, None] + torch.arange(steps, device=x.device)).flatten(),
        ]
    )
    cos, sin = (table[0, :, None] for table in model.rotary_emb(x, places[None]))
    masks = _masks(real, real[member], steps)
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    size, scale = model.layers[0].self_attn.head_dim, model.layers[0].self_attn.scaling
    cut = count * width

    def norm(x: Tensor, name: str) -> Tensor:
        weight = parameters[name]
        return rms_norm(x, weight.shape, weight, config.rms_norm_eps)

    def product(x: Tensor, place: str, *names: str) -> Tensor:
        weights = [parameters[f"{place}.{name}.weight"] for name in names]
        found = [parameters.get(f"{place}.{name}.bias") for name in names]
        biases = [bias for bias in found if bias is not None]
        bias = torch.cat(biases) if biases else None
        return linear(x, weights[0] if len(weights) == 1 else torch.cat(weights), bias)

    for i in range(len(model.layers)):
        layer = f"layers.{i}"
        place = f"{layer}.self_attn"
        flat = product(
            norm(x, f"{layer}.input_layernorm.weight"), place, "q_proj", "k_proj", "v_proj"
        )
        q, k, v = torch.split(flat.view(len(x), -1, size), [heads, keys, keys], 1)
        if f"{place}.q_norm.weight" in parameters:
            q, k = norm(q, f"{place}.q_norm.weight"), norm(k, f"{place}.k_norm.weight")
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        first = [part[:cut].view(count, width, part.shape[1], size) for part in (q, k, v)]
        own = _attend(first[0], first[1], first[2], masks[0], scale)
        past = [
            torch.cat([seen.index_select(0, member), part[cut:].view(rows, steps, keys, size)], 1)
            for seen, part in zip(first[1:], (k, v), strict=True)
        ]
        after = _attend(q[cut:].view(rows, steps, heads, size), past[0], past[1], masks[1], scale)
        attended = torch.cat([own, after])
        x = x + product(attended, place, "o_proj")
        inner = norm(x, f"{layer}.post_attention_layernorm.weight")
        gate, up = product(inner, f"{layer}.mlp", "gate_proj", "up_proj").chunk(2, -1)
        x = x + product(silu(gate) * up, f"{layer}.mlp", "down_proj")
    return x


def _masks(real: Tensor, seen: Tensor, steps: int) -> tuple[Tensor | None, Tensor]:
    """Who may look at whom: within prompts `[U, 1, P, P]` (None: all that came before), and from
    completions `[·, 1, C, P + C]`."""
    causal = torch.ones(steps, steps, dtype=torch.bool, device=real.device).tril()
    width = real.shape[1]
    if bool(real.all()):
        whole = torch.ones(steps, width, dtype=torch.bool, device=real.device)
        return None, torch.cat([whole, causal], 1)[None, None]
    before = torch.ones(width, width, dtype=torch.bool, device=real.device).tril()
    itself = torch.eye(width, dtype=torch.bool, device=real.device)  # padding has to see something
    prompts = (before & real[:, None, :]) | itself
    prefix = seen[:, None, :].expand(-1, steps, -1)
    return prompts[:, None], torch.cat([prefix, causal.expand(len(seen), -1, -1)], 2)[:, None]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """From `[B, T, heads, D]` to `[B·T, heads·D]`."""
    if not q.shape[1]:
        return q.reshape(0, q.shape[2] * q.shape[3])
    found = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return found.transpose(1, 2).reshape(q.shape[0] * q.shape[1], -1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, `[N, heads, D]`."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin
