"""The Llama family for decoding: its weights, fused, and a layer in torch's operations.

A layer is four matrix products (q, k and v are one, gate and up another) and about ten operations
between them. The columns of q, k and v are ordered by key head: its G queries, its key, its value.
So their product is `[R, KV, G + 2, D]` in memory, and the queries that share a key head are rows of
one product with it. Small models on the CPU have loops of their own (`keel.models.decoding_loops`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keel.models.parallel import threads

FAMILY = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""How the classes of these models begin, by `model_type`."""
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on nothing but the position."""
KNOWN_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3")
"""Of one mathematics; somebody's own function could be anything."""

LOOPS_UP_TO = 256
"""Hidden size. The products of larger models gain more by torch's threads, if it has several."""

Parameters = Mapping[str, Tensor]
Angles = tuple[Tensor, Tensor]
"""cos and sin, `[·, D]` each, the second half as the first."""


class Linear(NamedTuple):
    """A linear map."""

    weight: Tensor
    """`[in, out]`, transposed: in this order the product is fastest"""
    bias: Tensor | None
    """`[out]`"""

    def of(self, x: Tensor) -> Tensor:
        """Of every row of x."""
        if self.bias is None:
            return torch.mm(x, self.weight)
        return torch.addmm(self.bias, x, self.weight)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """The same, added to `total`."""
        total.addmm_(x, self.weight)
        if self.bias is not None:
            total.add_(self.bias)


class Layer(NamedTuple):
    """One block: attention, then the gated MLP."""

    before: Tensor
    """`[hidden]`: the norm in front of the attention"""
    qkv: Linear
    """to `KV·(G + 2)·D`"""
    qk_norm: Tensor
    """`[G + 1, D]`: the norms of the queries and the key of a key head; `[0, D]` without"""
    out: Linear
    between: Tensor
    """`[hidden]`: the norm in front of the MLP"""
    gate_up: Linear
    """to `2·intermediate`"""
    down: Linear


