"""Completions: drawn as they say, from what they say, and replayed to the same numbers."""

from __future__ import annotations

import math

import pytest
import torch
from token_toys import CALL, EOS, PAD, PROMPTS, VOCABULARY, completions, gpt2, moved, qwen

from keel.errors import InputError, KeelError
from keel.experience.completions import Sampling, complete, pad_left, truncated
from keel.networks.causal_lm import TokenAgent

AGENTS = {"qwen": lambda: TokenAgent(qwen()), "gpt2": lambda: TokenAgent(gpt2())}


@pytest.mark.parametrize("make", AGENTS.values(), ids=AGENTS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_replaying_gives_the_log_probs_that_were_drawn_with(make, temperature: float) -> None:
    agent = make()
    found = completions(agent, temperature=temperature)
    policy = agent.policy(agent.initial, found.obs, temperature)
    log_prob = agent.dist.log_prob(policy, found.action)
    written = found.response_mask > 0
    assert written.sum() > 10
    torch.testing.assert_close(log_prob[written], found.log_prob[written], rtol=0, atol=1e-5)
    hidden = policy["hidden"][written]
    torch.testing.assert_close(hidden, found.hidden[written], rtol=0, atol=1e-4)


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    agent = TokenAgent(qwen())
    found = complete(
        agent,
        agent.initial,
        [[5, 6, 7]],
        Sampling(1),
        torch.Generator().manual_seed(0),
        group=4000,
        eos=EOS,
    )
    drawn = torch.bincount(found.action[:, 0], minlength=VOCABULARY) / 4000
    logits = agent.network.model(torch.tensor([[5, 6, 7]])).logits[0, -1]
    expected = logits.softmax(-1)
    error = (expected * (1 - expected) / 4000).sqrt()
    assert ((drawn - expected).abs() < 4.5 * error + 1e-9).all()
    assert expected.max() > 1.5 / VOCABULARY  # not uniform: the test can fail


def test_finished_rows_are_dropped_and_nothing_follows_their_end() -> None:
    agent = TokenAgent(qwen())
    found = completions(agent, group=20, max_new_tokens=20)
    assert found.ended.any()
    assert not found.ended.all()
    for row in range(len(found.tokens)):
        ids = found.action[row].tolist()
        if found.ended[row]:
            end = ids.index(EOS)
            assert found.response_mask[row, : end + 1].all()
            assert not found.response_mask[row, end + 1 :].any()
            assert set(ids[end + 1 :]) <= {PAD}
            assert not found.attention[row, found.tokens.shape[1] - len(ids) + end + 1 :].any()
        else:
            assert EOS not in ids
            assert found.response_mask[row].all()


def test_rows_that_are_dropped_change_nothing_for_the_others() -> None:
    """Log-probs of long completions are those of a replay, though others ended before."""
    agent = TokenAgent(qwen())
    found = completions(agent, group=20, max_new_tokens=20)
    log_prob = agent.dist.log_prob(agent.policy(agent.initial, found.obs), found.action)
    counts = found.response_mask > 0
    assert (log_prob - found.log_prob)[counts].abs().max() < 1e-5


def test_a_group_shares_its_prompt() -> None:
    found = completions(TokenAgent(qwen()), group=2)
    prompts, attention = pad_left(PROMPTS, PAD)
    length = found.response_mask.shape[1]
    assert torch.equal(found.tokens[:, :-length], prompts.repeat_interleave(2, 0))
    assert torch.equal(found.attention[:, :-length], attention.repeat_interleave(2, 0))


def test_tool_text_is_inserted_masked_and_read() -> None:
    agent, asked = TokenAgent(qwen()), []

    def insert(row: int, written: list[int]) -> list[int]:
        asked.append((row, written))
        return [9, 9, 10]

    found = complete(
        agent,
        agent.initial,
        PROMPTS,
        Sampling(16),
        torch.Generator().manual_seed(1),
        group=8,
        eos=EOS,
        pad=PAD,
        call_end=CALL,
        insert=insert,
    )
    assert asked
    for row, written in asked:
        ids = found.action[row].tolist()
        end = len(written)
        assert ids[:end] == written
        assert written[-1] == CALL
        given = ids[end : end + 3]
        assert given == [9, 9, 10][: len(given)]
        assert not found.response_mask[row, end : end + 3].any()
        assert found.completion_mask[row, end : end + len(given)].all()
    log_prob = agent.dist.log_prob(agent.policy(agent.initial, found.obs), found.action)
    everything = found.completion_mask > 0  # also what the policy thinks of tool text
    assert (log_prob - found.log_prob)[everything].abs().max() < 1e-5


def test_the_likeliest_tokens_need_no_chance() -> None:
    agent = TokenAgent(qwen())
    a, b = completions(agent, temperature=0.0), completions(agent, temperature=0.0)
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a.tokens[0], a.tokens[1])  # of one prompt
    logits = agent.network.model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    assert a.action[0, 0] == logits.argmax()


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [(2, 1.0, [0.5, 0.3]), (0, 0.8, [0.5, 0.3]), (0, 0.81, [0.5, 0.3, 0.15]), (0, 0.1, [0.5])],
)
def test_what_is_left_out_is_shared_by_the_rest(top_k: int, top_p: float, kept) -> None:
    log_p = torch.tensor([[0.15, 0.5, 0.05, 0.3]], dtype=torch.float64).log()
    found = truncated(log_p, top_k, top_p).exp()[0]
    expected = sorted(x / sum(kept) for x in kept)
    assert sorted(x for x in found.tolist() if x > 0) == pytest.approx(expected)


