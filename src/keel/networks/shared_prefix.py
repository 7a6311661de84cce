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

FAMILY = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""How the classes of these models begin, by `model_type`."""
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on nothing but the position."""
KNOWN_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3")
"""Attention functions that compute the same; a custom one could compute anything."""

Parameters = Mapping[str, Tensor]


def can_share(model: Any) -> bool:
    """Whether a backbone is one of the family, in its plain form and without adapters."""
    return _is_plain(model) and _fits(model, dict(model.named_parameters()))


def _is_plain(model: Any) -> bool:
    """Whether it is of the family, and its configuration asks for nothing that is not done here."""
    config, kind = model.config, type(model)
    name = f"{FAMILY.get(config.model_type, '')}Model"
    if kind.__name__ != name or not kind.__module__.startswith("transformers."):
        return False
    return (
        config.hidden_act == "silu"
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and getattr(config, "sliding_window", None) is None
        and config._attn_implementation in KNOWN_ATTENTION
        and model.rotary_emb.rope_type in STATIC_ROPE
        and 2 * model.rotary_emb.inv_freq.numel() == model.layers[0].self_attn.head_dim
    )


def _fits(model: Any, parameters: Parameters) -> bool:
    """Whether these are exactly the parameters that are read here, all of one floating dtype."""
    linear = [f"self_attn.{part}_proj" for part in "qkvo"]
    linear += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if model.config.model_type == "qwen3":
        norms += ["self_attn.q_norm", "self_attn.k_norm"]
    needed, possible = {"embed_tokens.weight", "norm.weight"}, set()
    for i in range(len(model.layers)):
        needed |= {f"layers.{i}.{part}.weight" for part in (*linear, *norms)}
        possible |= {f"layers.{i}.{part}.bias" for part in linear}
    dtypes = {parameter.dtype for parameter in parameters.values()}
    whole = needed <= set(parameters) <= needed | possible
    return whole and len(dtypes) == 1 and dtypes.pop().is_floating_point


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
    """Return what the model knows before each of the `last` tokens, `[R, last, H]`.

    As the model's own forward, to rounding.

    Args:
        model: a backbone that `can_share`.
        parameters: all of them, by the model's own names.
        tokens: `[R, T]`: prompts, then `last` tokens padded at the right.
        attention: bool `[R, T]`, False for padding.
        last: tokens of a completion.
    """
    words, weight = parameters["embed_tokens.weight"], parameters["norm.weight"]
    group = _grouped(tokens, attention, last)
    x = _layers(model, parameters, embedding(group.tokens, words), group)
    return group.before_each(rms_norm(x, weight.shape, weight, model.config.rms_norm_eps))


def _grouped(tokens: Tensor, attention: Tensor, last: int) -> Group:
    """Return prompts, each once, and completions without their last token."""
    width, steps = tokens.shape[1] - last, last - 1
    known = torch.where(attention[:, :width], tokens[:, :width], -1)
    shared, member = torch.unique(known, dim=0, return_inverse=True)
    written = tokens[:, width : width + steps]
    every = torch.cat([shared.clamp(min=0).flatten(), written.flatten()])
    return Group(every, shared >= 0, member, steps)


def _layers(model: Any, parameters: Parameters, x: Tensor, group: Group) -> Tensor:
    """Return what comes of the embeddings x `[U·P + R·T, H]` after all layers."""
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