@dataclass(frozen=True)
class Lean:
    """A whole model without its head, copied: later changes of its parameters do not reach it."""

    embedding: Tensor
    """`[vocabulary, hidden]`"""
    layers: tuple[Layer, ...]
    norm: Tensor
    rotary: nn.Module
    key_heads: int
    group: int
    """query heads that share a key head"""
    head_size: int
    scale: float
    """of q·k"""
    epsilon: float

    def angles(self, count: int) -> Angles:
        """Of the first `count` positions."""
        positions = torch.arange(count, device=self.embedding.device).unsqueeze(0)
        cos, sin = self.rotary(self.embedding, positions)
        return cos[0].contiguous(), sin[0].contiguous()

    def penalty(self, real: Tensor) -> Tensor:
        """−∞ for what is not `real` `[B, T]`, else 0, for every key head: `[B·KV, 1, T]`."""
        penalty = torch.zeros(real.shape, dtype=self.norm.dtype, device=real.device)
        penalty.masked_fill_(~real, -torch.inf)
        return penalty.repeat_interleave(self.key_heads, 0).unsqueeze(1)

    def normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        """w·x/√(mean x² + ε) over the last axis; of every dtype in float32, as the models do."""
        size = weight.shape[-1:]
        return F.rms_norm(x.float(), size, None, self.epsilon).to(x.dtype) * weight

    def heads(self, layer: Layer, x: Tensor, angles: Angles) -> Tensor:
        """Queries, keys and values `[R, KV, G + 2, D]` of x `[R, hidden]`, the former two turned by
        the angles `[R, D]` of its rows."""
        flat = layer.qkv.of(self.normalise(x, layer.before))
        qkv = flat.view(len(x), self.key_heads, self.group + 2, self.head_size)
        qk = turned = qkv[:, :, :-1]
        if len(layer.qk_norm):
            turned = self.normalise(qk, layer.qk_norm)
        left, right = turned.chunk(2, -1)
        cos, sin = (table[:, None, None] for table in angles)
        qk.copy_(turned * cos + torch.cat([-right, left], -1) * sin)
        return qkv

    def attend(self, qkv: Tensor, cache: Tensor, at: int, penalty: Tensor) -> Tensor:
        """Attention of the position `at`, from `[B, KV, G + 2, D]` to `[B, KV·G·D]`.

        It enters the cache, `[B, 2, KV, capacity, D]`. SDPA, which does not know that queries share
        a key head, takes a third longer than these products.
        """
        rows, qkv = len(qkv), qkv.flatten(0, 1)
        cache[:, :, :, at] = qkv.view(rows, self.key_heads, -1, self.head_size)[
            :, :, -2:
        ].transpose(1, 2)
        keys, values = (cache[:, i, :, : at + 1].flatten(0, 1) for i in range(2))
        scores = torch.baddbmm(
            penalty[:, :, : at + 1], qkv[:, :-2], keys.transpose(1, 2), alpha=self.scale
        )
        return torch.bmm(scores.softmax(-1), values).view(rows, -1)

    def read(self, qkv: Tensor, mask: Tensor | None) -> Tensor:
        """Attention within prompts, from `[B, P, KV, G + 2, D]` to `[B·P, KV·G·D]`.

        `mask` is `[B, 1, P, P]`, or None if no prompt is padded.
        """
        queries = qkv[:, :, :, :-2].flatten(2, 3).transpose(1, 2)
        keys, values = qkv[:, :, :, -2:].permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return attended.transpose(1, 2).reshape(qkv.shape[0] * qkv.shape[1], -1)

    def finish(self, layer: Layer, x: Tensor, attended: Tensor) -> None:
        """What follows the attention: add its projection and the MLP to x `[R, hidden]`."""
        layer.out.add_to(x, attended)
        gate, up = layer.gate_up.of(self.normalise(x, layer.between)).chunk(2, -1)
        layer.down.add_to(x, F.silu(gate, inplace=True).mul_(up))


def by_loops(weights: Lean) -> bool:
    """Whether the compiled loops know how, and are faster."""
    return (
        weights.norm.device.type == "cpu"
        and weights.norm.dtype == torch.float32
        and (len(weights.norm) <= LOOPS_UP_TO or threads() == 1)
    )


def layer_arrays(weights: Lean) -> list[tuple[Any, ...]]:
    """The layers as `keel.models.decoding_loops` takes them: attention, MLP, norms of q and k."""

    def arrays(norm: Tensor, *linear: Linear) -> tuple[Any, ...]:
        nothing = norm.new_empty(0)
        parts = [(x.weight, nothing if x.bias is None else x.bias) for x in linear]
        return tuple(x.numpy() for x in (norm, *parts[0], *parts[1]))

    return [
        (
            arrays(layer.before, layer.qkv, layer.out),
            arrays(layer.between, layer.gate_up, layer.down),
            layer.qk_norm.numpy(),
        )
        for layer in weights.layers
    ]


def new_cache(prompts: Tensor, capacity: int) -> Tensor:
    """Room for keys and values `[B, 2, KV, capacity, D]`, with those of prompts in it,
    `[B, P, KV, 2, D]`."""
    count, width, heads, _, size = prompts.shape
    cache = prompts.new_empty(count, 2, heads, capacity, size)
    cache[..., :width, :] = prompts.permute(0, 3, 2, 1, 4)
    return cache


def prompt_mask(attention: Tensor) -> Tensor:
    """Who may look at whom within prompts, `[B, 1, P, P]`.

    Padding looks at itself: what it sees is read by nobody, but a softmax over nothing is NaN,
    which not even a weight of 0 takes out of a sum.
    """
    width = attention.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=attention.device).tril()
    itself = torch.eye(width, dtype=torch.bool, device=attention.device)
    return ((causal & attention.bool()[:, None, :]) | itself).unsqueeze(1)


