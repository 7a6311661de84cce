"""The model of a run and its tokenizer: those of a folder, or small ones that are made."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keel.apps.language.config import Language
from keel.apps.language.pretrained import load_pretrained
from keel.apps.language.tokenizer import build_tokenizer
from keel.errors import import_extra
from keel.networks.causal_lm import TokenAgent
from keel.resources import expect_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_model(
    config: Language, seed: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer: those of a folder, or small ones that are made."""
    transformers = import_extra("transformers", "language")
    transformers.utils.logging.disable_progress_bar()
    settings = config.model
    if settings.path:
        model, tokenizer = load_pretrained(Path(settings.path))
    else:
        tokenizer = build_tokenizer() if tokenizer is None else tokenizer
        model = make_model(config, len(tokenizer), seed)
    if settings.lora_rank:
        peft = import_extra("peft", "language")
        adapters = peft.LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            target_modules="all-linear",
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(model, adapters)
    return model, tokenizer


def make_model(config: Language, vocabulary: int, seed: int) -> PreTrainedModel:
    """A small model from its configuration, with weights that depend on the seed alone."""
    transformers = import_extra("transformers", "language")
    settings = config.model
    kinds = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }
    kind, build = kinds[settings.kind]
    layer = 12 * settings.hidden**2  # four projections of attention, three of 8/3 the width
    expect_memory(
        f"model: {settings.layers:,} layers of width {settings.hidden:,}",
        4 * 4 * (settings.layers * layer + vocabulary * settings.hidden),
        "use a smaller model.hidden or model.layers",
    )
    shape = kind(
        vocab_size=vocabulary,
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        head_dim=settings.hidden // settings.heads,
        intermediate_size=8 * round(settings.hidden * 8 / 3 / 8),
        max_position_embeddings=settings.positions,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = build(shape)
    return model


def model_files(
    agent: TokenAgent, tokenizer: PreTrainedTokenizerBase, params: Tensor
) -> dict[str, bytes]:
    """Return the model and its tokenizer in the format of Hugging Face, file by file."""
    write_into(agent, params)
    with tempfile.TemporaryDirectory() as folder:
        agent.network.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {place.name: place.read_bytes() for place in sorted(Path(folder).iterdir())}


@torch.no_grad()
def write_into(agent: TokenAgent, params: Tensor) -> None:
    """Let the module hold these parameters, for those who use it without the matrix."""
    own = dict(agent.network.named_parameters())
    for name, x in agent.layout.unflatten(params[0]).items():
        own[name].copy_(x)
