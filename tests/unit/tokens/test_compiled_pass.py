"""Compiled loops against torch's operations in float64: values, gradients, comparisons, drawing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_shared_prefix import backbones
from token_toys import VOCABULARY, qwen
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from keel.errors import InputError
from keel.functional.vocabulary import vocabulary_comparison
from keel.models import compiled_pass, compiling, shared_prefix
from keel.models.generation import make_writer
from keel.models.language import ATTENTION, TOKENS, WRITTEN, TokenAgent, positions
from keel.models.shared_prefix import states
from keel.models.vocabulary import HEAD, HIDDEN, Vocabulary


def disturbed(name: str):
    """With biases and norms that are neither 0 nor 1."""
    model = backbones()[name]
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
    return model


def texts(padded: bool, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Nineteen completions of four prompts, in any order."""
    rng = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, VOCABULARY, (4, 5), generator=rng).repeat_interleave(5, 0)[1:]
    tokens = torch.cat([prompts, torch.randint(2, VOCABULARY, (19, steps), generator=rng)], 1)
    attention = torch.ones_like(tokens, dtype=torch.bool)
    if padded:
        attention[4:9, :2] = False
        attention[9:14, :4] = False
    order = torch.randperm(19, generator=rng)
    return tokens[order], attention[order]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pieces each pass through the loops had."""
    seen: list[int] = []
    honest = compiled_pass._forward

    def forward(x, weights, scenes, keep):
        seen.append(len(scenes))
        return honest(x, weights, scenes, keep)

    monkeypatch.setattr(compiled_pass, "_forward", forward)
    return seen


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("padded", "steps"), [(False, 7), (True, 7), (True, 45)])
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama", "mistral"])
def test_values_and_gradients_are_those_of_torch(
    name: str, padded: bool, steps: int, threads: int, watched: list[int]
) -> None:
    """45 steps of 19 rows are more than a block; threads share rows whose prompts lie apart."""
    torch.set_num_threads(threads)
    model = disturbed(name)
    tokens, attention = texts(padded, steps)
    rng = torch.Generator().manual_seed(3)
    weights = torch.randn(19 * steps * model.config.hidden_size, generator=rng)
    found = []
    for precise in (False, True):
        model = model.double() if precise else model
        mine = states(model, dict(model.named_parameters()), tokens, attention, steps)
        loss = (mine.flatten() * weights).sum()
        found.append((mine.double(), torch.autograd.grad(loss, list(model.parameters()))))
    assert watched == [threads]  # of float32 alone
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=2e-5)
    for (key, _), ours, theirs in zip(
        model.named_parameters(), found[0][1], found[1][1], strict=True
    ):
        size = theirs.abs().max()
        assert size > 0, key
        assert ((ours.double() - theirs).abs().max() / size).item() < 1e-4, key


@pytest.mark.parametrize("threads", [1, 2])
def test_without_gradients_it_is_the_same(threads: int) -> None:
    torch.set_num_threads(threads)
    model = disturbed("qwen3")
    tokens, attention = texts(True, 9)
    given = dict(model.named_parameters()), tokens, attention, 9
    kept = states(model, *given).detach()
    with torch.no_grad():
        assert torch.equal(states(model, *given), kept)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    model = disturbed("qwen3")
    tokens, attention = texts(True, 45)
    tree = dict(model.named_parameters())
    with torch.no_grad():
        whole = states(model, tree, tokens, attention, 45)
        alone = [states(model, tree, tokens[[i]], attention[[i]], 45) for i in range(19)]
    torch.testing.assert_close(torch.cat(alone), whole, rtol=0.0, atol=1e-5)


def test_going_back_twice_is_refused() -> None:
    model = disturbed("qwen3")
    found = states(model, dict(model.named_parameters()), *texts(False, 4), 4).sum()
    found.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be gone back through once"):
        found.backward()


def test_room_that_was_given_back_is_used_again_and_nothing_of_it_shows() -> None:
    model = disturbed("qwen3")
    tree = dict(model.named_parameters())

    def gradients(steps: int) -> list[torch.Tensor]:
        loss = states(model, tree, *texts(True, steps), steps).square().sum()
        return list(torch.autograd.grad(loss, list(tree.values())))

    compiled_pass._SPARE.clear()
    first = gradients(9)
    (room,) = compiled_pass._SPARE
    room.fill(float("nan"))
    gradients(4)  # smaller: fits
    assert compiled_pass._SPARE[0] is room
    room.fill(float("nan"))
    assert all(map(torch.equal, gradients(9), first))


def test_wide_models_and_other_precisions_are_left_to_torch(watched: list[int]) -> None:
    shape = {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "num_attention_heads": 2}
    wide = LlamaModel(LlamaConfig(hidden_size=264, intermediate_size=8, **shape))
    for model in (wide, qwen().model.bfloat16()):
        with torch.no_grad():
            states(model, dict(model.named_parameters()), *texts(False, 3), 3)
        assert make_writer(model, {}) is None
    assert not watched


def test_rows_of_a_prompt_stay_together() -> None:
    tokens, attention = texts(False, 3)
    groups, order = shared_prefix._grouped(tokens, attention, 3, 2)
    assert order is not None
    assert sum(len(group.real) for group in groups) <= 5  # one of four prompts lies in both
    together = torch.cat([group.tokens[-len(group.member) * 2 :].view(-1, 2) for group in groups])
    assert torch.equal(together, tokens[order][:, 5:7])


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(2, 300),
    rows=st.integers(1, 600),
    spread=st.sampled_from([0.0, 1e-3, 0.1, 2.0]),
)
def test_comparisons_are_those_of_torch(seed: int, tokens: int, rows: int, spread: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    hidden, head = torch.randn(rows, 6, generator=rng), torch.randn(tokens, 6, generator=rng)
    other = hidden + spread * torch.randn(rows, 6, generator=rng)
    action = torch.randint(0, tokens, (rows,), generator=rng)
    own, their = {HIDDEN: hidden, HEAD: head}, {HIDDEN: other, HEAD: head}
    torch.set_num_threads(1 + seed % 2)
    found = Vocabulary(tokens, 6).compare(own, their, action)
    exact = vocabulary_comparison(
        hidden.double(), head.double(), other.double(), head.double(), action
    )
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=5e-3, atol=2e-6)
    if spread == 0.0:
        assert (found.kl == 0.0).all()
    assert (found.kl >= 0.0).all()
    assert found.kl.sum().item() == pytest.approx(exact.kl.sum().item(), rel=2e-3, abs=1e-9)


def test_a_comparison_of_large_vocabularies_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import keel.models.vocabulary as module

    monkeypatch.setattr(module, "_by_loops", None)
    hidden, head = torch.randn(3, 4), torch.randn(4097, 4)
    sides = {HIDDEN: hidden, HEAD: head}, {HIDDEN: hidden + 0.1, HEAD: head}
    found = Vocabulary(4097, 4).compare(*sides, torch.zeros(3, dtype=torch.int64))
    assert (found.kl > 0.0).all()


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama", "mistral"])
def test_what_is_written_at_once_is_what_the_model_would_say(name: str) -> None:
    """Every log-prob and hidden state of padded prompts, by another pass."""
    model = disturbed(name)
    writer = make_writer(model, {})
    assert writer is not None
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, VOCABULARY, (3, 5), generator=rng)
    attention = torch.ones(3, 5, dtype=torch.bool)
    attention[1, :3] = False
    head = 0.3 * torch.randn(VOCABULARY, model.config.hidden_size, generator=rng)
    chances = torch.rand(18, 40, dtype=torch.float64, generator=rng)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(writer.write(tokens, attention, head, chances, 0.8, 1))
    for alone, shared in zip(*found, strict=True):
        torch.testing.assert_close(alone, shared, rtol=0.0, atol=1e-5)
    told = found[0]
    assert told.lengths.min() < 20 < told.lengths.max()
    there = torch.arange(40) < told.lengths[:, None]
    rows = torch.cat([tokens.repeat_interleave(6, 0), told.tokens], 1)
    seen = torch.cat([attention.repeat_interleave(6, 0), there], 1)
    double = model.double()
    exact = states(double, dict(double.named_parameters()), rows, seen, 40) / 0.8
    torch.testing.assert_close(told.hidden.double()[there], exact[there], rtol=1e-4, atol=1e-4)
    log_p = (exact @ head.double().T).log_softmax(-1).gather(2, told.tokens[..., None])[..., 0]
    torch.testing.assert_close(told.log_prob.double()[there], log_p[there], rtol=0.0, atol=1e-4)


def test_a_chance_picks_the_token_whose_share_it_falls_into() -> None:
    from keel.models.generation_loops import draw

    shares = torch.tensor([0.1, 0.2, 0.0, 0.7])
    bits = torch.empty(4, dtype=torch.int32).numpy()

    def drawn(chance: float, greedy: bool = False) -> tuple[int, float]:
        logits = (shares.clamp(min=1e-30).log() + 3.0).numpy()
        token, log_prob = draw(logits, chance, greedy, bits)
        return token, log_prob

    picked = [drawn(chance)[0] for chance in (0.0, 0.09, 0.11, 0.29, 0.31, 0.999999)]
    assert picked == [0, 0, 1, 1, 3, 3]
    assert drawn(0.2)[1] == pytest.approx(torch.tensor(0.2).log().item(), abs=1e-6)
    assert drawn(0.0, greedy=True) == (3, pytest.approx(torch.tensor(0.7).log().item(), abs=1e-6))


@pytest.mark.parametrize("count", [1, 31, 32, 40])
@pytest.mark.parametrize("shift", [0.0, -300.0, 300.0])
def test_looking_back_is_a_softmax_of_what_is_there(count: int, shift: float) -> None:
    """Also where all scores are far below or above 0; what is not there may be anything."""
    from keel.models.generation_loops import look_back

    rng = torch.Generator().manual_seed(0)
    query, values = torch.randn(6, generator=rng), torch.randn(64, 5, generator=rng)
    keys = torch.randn(6, 64, generator=rng)
    keys += shift * query[:, None] / query.square().sum()
    keys[:, count:] = torch.nan
    values[count:] = torch.nan
    room = torch.empty(64).numpy(), torch.empty(64, dtype=torch.int32).numpy()
    out = torch.empty(5)
    look_back(query.numpy(), keys.numpy(), values.numpy(), count, room, out.numpy())
    weight = (query @ keys[:, :count]).softmax(0)
    torch.testing.assert_close(out, weight @ values[:count], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("frozen", ["k_proj.weight", "input_layernorm.weight", "up_proj", "bias"])
def test_what_is_not_learned_is_the_modules_own(frozen: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
        config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=16, attention_bias=True, **shape)
        model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 0.5, 0.3, generator=torch.Generator().manual_seed(1))
        parameter.requires_grad_(frozen not in name)
    agent = TokenAgent(model)
    tokens, attention = texts(True, 6)
    obs = {TOKENS: tokens, ATTENTION: attention, WRITTEN: torch.ones(19, 6)}
    found = agent.policy(agent.initial, obs)[HIDDEN].detach()
    theirs = model.model(
        input_ids=tokens, attention_mask=attention.long(), position_ids=positions(attention)
    ).last_hidden_state[:, 4:-1]
    torch.testing.assert_close(found, theirs.detach(), rtol=1e-4, atol=1e-4)


def test_prompts_with_holes_are_left_to_torch(watched: list[int]) -> None:
    model = disturbed("qwen3")
    tokens, attention = texts(False, 4)
    attention[3, 2] = False
    found = states(model, dict(model.named_parameters()), tokens, attention, 4).detach()
    assert not watched
    double = model.double()
    exact = states(double, dict(double.named_parameters()), tokens, attention, 4).detach()
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


def test_a_model_of_fewer_layers_than_its_configuration_says() -> None:
    model = disturbed("qwen3")
    model.layers = model.layers[:1]
    tokens, attention = texts(False, 4)
    found = states(model, dict(model.named_parameters()), tokens, attention, 4).detach()
    theirs = model(input_ids=tokens).last_hidden_state[:, 4:-1].detach()
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, q, a: (p, q, a + 9), "expected tokens from 0 to 8, got"),
        (lambda p, q, a: (p, q, a - 1), "expected tokens from 0 to 8, got -1"),
        (lambda p, q, a: (p, q, a[:5]), "token: expected"),
        (lambda p, q, a: ({**p, HEAD: p[HEAD][:7]}, q, a), "vocabulary of 7"),
        (lambda p, q, a: (p, {**q, HIDDEN: q[HIDDEN][:2]}, a), "q: expected tokens"),
    ],
)
def test_comparisons_of_what_does_not_fit_are_refused(change, message: str) -> None:
    rng = torch.Generator().manual_seed(0)
    p = {HIDDEN: torch.randn(300, 4, generator=rng), HEAD: torch.randn(9, 4, generator=rng)}
    action = torch.arange(300) % 9
    with pytest.raises(InputError, match=message):
        Vocabulary(9, 4).compare(*change(p, p, action))


def test_a_comparison_in_inference_mode() -> None:
    torch.set_num_threads(2)
    with torch.inference_mode():
        side = {HIDDEN: torch.randn(300, 4), HEAD: torch.randn(9, 4)}
        assert (Vocabulary(9, 4).compare(side, side, torch.zeros(300).long()).kl == 0.0).all()


def test_a_head_that_says_more_than_can_be_read_is_not_for_a_writer() -> None:
    writer = make_writer(disturbed("qwen3"), {})
    assert writer is not None
    width = writer.model.config.hidden_size
    assert writer.takes(torch.empty(VOCABULARY, width))
    assert not writer.takes(torch.empty(VOCABULARY + 1, width))
    assert not writer.takes(torch.empty(VOCABULARY, width + 1))
    holes = torch.tensor([[True, False, True]])
    chances = torch.rand(2, 3, dtype=torch.float64)
    with pytest.raises(InputError, match="pad on the left only"):
        writer.write(holes.long() + 2, holes, torch.empty(VOCABULARY, width), chances, 1.0, 1)


def test_whether_loops_have_to_be_compiled_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert compiled_pass.loops_are_new()
    from keel.models.pass_layers import SOURCES

    below = compiling.cache_folder(SOURCES) / "models"
    below.mkdir(parents=True)
    assert compiled_pass.loops_are_new()  # numba makes the folder before it compiles
    (below / "pass_layers.forward-190.py311.nbi").touch()
    assert not compiled_pass.loops_are_new()
