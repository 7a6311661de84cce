"""Prompts read once per group give what Hugging Face's forward gives, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from token_toys import VOCABULARY, gpt2, qwen
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralModel,
    Qwen2Config,
)
from transformers import Qwen2Model as Qwen2

from keel.distributions.vocabulary import HIDDEN
from keel.networks.causal_lm import ATTENTION, RESPONSE_MASK, TOKENS, TokenAgent, positions
from keel.networks.shared_prefix import can_share, states

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
YARN = {
    "rope_theta": 10000.0,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}


def rotated(rope: dict[str, object]) -> LlamaModel:
    return LlamaModel(LlamaConfig(**SHAPE, mlp_bias=True, rope_parameters=rope))


def backbones():
    """Of random weights: norms and biases, too, which begin plain."""
    models = plain_backbones()
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for model in models.values():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
    return models


def plain_backbones():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {
            "qwen3": qwen().model,
            "qwen2": Qwen2(Qwen2Config(**SHAPE)),
            "llama": LlamaModel(LlamaConfig(**SHAPE, attention_bias=True)),
            "mistral": MistralModel(MistralConfig(**SHAPE, sliding_window=None)),
            "llama, yarn": rotated(YARN),
            "llama, llama3": rotated(LLAMA3),
            "llama, linear": rotated(LINEAR),
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
@pytest.mark.parametrize("name", plain_backbones())
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
    assert not can_share(LlamaModel(LlamaConfig(**SHAPE, hidden_act="gelu")))
    assert not can_share(rotated({**LINEAR, "rope_type": "dynamic"}))


def test_somebodys_own_parts_are_left_to_their_own_forward() -> None:
    class Louder(LlamaModel):
        pass

    assert not can_share(Louder(LlamaConfig(**SHAPE)))
    model = LlamaModel(LlamaConfig(**SHAPE))
    model.config._attn_implementation = "flex_attention"
    assert not can_share(model)
    model = LlamaModel(LlamaConfig(**SHAPE))
    assert can_share(model)
    model.layers[0].mlp.extra = torch.nn.Parameter(torch.ones(3))
    assert not can_share(model)


def test_a_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = backbones()["qwen3"]
    tokens, attention = texts(False)
    seen = []
    import keel.networks.shared_prefix as module

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


def test_rows_do_not_depend_on_their_neighbours() -> None:
    model = backbones()["qwen3"]
    tokens, attention = texts(True)
    order = torch.tensor([3, 0, 5, 2, 1, 4])  # those of a prompt lie apart
    tree = dict(model.named_parameters())
    with torch.no_grad():
        whole = states(model, tree, tokens[order], attention[order], 7)
        alone = [states(model, tree, tokens[[i]], attention[[i]], 7) for i in order.tolist()]
    torch.testing.assert_close(torch.cat(alone), whole, rtol=0.0, atol=1e-5)


def test_prompts_with_holes_are_the_models_own_forward() -> None:
    model = backbones()["qwen3"].double()
    tokens, attention = texts(False)
    attention[3, 2] = False
    found = states(model, dict(model.named_parameters()), tokens, attention, 7)
    theirs = model(
        input_ids=tokens, attention_mask=attention.long(), position_ids=positions(attention)
    ).last_hidden_state[:, 4:-1]
    real = attention[:, 4:-1]
    torch.testing.assert_close(found[real], theirs[real], rtol=1e-5, atol=1e-5)


def test_a_model_of_fewer_layers_than_its_configuration_says() -> None:
    model = backbones()["qwen3"]
    model.layers = model.layers[:1]
    tokens, _ = texts(False)
    attention = torch.ones_like(tokens, dtype=torch.bool)
    found = states(model, dict(model.named_parameters()), tokens, attention, 7).detach()
    theirs = model(input_ids=tokens).last_hidden_state[:, 4:-1].detach()
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", ["k_proj.weight", "input_layernorm.weight", "up_proj", "bias"])
def test_what_is_not_learned_is_the_modules_own(frozen: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 0.5, 0.3, generator=torch.Generator().manual_seed(1))
        parameter.requires_grad_(frozen not in name)
    agent = TokenAgent(model)
    tokens, attention = texts(True)
    attention[1, 9:] = True
    obs = {TOKENS: tokens, ATTENTION: attention, RESPONSE_MASK: torch.ones(6, 7)}
    found = agent.policy(agent.initial, obs)[HIDDEN].detach()
    theirs = model.model(
        input_ids=tokens, attention_mask=attention.long(), position_ids=positions(attention)
    ).last_hidden_state[:, 4:-1]
    torch.testing.assert_close(found, theirs.detach(), rtol=1e-4, atol=1e-4)
