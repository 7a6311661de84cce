"""The decoder against the model's own forward over whole sequences, row by row, without padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keel.errors import InputError, ShapeError
from keel.networks.decoding import Decoder

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    **YARN,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMAS = {
    "llama": ("Llama", {}),
    "llama, all heads": ("Llama", {"num_key_value_heads": 4}),
    "llama, one key head": ("Llama", {"num_key_value_heads": 1}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "llama, llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, biases": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
}
OTHERS = {
    "gpt2": ("GPT2", {}),
    "gpt-neox": ("GPTNeoX", {}),
    "bloom, which takes no positions": ("Bloom", {}),
    "mistral, a window": ("Mistral", {"sliding_window": 4}),
    "qwen3, a window": (
        "Qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "llama, dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama, gelu": ("Llama", {"hidden_act": "gelu"}),
    "gemma": ("Gemma", {"head_dim": 8}),
}

PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [11, 12, 13, 14]]


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """A model without its head, of random weights: norms and biases, too, which begin plain."""
    torch.manual_seed(seed)
    family, options = {**LLAMAS, **OTHERS}[name]
    options = {**SMALL, **options, **changes}
    if "rope_parameters" in options:
        options["rope_parameters"] = {"rope_theta": 10000.0, **options["rope_parameters"]}
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def tree_of(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def padded(prompts: list[list[int]], extra: int = 0, filler: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts `[B, P]`, left-padded, and which of their tokens are real."""
    width = max(map(len, prompts)) + extra
    tokens = [[filler] * (width - len(p)) + p for p in prompts]
    real = [[False] * (width - len(p)) + [True] * len(p) for p in prompts]
    return torch.tensor(tokens), torch.tensor(real)


@torch.no_grad()
def whole(model: Any, sequences: list[list[int]]) -> Tensor:
    """The last hidden state of every sequence, each alone, without cache or padding."""
    hidden = [
        model(input_ids=torch.tensor([s]), use_cache=False).last_hidden_state[0, -1]
        for s in sequences
    ]
    return torch.stack(hidden)


def largest_error(decoder: Decoder, model: Any, prompts: list[list[int]] = PROMPTS) -> float:
    """Prefill, expand, step, keep, step: the largest distance to `whole` on the way."""
    rng = np.random.default_rng(1)
    tokens, real = padded(prompts)
    errors = []

    def compare(hidden: Tensor) -> None:
        assert hidden.shape == (len(rows), model.config.hidden_size)
        assert not hidden.requires_grad
        errors.append((hidden - whole(model, rows)).abs().max().item())

    def step() -> None:
        drawn = rng.integers(0, 32, len(rows)).tolist()
        for row, token in zip(rows, drawn, strict=True):
            row.append(token)
        compare(decoder.step(torch.tensor(drawn)))

    rows = [list(p) for p in prompts]
    compare(decoder.prefill(tokens, real, tokens.shape[1] + 6))
    decoder.expand(2)
    rows = [list(p) for p in rows for _ in range(2)]
    for _ in range(3):
        step()
    kept = [len(rows) - 1, 0, 2]
    decoder.keep(torch.tensor(kept))
    rows = [rows[i] for i in kept]
    for _ in range(3):
        step()
    return max(errors)


@pytest.mark.parametrize("name", [*LLAMAS, *OTHERS])
def test_it_equals_the_models_forward(name: str):
    model = build(name)
    decoder = Decoder(model, tree_of(model))
    assert largest_error(decoder, model) < 1e-5
    assert largest_error(decoder, model, [[1, 2, 3], [4, 5, 6]]) < 1e-5  # again, and no padding


def test_a_cache_that_is_more_than_keys_and_values_is_carried_along():
    """Qwen3-Next: linear attention, which has a state, between layers of full attention."""
    sizes = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "head_dim"), 8)
    sizes |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 8)
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    experts = {"num_experts": 2, "num_experts_per_tok": 1}
    torch.manual_seed(0)
    options = {**SMALL, **sizes, **heads, **experts, "num_hidden_layers": 4}
    model = transformers.Qwen3NextModel(transformers.Qwen3NextConfig(**options)).eval()
    assert largest_error(Decoder(model, {}), model) < 1e-5


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_other_precisions(name: str):
    double = build(name).double()
    decoder = Decoder(double, {})
    assert largest_error(decoder, double) < 1e-12
    half = build(name).bfloat16()
    decoder = Decoder(half, {})
    tokens, real = padded(PROMPTS)
    hidden = decoder.prefill(tokens, real, 6)
    after = decoder.step(torch.tensor([1, 2, 3]))
    assert hidden.dtype == after.dtype == torch.bfloat16
    sequences = [[*p, t] for p, t in zip(PROMPTS, [1, 2, 3], strict=True)]
    assert (hidden - whole(half, PROMPTS)).abs().max() < 0.1  # eight bits, numbers up to 3
    assert (after - whole(half, sequences)).abs().max() < 0.1


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_the_tree_decides(name: str):
    """Not the module, whose parameters may be others; where the tree has none, the module."""
    model, other = build(name, seed=0), build(name, seed=1)
    tree = tree_of(other)
    assert largest_error(Decoder(model, tree), other) < 1e-5
    assert largest_error(Decoder(model, tree), model) > 0.1
    mixed = build(name, seed=0)
    first = sorted(tree)[: len(tree) // 2]
    mixed.load_state_dict({**dict(model.state_dict()), **{key: tree[key] for key in first}})
    assert largest_error(Decoder(model, {key: tree[key] for key in first}), mixed) < 1e-5


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_every_parameter_counts(name: str):
    model = build(name)
    tokens, real = padded([[1, 2, 3, 4]])

    def hidden(tree: Mapping[str, Tensor]) -> Tensor:
        decoder = Decoder(model, tree)
        decoder.prefill(tokens, real, 5)
        return decoder.step(torch.tensor([5]))

    tree = tree_of(model)
    before = hidden(tree)
    for key, value in tree.items():
        changed = hidden({**tree, key: value + 0.5 * torch.randn(value.shape)})
        assert (changed - before).abs().max() > 1e-6, key


@pytest.mark.parametrize("name", ["llama, biases", "gpt2"])
def test_parameters_are_copied(name: str):
    model = build(name)
    vector = torch.cat([p.detach().flatten() for p in model.parameters()])
    tree, at = {}, 0
    for key, parameter in model.named_parameters():
        tree[key] = vector[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
    decoder = Decoder(model, tree)
    vector.zero_()
    assert largest_error(decoder, model) < 1e-5
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_there_is_no_dropout(name: str):
    rate = {"attn_pdrop": 0.5, "resid_pdrop": 0.5} if name == "gpt2" else {"attention_dropout": 0.5}
    model = build(name, **rate)
    decoder = Decoder(model.train(), {})
    assert model.training
    assert largest_error(decoder, model.eval()) < 1e-5


def with_lora(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], **options
    )
    adapted = peft.inject_adapter_in_model(config, model)
    torch.manual_seed(2)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                parameter.copy_(0.3 * torch.randn(parameter.shape))
    return adapted.eval()


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_lora_counts(name: str):
    """The tree holds the adapter, as in training; the frozen weights are the module's."""
    plain, adapted = build(name), with_lora(build(name), lora_dropout=0.1)
    tree = {key: value for key, value in tree_of(adapted).items() if "lora_" in key}
    decoder = Decoder(adapted, tree)
    assert largest_error(decoder, adapted) < 1e-5
    assert largest_error(decoder, plain) > 0.05
    doubled = Decoder(adapted, {key: 2.0 * value for key, value in tree.items()})
    assert largest_error(doubled, adapted) > 0.05


@pytest.mark.parametrize("kind", ["dora", "bias", "off"])
def test_adapters_that_are_more_than_a_sum(kind: str):
    options = {"dora": {"use_dora": True}, "bias": {"lora_bias": True}}.get(kind, {})
    model = with_lora(build("llama, biases"), **options)
    for module in model.modules():
        if kind == "off" and hasattr(module, "lora_A"):
            module.enable_adapters(enabled=False)
    decoder = Decoder(model, tree_of(model))
    assert largest_error(decoder, model) < 1e-5


def test_somebodys_own_class_is_run_as_it_is():
    class Louder(transformers.LlamaModel):  # type: ignore[misc, name-defined]
        def forward(self, past_key_values: Any = None, **kwargs: Any) -> Any:
            output = super().forward(past_key_values=past_key_values, **kwargs)
            output.last_hidden_state = 2.0 * output.last_hidden_state
            return output

    model = Louder(build("llama").config).eval()
    decoder = Decoder(model, {})
    assert largest_error(decoder, model) < 1e-5


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=4)
MODELS = {name: build(name) for name in ("qwen3", "gpt2")}


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15)
@given(lengths=LENGTHS, extra=st.integers(0, 4), filler=st.integers(0, 31), seed=st.integers(0, 99))
def test_padding_changes_nothing(name: str, lengths: list[int], extra: int, filler: int, seed: int):
    """However much there is, and whatever it holds."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 32, n).tolist() for n in lengths]
    drawn = torch.from_numpy(rng.integers(0, 32, (2, len(prompts))))
    seen = []
    for tokens, real in (padded(prompts), padded(prompts, extra, filler)):
        decoder = Decoder(MODELS[name], {})
        hidden = [decoder.prefill(tokens, real, tokens.shape[1] + 2)]
        seen.append(torch.stack([*hidden, *(decoder.step(t) for t in drawn)]))
    assert (seen[0] - seen[1]).abs().max() < 1e-5


def test_what_is_not_a_number_is_not_hidden():
    """One NaN in a row's keys makes that row NaN, and no other."""
    decoder = Decoder(build("llama"), {})
    decoder.prefill(*padded(PROMPTS), 6)
    decoder._kv_cache.layers[0].keys[1, 0, 4, 0] = torch.nan
    hidden_state = decoder.step(torch.tensor([1, 2, 3]))
    assert hidden_state.isnan().all(1).tolist() == [False, True, False]