def lean(model: Any, parameters: Parameters) -> Lean | None:
    """`parameters`, all of the model's, arranged for decoding; None if the model is another."""
    if not is_plain(model):
        return None
    merged = merge_adapters(model, parameters)
    if merged is None or not fits(model, merged):
        return None
    config, attention = model.config, model.layers[0].self_attn
    key_heads = config.num_key_value_heads
    return Lean(
        embedding=merged["embed_tokens.weight"].clone(),
        layers=tuple(
            fuse(within(merged, f"layers.{i}."), key_heads, attention.head_dim)
            for i in range(len(model.layers))
        ),
        norm=merged["norm.weight"].clone(),
        rotary=model.rotary_emb,
        key_heads=key_heads,
        group=config.num_attention_heads // key_heads,
        head_size=attention.head_dim,
        scale=attention.scaling,
        epsilon=config.rms_norm_eps,
    )


def is_plain(model: Any) -> bool:
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


def merge_adapters(model: nn.Module, parameters: Parameters) -> dict[str, Tensor] | None:
    """The parameters without LoRA, W + s·B·A in the place of W; None where that is not the same.

    It is not for the relatives of LoRA, for an adapter that is switched off, or in half precision,
    where the sum would be rounded as no product of the adapter is.
    """
    merged = dict(parameters)
    lora: Any = sys.modules.get("peft.tuners.lora")
    for name, module in model.named_modules():
        if lora is None or not isinstance(module, lora.LoraLayer):
            continue
        special = module.disable_adapters or module.merged or module.lora_variant
        if special or type(module) is not lora.Linear or any(module.lora_bias.values()):
            return None
        weight = merged.pop(f"{name}.base_layer.weight")
        if weight.dtype not in (torch.float32, torch.float64):
            return None
        for adapter in module.lora_A:
            a = merged.pop(f"{name}.lora_A.{adapter}.weight")
            b = merged.pop(f"{name}.lora_B.{adapter}.weight")
            if adapter in module.active_adapters:
                weight = weight + module.scaling[adapter] * (b @ a)
        merged[f"{name}.weight"] = weight
        if f"{name}.base_layer.bias" in merged:
            merged[f"{name}.bias"] = merged.pop(f"{name}.base_layer.bias")
    return merged


def fits(model: Any, parameters: Parameters) -> bool:
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


def within(parameters: Parameters, prefix: str) -> dict[str, Tensor]:
    """Those whose names begin with it, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in parameters.items() if k.startswith(prefix)}


def fuse(parameters: Parameters, key_heads: int, size: int) -> Layer:
    """One block, from its parameters by their names."""

    def joined(kind: str, *names: str) -> Tensor | None:
        """One after the other, if there are any; q, k and v by key head."""
        parts = [parameters[f"{n}.{kind}"] for n in names if f"{n}.{kind}" in parameters]
        if not parts:
            return None
        if len(parts) == 3:
            parts = [x.reshape(key_heads, -1, size, *x.shape[1:]) for x in parts]
            return torch.cat(parts, 1).flatten(0, 2)
        return torch.cat(parts)

    def linear(*names: str) -> Linear:
        weight = joined("weight", *names)
        assert weight is not None
        return Linear(weight.t().contiguous(), joined("bias", *names))

    qkv = linear(*(f"self_attn.{part}_proj" for part in "qkv"))
    qk_norm = qkv.weight.new_empty(0, size)
    if "self_attn.q_norm.weight" in parameters:
        query, key = (parameters[f"self_attn.{part}_norm.weight"] for part in "qk")
        group = qkv.weight.shape[1] // (key_heads * size) - 2
        qk_norm = torch.stack([*[query] * group, key])
    return Layer(
        before=parameters["input_layernorm.weight"].clone(),
        qkv=qkv,
        qk_norm=qk_norm,
        out=linear("self_attn.o_proj"),
        between=parameters["post_attention_layernorm.weight"].clone(),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )
