"""Prompts read once per group give what Hugging Face's forward gives, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from token_toys import VOCABULARY, gpt2, qwen
from transformers import LlamaConfig, LlamaModel, MistralConfig, MistralModel, Qwen2Config
from transformers import Qwen2Model as Qwen2

from keel.models.language import positions
from keel.models.shared_prefix import can_share, states

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}


def backbones():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {
            "qwen3": qwen().model,
            "qwen2": Qwen2(Qwen2Config(**SHAPE)),
            "llama": LlamaModel(LlamaConfig(**SHAPE, attention_bias=True)),
            "mistral": MistralModel(MistralConfig(**SHAPE, sliding_window=None)),
        }


def texts(padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts, two completions of each, some of them short."""
    rng = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, VOCABULARY, (3, 5), generator=rng).repeat_interleave(2, 0)
    tokens = torch.cat([prompts, torch.randint(2, VOCABULARY, (6, 7), generator=rng)], 1)
    attention = torch.ones_like(tokens, dtype=torch.bool)
    if padded:
        attention[2:4, :2] = False
    attention[1, 9:] = False
    return tokens, attention


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama", "mistral"])
def test_it_is_the_models_own_forward(name: str, padded: bool) -> None:
    model = backbones()[name].double()
    assert can_share(model)
    tokens, attention = texts(padded)
    found = states(model, dict(model.named_parameters()), tokens, attention, 7)
    theirs = model(
        input_ids=tokens, attention_mask=attention.long(), position_ids=positions(attention)
    ).last_hidden_state[:, 4:-1]
    real = attention[:, 4:-1]
    torch.testing.assert_close(found[real], theirs[real], rtol=1e-5, atol=1e-5)
    weights = torch.linspace(0.0, 1.0, found[real].numel(), dtype=torch.float64)
    gradients = [
        torch.autograd.grad((x[real].flatten() * weights).sum(), list(model.parameters()))
        for x in (found, theirs)
    ]
    for ours, other in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=2e-5)  # their norm is in float32


def test_others_are_left_to_their_own_forward() -> None:
    assert not can_share(gpt2().transformer)
    assert not can_share(qwen(use_sliding_window=True, sliding_window=4, max_window_layers=0).model)


def test_a_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = backbones()["qwen3"]
    tokens, attention = texts(False)
    seen = []
    import keel.models.shared_prefix as module

    honest = module.embedding

    def watched(ids, weight):
        seen.append(len(ids))
        return honest(ids, weight)

    monkeypatch.setattr(module, "embedding", watched)
    states(model, dict(model.named_parameters()), tokens, attention, 7)
    assert seen == [3 * 5 + 6 * 6]


def test_one_token_needs_no_step() -> None:
    model = backbones()["qwen3"]
    tokens, attention = (x[:, :6] for x in texts(True))
    found = states(model, dict(model.named_parameters()), tokens, attention, 1)
    theirs = model(
        input_ids=tokens, attention_mask=attention.long(), position_ids=positions(attention)
    ).last_hidden_state[:, 4:5]
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)