@pytest.fixture(params=["qwen3", "gpt2"])
def begun(request: pytest.FixtureRequest) -> Decoder:
    decoder = Decoder(MODELS[request.param], {})
    decoder.prefill(*padded(PROMPTS), 6)
    return decoder


def test_running_past_the_capacity_is_named(begun: Decoder):
    begun.step(torch.tensor([1, 2, 3]))
    with pytest.raises(InputError, match="all 6 positions are filled; prefill with room for more"):
        begun.step(torch.tensor([1, 2, 3]))
    with pytest.raises(InputError, match="capacity: 4 positions cannot hold prompts of 5"):
        begun.prefill(*padded(PROMPTS), 4)


def test_wrong_tokens_are_named(begun: Decoder):
    with pytest.raises(ShapeError, match=r"tokens: expected shape \[3\] \(one for every row\)"):
        begun.step(torch.tensor([[1], [2], [3]]))
    tokens, real = padded(PROMPTS)
    with pytest.raises(ShapeError, match=r"tokens: expected prompts \[B, P\], got shape \[5\]"):
        begun.prefill(tokens[0], real[0], 6)
    with pytest.raises(ShapeError, match=r"attention: expected shape \[3, 5\] \(that of tokens\)"):
        begun.prefill(tokens, real[:, 1:], 6)


def test_a_failed_step_leaves_the_rows_as_they_were(begun: Decoder):
    with pytest.raises(IndexError):
        begun.step(torch.tensor([1, 2, 99]))
    begun.step(torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("real", [[[1, 1, 0]], [[0, 0, 0]], [[1, 0, 1]]])
def test_padding_elsewhere_is_named(begun: Decoder, real: list[list[int]]):
    tokens, attention = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool)
    attention[1] = torch.tensor(real[0]).bool()
    with pytest.raises(InputError, match=r"prompt 1 is padded after a token or has none; .*left"):
        begun.prefill(tokens, attention, 6)


def test_wrong_rows_are_named(begun: Decoder):
    with pytest.raises(InputError, match="times: expected at least 1, got 0; `keep` drops rows"):
        begun.expand(0)
    with pytest.raises(InputError, match=r"indices \[K\] of int64, got torch.bool .*nonzero"):
        begun.keep(torch.tensor([True, False, True]))
    begun.keep(torch.empty(0, dtype=torch.int64))
    with pytest.raises(InputError, match="no row to go on with; prefill prompts first"):
        begun.step(torch.tensor([1]))


@pytest.mark.parametrize("name", MODELS)
def test_a_step_before_the_prompts_is_named(name: str):
    decoder = Decoder(MODELS[name], {})
    with pytest.raises(InputError, match="no row to go on with; prefill prompts first"):
        decoder.step(torch.tensor([1]))


def test_a_table_of_positions_that_ends_is_named():
    decoder = Decoder(MODELS["gpt2"], {})
    decoder.prefill(*padded(PROMPTS), 64)
    with pytest.raises(InputError, match="capacity: 65 positions, but GPT2Model knows 64"):
        decoder.prefill(*padded(PROMPTS), 65)
    Decoder(MODELS["qwen3"], {}).prefill(*padded(PROMPTS), 65)


def test_a_tree_that_does_not_fit_is_named():
    model = MODELS["qwen3"]
    with pytest.raises(InputError, match=r"Qwen3Model has no parameter 'lm_head.weight'; names"):
        Decoder(model, {"lm_head.weight": torch.zeros(32, 32)})
    with pytest.raises(ShapeError, match=r"tree\['norm.weight'\]: expected shape \[32\]"):
        Decoder(model, {"norm.weight": torch.zeros(31)})


def test_models_that_cannot_be_decoded_are_named():
    lm = transformers.LlamaForCausalLM(build("llama").config)
    with pytest.raises(InputError, match=r"LlamaForCausalLM has a head; .* model\.base_model"):
        Decoder(lm, {})
    Decoder(lm.base_model, {})
    sizes = {"vocab_size": 8, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 1}
    mamba = transformers.MambaModel(transformers.MambaConfig(**sizes))
    with pytest.raises(InputError, match="forward of MambaModel takes no past_key_values; only"):
        Decoder(mamba, {})
    sizes = {"vocab_size": 8, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    t5 = transformers.T5Model(transformers.T5Config(**sizes))
    with pytest.raises(InputError, match="T5Model has an encoder; only causal LMs are decoded"):
        Decoder(t5, {})
