"""Mistakes that other libraries made with tokens, where no other test here would see them.

Most are made between the parts: each function is right, and is called with the wrong mask, unit,
sign or temperature. So these tests go through the objective or through a whole update.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_token_objective import batch_of, every_token, gradient_of, true_gradient
from test_token_runs import count_vowels, names_of, ready, sharp, tiny
from token_toys import completions, gpt2, moved, qwen
from torch import Tensor

from keel.apps.language import source as sources
from keel.apps.language.advantages import token_targets
from keel.apps.language.build import build_objective, open_session, open_source
from keel.apps.language.preflight import preflight
from keel.experience.batch import Batch
from keel.experience.completions import Completions
from keel.functional import aggregate
from keel.losses.token import IMPORTANCE, REFERENCE, TokenObjective
from keel.networks.causal_lm import TOKENS, TokenAgent
from keel.training.loop import Iteration, run
from keel.training.session import Session

VOWELS = {"functions": f"{count_vowels.__module__}:{count_vowels.__name__}"}
"""A reward that differs among completions, so that there is something to learn."""


def one_update(session: Session, *, away: float = 0.0) -> Iteration:
    """From parameters whose tokens are not equally likely; the reference lies `away` of them."""
    return next(run(session, ready(session, sharp(session.agent), away)))


def with_tool_text(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a tool had written the second token of every completion."""
    honest = session.source.complete

    def complete(*given: Any, **options: Any) -> Completions:
        found = honest(*given, **options)
        written = found.response_mask.clone()
        written[:, 1] = 0.0
        return found._replace(response_mask=written)

    monkeypatch.setattr(session.source, "complete", complete)


def holed(agent: TokenAgent) -> tuple[Batch, Tensor]:
    """A batch with a token of tool text in every row, and where nothing counts."""
    batch = batch_of(agent, completions(agent))
    weight = batch.weight.clone()
    weight[:, 1] = 0.0
    return batch._replace(weight=weight), weight == 0


# --- the KL: estimator, sign, unit, and who is asked ---------------------------------------------


@pytest.mark.parametrize("form", ["weighted_k2", "ratio_k3", "straight_through"])
def test_the_pull_is_right_after_the_policy_has_moved(form: str) -> None:
    """Later epochs see tokens of the policy before: without the ratio a form that is exact
    on-policy descends something else (arXiv 2506.09477). By enumeration of all tokens."""
    agent = TokenAgent(qwen())
    reference, now = moved(agent.initial, 0.1), moved(agent.initial, 0.03, seed=2)
    batch = every_token(agent, agent.initial, reference)
    expected = true_gradient(agent, now, reference, batch)
    objective = TokenObjective(kl=form, value_coef=0.0)
    _, gradient, _ = gradient_of(objective, agent, now, batch, kl_coef=1.0)
    assert expected.norm() > 0.1
    assert ((gradient - expected).norm() / expected.norm()).item() < 1e-3


def test_the_penalty_in_the_reward_is_beta_times_k1() -> None:
    """γ = 1: every token's return is the score − β Σ (log π − log π_ref) from there on. With k3
    it would be biased (arXiv 2512.21852), with the sign turned the KL is maximised (TinyZero)."""
    kl = {"place": "reward", "coef": 0.5}
    session = open_session(tiny(algo="reinforce_pp", kl=kl))
    one_update(session, away=0.1)
    seen = session.source.last.detail
    found = seen.completions
    policy = session.agent.policy(session.source.reference, found.obs)
    counts = found.response_mask > 0
    gap = found.log_prob - session.agent.dist.log_prob(policy, found.action)
    later = torch.where(counts, gap, 0.0).flip(1).cumsum(1).flip(1)
    expected = seen.score[:, None] - 0.5 * later
    torch.testing.assert_close(seen.targets.raw[counts], expected[counts], rtol=1e-4, atol=1e-4)
    assert gap[counts].abs().max() > 0.1


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_beta_is_turned_by_the_exact_kl_in_its_unit(unit: str) -> None:
    """With a target of KL / 1.1 the error is 0.1: β grows by 0.1·n/horizon = 0.1·8/16. A mean of
    k1, which may be negative, or the KL of the other unit, would not give that number."""
    kl = {"place": "loss", "loss": "full", "unit": unit, "horizon": 16.0}
    told = one_update(open_session(tiny(kl=kl)), away=0.1).metrics
    per_token, per_sequence = (told[f"kl/reference_{x}"] for x in ("token", "sequence"))
    assert per_sequence > 2.0 * per_token > 0.02
    target = told[f"kl/reference_{unit}"] / 1.1
    session = open_session(tiny(kl={**kl, "controller": "adaptive", "target": target}))
    beta = one_update(session, away=0.1).state.hparams.kl_coef
    assert beta == pytest.approx(0.01 * 1.05, rel=1e-4)


