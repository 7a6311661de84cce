"""From scores to advantages of tokens: numbers by hand, and the mask law."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.apps.language.advantages import token_rewards, token_targets
from keel.apps.language.config import from_dict
from keel.apps.language.source import PromptSource
from keel.experience.completions import Sampling

ALGOS = ("ppo", "grpo", "rloo", "reinforce_pp", "remax", "dr_grpo")


def config(algo: str, group: int = 2, **advantage):
    return from_dict({"algo": algo, "sample": {"group": group}, "advantage": advantage})


def test_the_score_stands_on_the_last_token_the_policy_wrote() -> None:
    weight = torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    penalty = torch.full((3, 4), 0.5)
    found = token_rewards(torch.tensor([2.0, 3.0, 9.0]), weight, penalty)
    assert found.tolist() == [[-0.5, 0.0, 1.5, 0.0], [-0.5, 2.5, 0.0, 0.0], [0.0] * 4]


def test_the_score_of_a_single_token_stands_on_it() -> None:
    weight, zero = torch.tensor([[1.0, 0.0, 0.0]]), torch.zeros(1, 3)
    assert token_rewards(torch.tensor([2.0]), weight, zero).tolist() == [[2.0, 0.0, 0.0]]


def test_a_clamp_bounds_what_is_learned_and_not_what_is_told() -> None:
    """The scores 1 and 0 are half above and half below their mean."""
    score, zero = torch.tensor([1.0, 0.0]), torch.zeros(2, 2)
    weight = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    found = token_targets(config("dr_grpo", clamp=0.25), score, weight, zero, zero)
    assert found.advantage.tolist() == [[0.25, 0.0], [-0.25, 0.0]]
    assert found.raw.tolist() == [[0.5, 0.0], [-0.5, 0.0]]


@pytest.mark.parametrize("algo", ["grpo", "rloo", "dr_grpo"])
def test_a_completion_that_could_not_be_scored_is_not_there(algo: str) -> None:
    """Neither in the mean of its group nor in its spread or count, with a penalty or without."""
    weight, penalty = torch.ones(3, 2), torch.full((3, 2), 0.15)
    weight[2] = 0.0
    score, nothing = torch.tensor([1.0, 0.0, 99.0]), torch.zeros(3, 2)
    for cost in (nothing, penalty):
        found = token_targets(config(algo, group=3), score, weight, cost, nothing)
        alone = token_targets(config(algo), score[:2], weight[:2], cost[:2], nothing[:2])
        torch.testing.assert_close(found.advantage[:2], alone.advantage)
        assert found.advantage[2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("algo", "expected"),
    [
        ("dr_grpo", [0.5, -0.5, 0.0, 0.0]),
        ("rloo", [1.0, -1.0, 0.0, 0.0]),
        ("grpo", [0.5**0.5, -(0.5**0.5), 0.0, 0.0]),  # std of (1, 0) with n − 1 is √½
        ("remax", [0.75, -0.25, 0.75, 0.75]),
    ],
)
def test_groups_by_hand(algo: str, expected: list[float]) -> None:
    score = torch.tensor([1.0, 0.0, 1.0, 1.0])
    weight, zero = torch.ones(4, 3), torch.zeros(4, 3)
    found = token_targets(config(algo), score, weight, zero, zero, torch.full((4,), 0.25))
    assert found.advantage[:, 0].tolist() == pytest.approx(expected)
    assert torch.equal(found.advantage, found.advantage[:, :1].expand(-1, 3))


def test_a_penalty_in_the_reward_counts_by_sequence_or_by_token() -> None:
    weight = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    penalty = torch.tensor([[0.1, 0.2], [0.0, 0.0]])
    zero = torch.zeros(2, 2)
    found = token_targets(config("dr_grpo"), torch.tensor([1.0, 1.0]), weight, penalty, zero)
    assert found.advantage[:, 0].tolist() == pytest.approx([-0.15, 0.15])
    raw = token_targets(config("reinforce_pp"), torch.tensor([1.0, 1.0]), weight, penalty, zero).raw
    assert raw.tolist() == [pytest.approx([0.7, 0.8]), pytest.approx([1.0, 1.0])]


def test_ppo_is_gae_along_the_tokens() -> None:
    """γ = 1, λ = ½: δ₂ = 1 − 0.4, δ₁ = 0.4 − 0.2, A₁ = δ₁ + ½·δ₂."""
    weight = torch.ones(1, 2)
    value = torch.tensor([[0.2, 0.4]])
    found = token_targets(
        config("ppo", lam=0.5), torch.tensor([1.0]), weight, torch.zeros(1, 2), value
    )
    assert found.raw.tolist() == [pytest.approx([0.5, 0.6])]
    assert found.target.tolist() == [pytest.approx([0.7, 1.0])]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(ALGOS), st.integers(0, 10_000))
def test_inserting_tool_text_anywhere_changes_nothing(algo: str, seed: int) -> None:
    """The mask law: what a tool wrote is worth nothing, costs nothing and stands in no mean."""
    rng = torch.Generator().manual_seed(seed)
    rows, length = 4, 5
    weight = torch.ones(rows, length).double()  # scores that nearly tie leave no digits in float32
    weight[:, 3:] = (torch.rand(rows, 2, generator=rng) > 0.5).double()
    penalty, value = torch.rand(2, rows, length, generator=rng).double().unbind(0)
    score, greedy = torch.rand(2, rows, generator=rng).double().unbind(0)
    plain = token_targets(config(algo), score, weight, penalty, value, greedy)
    places = [torch.randperm(length + 3, generator=rng)[:length].sort().values for _ in range(rows)]
    index = torch.stack(places)

    def spread(x: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.full((rows, length + 3), fill).double().scatter(1, index, x)

    wide = token_targets(
        config(algo), score, spread(weight, 0.0), spread(penalty, 7.0), spread(value, -9.0), greedy
    )
    counts = weight > 0
    for ours, theirs in zip(wide, plain, strict=True):
        torch.testing.assert_close(
            ours.gather(1, index)[counts], theirs[counts], rtol=1e-5, atol=1e-6
        )
        hole = spread(weight, 0.0) == 0
        assert not wide.advantage[hole].any()


def test_the_likeliest_completion_of_a_prompt_is_the_baseline_of_its_whole_group() -> None:
    """Two prompts of three completions each: rows stand prompt by prompt, and so does what ReMax
    subtracts. The greedy completion of the second prompt could not be scored."""
    asked: list[Any] = []

    def complete(*given: Any, sampling: Sampling) -> SimpleNamespace:
        asked.append((given[1], sampling))
        return SimpleNamespace(response_mask=torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))

    def rewards(examples: Any, texts: Any, lengths: Any) -> SimpleNamespace:
        assert (examples, texts, lengths) == (["a", "b"], ["x", "y"], [2, 1])
        return SimpleNamespace(score=np.array([0.25, np.nan]), valid=np.array([True, False]))

    source = SimpleNamespace(
        config=config("remax", group=3),
        sampling=Sampling(max_new_tokens=5, temperature=0.7),
        draws=None,
        device=torch.device("cpu"),
        complete=complete,
        texts=lambda _: ["x", "y"],
        rewards=rewards,
    )
    source._scored = partial(PromptSource._scored, source)
    baseline, valid = PromptSource._likeliest(source, torch.zeros(1, 1), ["a", "b"])  # type: ignore[arg-type]
    assert baseline.tolist() == [0.25, 0.25, 0.25, 0.0, 0.0, 0.0]
    assert valid.tolist() == [True, True, True, False, False, False]
    assert asked == [(["a", "b"], Sampling(max_new_tokens=5, temperature=0.0))]