def test_with_top_p_policy_and_sampler_are_told_apart() -> None:
    """The policy's log-prob is that of the whole vocabulary, the sampler's that of what was drawn
    from; their difference is −log of the mass kept, which is the exact KL(sampler‖policy)."""
    agent = TokenAgent(qwen())
    found = completions(agent, top_p=0.7)
    policy = agent.policy(agent.initial, found.obs)
    log_p = (policy["hidden"] @ policy["head"].T).log_softmax(-1)
    sampler = truncated(log_p.reshape(-1, VOCABULARY), 0, 0.7).reshape(log_p.shape)
    q = sampler.exp()
    kl = torch.where(q > 0, q * (sampler - log_p), 0.0).sum(-1)
    written = found.response_mask > 0
    gap = (found.sampler_log_prob - found.log_prob)[written]
    torch.testing.assert_close(gap, kl[written], rtol=1e-3, atol=1e-4)
    assert gap.max() > 0.05


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_from_what_is_not_finite_nothing_is_drawn(temperature: float) -> None:
    agent = TokenAgent(qwen())
    with pytest.raises(KeelError, match="log-probs are not finite"):
        completions(agent, torch.full_like(agent.initial, torch.nan), temperature=temperature)


@pytest.mark.parametrize("make", AGENTS.values(), ids=AGENTS)
def test_a_seed_draws_the_same_tokens_again(make) -> None:
    agent = make()
    a, b = (completions(agent, group=20, max_new_tokens=20) for _ in range(2))
    for one, other in zip(a, b, strict=True):
        assert torch.equal(one, other)


def test_other_parameters_draw_other_tokens() -> None:
    agent = TokenAgent(qwen())
    a = completions(agent)
    b = completions(agent, moved(agent.initial, 0.5))
    assert not torch.equal(a.tokens, b.tokens)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ({"temperature": -1.0}, "expected temperature ≥ 0"),
        ({"top_p": 0.0}, "0 < top_p ≤ 1"),
    ],
)
def test_impossible_sampling_is_refused(settings, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sampling(**settings)


def test_a_prompt_must_not_be_empty() -> None:
    with pytest.raises(InputError, match="none of them empty"):
        pad_left([[4], []], PAD)
    assert math.prod(pad_left([[4], [5, 6]], PAD)[0].shape) == 4