def test_nats_per_sequence_are_those_per_token_times_its_tokens() -> None:
    """Of the update itself and of the sampler; with top-p log q − log π is −log of the mass kept,
    so the sampler's KL is never negative."""
    update = one_update(open_session(tiny(sample={"top_p": 0.7}, reward=VOWELS)))
    told, found = update.metrics, update.session.source.last.detail.completions
    tokens = found.response_mask.sum().item() / len(found.response_mask)
    kept = (found.log_prob - found.sampler_log_prob)[found.response_mask > 0]
    assert told["kl/sampler_token"] == pytest.approx(-kept.mean().item(), rel=1e-4)
    for name in ("sampler", "old"):
        per_token = told[f"kl/{name}_token"]
        assert per_token > 0.0
        assert told[f"kl/{name}_sequence"] == pytest.approx(per_token * tokens, rel=1e-6)


# --- sampler and trainer --------------------------------------------------------------------------


def test_the_reference_is_asked_at_the_temperature_of_the_policy() -> None:
    """An equal reference is at no distance, at any temperature (trl PR#3029)."""
    kl = {"place": "both", "loss": "full"}
    update = one_update(open_session(tiny(algo="ppo", kl=kl, sample={"temperature": 0.5})))
    assert update.metrics["kl/reference_token"] < 1e-6
    seen = update.session.source.last.detail
    found = seen.completions
    gap = (found.log_prob - seen.reference.log_prob)[found.response_mask > 0]
    assert gap.abs().max() < 1e-4


def test_the_objective_sees_the_temperature_of_the_sampler() -> None:
    """Before the first step all ratios are 1. The gate asks the policy, not the objective, so it
    would not find a temperature that is missing here."""
    agent = TokenAgent(qwen())
    batch = batch_of(agent, completions(agent, temperature=0.5))
    objective = TokenObjective(value_coef=0.0)
    _, _, told = gradient_of(objective, agent, agent.initial, batch, temperature=0.5)
    assert told.log_ratio_max.item() < 1e-4


def test_dropout_of_a_model_is_off_where_it_samples_and_where_it_learns() -> None:
    """A model that is made comes in training mode: then the ratio is not 1 (trl#3500)."""
    agent = TokenAgent(gpt2(dropout=0.5).train())
    found = completions(agent)
    log_prob = agent.dist.log_prob(agent.policy(agent.initial, found.obs), found.action)
    written = found.response_mask > 0
    torch.testing.assert_close(log_prob[written], found.log_prob[written], rtol=0, atol=1e-5)


def test_what_top_p_left_out_is_given_back_by_the_importance() -> None:
    """π / q is the mass that was kept: top_p at least, 1 at most; turned round it is above 1."""
    sample = {"top_p": 0.7, "max_importance": 2.0}
    seen = one_update(open_session(tiny(sample=sample))).session.source.last
    importance, written = seen.batch.obs[IMPORTANCE], seen.detail.completions.response_mask > 0
    assert 0.7 - 1e-5 <= importance[written].min() < 0.95
    assert importance[written].max() <= 1.0 + 1e-5
    assert (importance[~written] == 1.0).all()


