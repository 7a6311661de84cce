"""The mask law of tokens: what does not count may hold anything, and changes nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from test_token_runs import count_vowels, ready, sharp, tiny
from torch import Tensor

from keel.apps.language.advantages import token_targets
from keel.apps.language.build import open_session
from keel.apps.language.rewards import Scores
from keel.apps.language.source import PromptSource
from keel.experience.completions import Completions
from keel.training.loop import Iteration, run

ALGOS = ("ppo", "grpo", "rloo", "reinforce_pp", "remax", "dr_grpo")
FAILED = 2
"""The completion whose reward failed: all of its tokens have weight 0."""
VOWELS = {"functions": f"{count_vowels.__module__}:{count_vowels.__name__}"}
junks = pytest.mark.parametrize("junk", [math.nan, math.inf, -1e30], ids=["NaN", "inf", "huge"])


@junks
@pytest.mark.parametrize("algo", ALGOS)
def test_what_tokens_of_weight_0_hold_changes_no_advantage(algo: str, junk: float) -> None:
    """Nor what a completion scored, or its greedy sibling, of which no token counts."""
    rng = torch.Generator().manual_seed(0)
    weight = (torch.rand(4, 6, generator=rng) < 0.7).float()
    weight[FAILED] = 0.0
    penalty, value = torch.rand(2, 4, 6, generator=rng).unbind(0)
    score, greedy = torch.rand(2, 4, generator=rng).unbind(0)
    config = tiny(algo=algo, sample={"group": 2}, advantage={"gamma": 0.9, "lam": 0.7})
    dead, gone = weight == 0, weight.sum(1) == 0
    clean = token_targets(config, score, weight, penalty, value, greedy)
    spoilt = token_targets(
        config,
        torch.where(gone, junk, score),
        weight,
        torch.where(dead, junk, penalty),
        torch.where(dead, junk, value),
        torch.where(gone, junk, greedy),
    )
    for ours, theirs in zip(spoilt, clean, strict=True):
        assert torch.equal(ours, theirs)
        assert not ours[dead].any()


class Tampered:
    """A source whose second token of every completion is a tool's, and one reward fails."""

    def __init__(self, source: PromptSource, monkeypatch: pytest.MonkeyPatch, junk: float | None):
        self.junk, self.complete, self.rewards = junk, source.complete, source.rewards
        monkeypatch.setattr(source, "complete", self.completed)
        monkeypatch.setattr(source, "rewards", self.scored)

    def completed(self, *given: Any, **options: Any) -> Completions:
        """Completions; with junk in every token that does not count."""
        found = self.complete(*given, **options)
        written = found.response_mask.clone()
        written[:, 1] = 0.0
        found = found._replace(response_mask=written)
        if self.junk is None or "sampling" in options:
            return found
        dead = written == 0
        dead[FAILED] = True

        def filled(x: Tensor, rows: Tensor) -> Tensor:
            return torch.where(rows, torch.tensor(self.junk, dtype=x.dtype), x)

        other = (found.tokens + 1) % int(found.tokens.max())  # in the padding stands another token
        return found._replace(
            tokens=torch.where(found.attention, found.tokens, other),
            log_prob=filled(found.log_prob, dead),
            sampler_log_prob=filled(found.sampler_log_prob, dead),
            hidden=filled(found.hidden, dead[..., None]),
        )

    def scored(self, examples: Any, texts: list[str], lengths: Any) -> Scores:
        """Scores; of the completion that failed, junk."""
        found = self.rewards(examples, texts, lengths)
        if len(texts) <= FAILED:  # those of the greedy completions
            return found
        valid, score = found.valid.copy(), found.score.copy()
        valid[FAILED] = False
        score[FAILED] = 0.0 if self.junk is None else self.junk
        return found._replace(valid=valid, score=score)


def updated(algo: str, junk: float | None, monkeypatch: pytest.MonkeyPatch) -> Iteration:
    """One update from parameters whose tokens are not equally likely."""
    kl = {"place": "both" if algo == "ppo" else "loss", "coef": 0.1, "loss": "full"}
    session = open_session(
        tiny(algo=algo, seed=4, kl=kl, reward=VOWELS, sample={"max_importance": 2.0})
    )
    with monkeypatch.context() as patch:
        Tampered(session.source, patch, junk)
        return next(run(session, ready(session, sharp(session.agent))))


@pytest.mark.parametrize("junk", [math.nan, -1e30], ids=["NaN", "huge"])
@pytest.mark.parametrize("algo", ALGOS)
def test_what_tokens_of_weight_0_hold_changes_no_update(
    algo: str, junk: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding, tool text and a completion without a score: no parameter and no metric of it."""
    clean, spoilt = (updated(algo, x, monkeypatch) for x in (None, junk))
    ours, theirs = (x.session.source.last for x in (spoilt, clean))
    assert theirs.batch.weight[FAILED].sum() == 0
    assert (theirs.detail.completions.attention == 0).any()
    before, after = sharp(clean.session.agent), clean.state.opt_state.params
    assert not torch.equal(before, after)
    assert torch.equal(spoilt.state.opt_state.params, after)
    for a, b in zip(ours.detail.targets, theirs.detail.targets, strict=True):
        assert torch.equal(a, b)
    trained = [
        {k: x for k, x in iteration.metrics.items() if k.startswith("train/")}
        for iteration in (spoilt, clean)
    ]
    np.testing.assert_equal(*trained)
