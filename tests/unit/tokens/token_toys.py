"""A tiny language model, and completions to learn from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from keel.experience.completions import Completions, Sampling, complete
from keel.networks.causal_lm import TokenAgent

VOCABULARY, EOS, PAD, CALL = 12, 1, 0, 3


def qwen(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """Two layers, twelve tokens; far from uniform."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**{**shape, **changes}))
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 2:
                    p.mul_(4.0)
    return model


def gpt2(seed: int = 0, dropout: float = 0.0) -> GPT2LMHeadModel:
    """Another family, which has dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=64,
                n_embd=16,
                n_layer=2,
                n_head=2,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
            )
        )


PROMPTS = [[5, 6, 7], [8, 4], [9, 10, 11, 4, 5]]


def completions(
    agent: TokenAgent, params: Tensor | None = None, *, group: int = 2, **sampling: Any
) -> Completions:
    """Of three prompts of different lengths."""
    return complete(
        agent,
        agent.initial if params is None else params,
        PROMPTS,
        Sampling(**{"max_new_tokens": 8, **sampling}),
        torch.Generator().manual_seed(3),
        group=group,
        eos=EOS,
        pad=PAD,
    )


def moved(params: Tensor, size: float = 0.02, seed: int = 1) -> Tensor:
    """Parameters nearby."""
    rng = torch.Generator().manual_seed(seed)
    return params + size * torch.randn(params.shape, generator=rng)