def test_importance_weighs_the_loss_of_its_tokens() -> None:
    """On-policy the loss is −Σ w·A / Σ 1: with A = 1 and w = ¼ everywhere that is −¼."""
    agent = TokenAgent(qwen())
    found = completions(agent)
    quarter = torch.full_like(found.response_mask, 0.25)
    batch = batch_of(agent, found, torch.ones_like(quarter), **{IMPORTANCE: quarter})
    loss, _, _ = gradient_of(TokenObjective(value_coef=0.0), agent, agent.initial, batch)
    assert loss == pytest.approx(-0.25, abs=1e-5)


def test_what_is_learned_from_are_the_tokens_that_were_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not those that their text would be encoded to, which may be others (verl#3720)."""
    session, drawn = open_session(tiny()), []
    honest = sources.complete

    def complete(*given: Any, **options: Any) -> Completions:
        drawn.append(honest(*given, **options))
        return drawn[-1]

    monkeypatch.setattr(sources, "complete", complete)
    next(run(session, ready(session)))
    source = session.source
    assert torch.equal(source.last.batch.obs[TOKENS], drawn[0].tokens)
    assert torch.equal(source.last.batch.action, drawn[0].action)
    assert torch.equal(source.last.batch.log_prob, drawn[0].log_prob)
    own = [
        [token for token, there in zip(*row, strict=True) if there and token != source.eos]
        for row in zip(drawn[0].action.tolist(), drawn[0].completion_mask.tolist(), strict=True)
    ]
    assert own != [source.encode(text) for text in source.last.detail.texts]  # so the test can fail


# --- masks, lengths, micro-batches ----------------------------------------------------------------


@pytest.mark.parametrize("masking", [True, False])
def test_tool_text_has_no_weight_in_an_update(
    masking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither it nor its neighbours: a mask that is off by one would learn from what a tool wrote
    (ms-swift PR#8427)."""
    session = open_session(tiny(algo="ppo", sample={"state_masking": masking}))
    with_tool_text(session, monkeypatch)
    seen = one_update(session).session.source.last
    found = seen.detail.completions
    expected = found.response_mask if masking else found.completion_mask
    assert torch.equal(seen.batch.weight, expected)
    assert bool((found.response_mask != found.completion_mask).any())
    assert not seen.batch.advantage[expected == 0].any()
    assert not seen.batch.target[expected == 0].any()


def test_the_kl_to_the_reference_is_that_of_tokens_that_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the policy thinks of tool text is no KL that it could spend."""
    session = open_session(tiny(kl={"place": "loss", "loss": "full"}))
    with_tool_text(session, monkeypatch)
    told, seen = one_update(session, away=0.1).metrics, session.source.last.detail
    counts = seen.completions.response_mask > 0
    own = seen.reference.kl[counts]
    assert told["kl/reference_token"] == pytest.approx(own.mean().item(), rel=1e-4)
    per_sequence = own.sum().item() / len(counts)
    assert told["kl/reference_sequence"] == pytest.approx(per_sequence, rel=1e-4)
    everything = seen.reference.kl[seen.completions.completion_mask > 0].mean().item()
    assert everything != pytest.approx(own.mean().item(), rel=1e-2)  # so the test can fail


def test_the_bound_is_on_tokens_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tool text and padding in the mean would dilute the KL that is certified."""
    session = open_session(tiny(reward=VOWELS))
    with_tool_text(session, monkeypatch)
    update = one_update(session)
    agent, found = session.agent, session.source.last.detail.completions
    old, new = (agent.policy(x, found.obs) for x in (sharp(agent), update.state.opt_state.params))
    kl = agent.dist.kl(old, new)[found.response_mask > 0].mean().item()
    assert kl > 1e-4
    assert update.metrics["train/kl_exact"] == pytest.approx(kl, rel=1e-2)


@pytest.mark.parametrize("algo", ["ppo", "reinforce_pp"])
def test_tool_text_does_not_discount(algo: str) -> None:
    """γ = ½, λ = 1, no values: of two tokens of the policy the first is worth ½ of the score,
    however many tokens a tool wrote between them."""
    config = tiny(algo=algo, advantage={"gamma": 0.5, "lam": 1.0})
    for between in (0, 1, 3):
        weight = torch.tensor([[1.0, *[0.0] * between, 1.0]])
        nothing = torch.zeros_like(weight)
        raw = token_targets(config, torch.tensor([1.0]), weight, nothing, nothing).raw
        assert raw[weight > 0].tolist() == [0.5, 1.0]


@pytest.mark.parametrize("clip", [None, 0.2])
def test_critic_and_entropy_learn_from_tokens_that_count(clip: float | None) -> None:
    """A critic that begins at 0, with a target of 2: ½·2² = 2, whatever stands in the holes, of
    which Search-R1's critic takes the mean as well."""
    agent = TokenAgent(qwen(), "head")
    batch, hole = holed(agent)
    batch = batch._replace(target=torch.full_like(batch.weight, 2.0))
    objective = TokenObjective(value_clip=clip)
    expected = gradient_of(objective, agent, agent.initial, batch, entropy_coef=0.1)
    spoilt = batch._replace(
        target=torch.where(hole, 1e6, batch.target),
        old_value=torch.where(hole[..., None], -1e6, batch.old_value),
    )
    loss, gradient, told = gradient_of(objective, agent, agent.initial, spoilt, entropy_coef=0.1)
    assert told.value_loss.item() == pytest.approx(2.0)
    entropy = agent.dist.entropy(agent.policy(agent.initial, batch.obs))
    assert told.entropy.item() == pytest.approx(entropy[~hole].mean().item(), rel=1e-5)
    assert loss == pytest.approx(expected[0], rel=1e-5)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["weighted_k2", "ratio_k3", "straight_through"])
@pytest.mark.parametrize("content", [-50.0, torch.inf, torch.nan])
def test_the_pull_does_not_see_what_does_not_count(form: str, content: float) -> None:
    """Neither in its value nor, by 0·NaN, in its gradient."""
    agent = TokenAgent(qwen())
    batch, hole = holed(agent)
    params, objective = moved(agent.initial), TokenObjective(kl=form, value_coef=0.0)
    results = []
    for fill in (0.0, content):
        obs = {**batch.obs, REFERENCE: torch.where(hole, fill, batch.log_prob - 0.3)}
        results.append(gradient_of(objective, agent, params, batch._replace(obs=obs), kl_coef=1.0))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-6)
    assert torch.equal(results[1][1], results[0][1])


@pytest.mark.parametrize("algo", ["ppo", "grpo", "rloo", "reinforce_pp", "remax", "dr_grpo"])
def test_tokens_of_long_and_short_answers_weigh_the_same(algo: str) -> None:
    """Unless somebody asks for another reduction: means per sequence would make tokens of long
    wrong answers cheap (Dr.GRPO, arXiv 2503.20783). Of answers with 1 and 3 tokens each has ¼;
    Dr.GRPO's share, 1 / (2 answers · 8 tokens at most), does not even depend on the others."""
    objective = build_objective(tiny(algo=algo), longest=8)
    loss = torch.zeros(2, 3, requires_grad=True)
    weight = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    total = aggregate(loss, weight, objective.reduction, constant=objective.constant)
    (share,) = torch.autograd.grad(total, loss)
    expected = 1 / 16 if algo == "dr_grpo" else 1 / 4
    assert torch.equal(share, expected * weight)


def test_preflight_names_means_per_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An objective that divides by its own tokens, and not by those of the minibatch."""
    source = open_source(tiny())
    honest = TokenObjective.__call__

    def alone(self, agent, params, batch, hparams, total=None):
        return honest(self, agent, params, batch, hparams, None)

    params = sharp(source.agent)
    assert names_of(preflight(source, params)) == set()
    monkeypatch.setattr(TokenObjective, "__call__", alone)
    assert names_of(preflight(source, params)) == {"micro-batch"}
