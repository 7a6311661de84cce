"""What tokens learn from: gradients by enumeration, the mask law, and micro-batches that add up."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from token_toys import VOCABULARY, completions, moved, qwen
from torch import Tensor

from keel.algorithms.optimizer import Minibatch, initial_opt_state, make_step
from keel.errors import EstimatorWarning
from keel.experience.batch import Batch
from keel.functional import categorical_kl
from keel.losses.token import (
    REFERENCE,
    REFERENCE_HEAD,
    REFERENCE_HIDDEN,
    Covariance,
    TokenObjective,
    covariances,
)
from keel.networks.causal_lm import ATTENTION, RESPONSE_MASK, TOKENS, TokenAgent
from keel.types import HyperParams


def batch_of(agent: TokenAgent, found, advantage: Tensor | None = None, **more: Tensor) -> Batch:
    batch = found.batch(**more)
    if advantage is None:
        rng = torch.Generator().manual_seed(5)
        advantage = torch.randn(batch.weight.shape, generator=rng)
    zero = torch.zeros_like(batch.weight)
    return batch._replace(
        advantage=torch.where(batch.weight > 0, advantage, 0.0),
        target=zero,
        old_value=zero[..., None],
    )


def gradient_of(objective, agent: TokenAgent, params: Tensor, batch: Batch, **hparams: float):
    leaf = params.clone().requires_grad_()
    loss, statistics = objective(agent, leaf, batch, HyperParams(**hparams).tensor())
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.item(), gradient, statistics


# --- the KL to the reference, by enumeration of all tokens --------------------------------------


def every_token(agent: TokenAgent, params: Tensor, reference: Tensor) -> Batch:
    """One row for each token that may follow a prompt, weighted by its probability."""
    prompt = torch.tensor([[5, 6, 7]]).expand(VOCABULARY, -1)
    tokens = torch.cat([prompt, torch.arange(VOCABULARY)[:, None]], 1)
    obs = {TOKENS: tokens, ATTENTION: torch.ones_like(tokens).bool()}
    obs[RESPONSE_MASK] = torch.ones(VOCABULARY, 1)
    with torch.no_grad():
        old, ref = agent.policy(params, obs), agent.policy(reference, obs)
    log_prob = agent.dist.log_prob(old, tokens[:, 3:])
    obs[REFERENCE] = agent.dist.log_prob(ref, tokens[:, 3:])
    obs[REFERENCE_HIDDEN] = ref["hidden"]
    zero = torch.zeros(VOCABULARY, 1)
    return Batch(
        obs,
        behavior={},
        action=tokens[:, 3:],
        log_prob=log_prob,
        weight=log_prob.exp(),
        advantage=zero,
        target=zero,
        old_value=zero[..., None],
        constants={REFERENCE_HEAD: ref["head"]},
    )


def true_gradient(agent: TokenAgent, params: Tensor, reference: Tensor, batch: Batch) -> Tensor:
    leaf = params.clone().requires_grad_()
    rows = {key: x[:1] for key, x in batch.obs.items()}
    now, ref = agent.policy(leaf, rows), agent.policy(reference, rows)
    logits, others = (x["hidden"] @ x["head"].T for x in (now, ref))
    (gradient,) = torch.autograd.grad(categorical_kl(logits, others).sum(), leaf)
    return gradient


@pytest.mark.parametrize("form", ["k2", "weighted_k2", "ratio_k3", "straight_through", "full"])
@pytest.mark.filterwarnings("ignore::keel.errors.EstimatorWarning")  # k2, off-policy by its types
def test_the_right_forms_descend_the_kl_to_the_reference(form: str) -> None:
    agent = TokenAgent(qwen())
    reference = moved(agent.initial, 0.1)
    batch = every_token(agent, agent.initial, reference)
    expected = true_gradient(agent, agent.initial, reference, batch)
    objective = TokenObjective(kl=form, value_coef=0.0)
    _, gradient, _ = gradient_of(objective, agent, agent.initial, batch, kl_coef=1.0)
    assert expected.norm() > 0.1
    assert ((gradient - expected).norm() / expected.norm()).item() < 1e-3


@pytest.mark.filterwarnings("ignore::keel.errors.EstimatorWarning")
def test_k1_in_the_loss_has_no_gradient_and_k3_another() -> None:
    agent = TokenAgent(qwen())
    reference = moved(agent.initial, 0.1)
    batch = every_token(agent, agent.initial, reference)
    expected = true_gradient(agent, agent.initial, reference, batch)
    _, k1, _ = gradient_of(
        TokenObjective(kl="k1", value_coef=0.0), agent, agent.initial, batch, kl_coef=1.0
    )
    _, k3, _ = gradient_of(
        TokenObjective(kl="k3", value_coef=0.0), agent, agent.initial, batch, kl_coef=1.0
    )
    assert k1.norm() < 1e-3 * expected.norm()
    assert torch.cosine_similarity(k3, expected).item() < 0.99


@pytest.mark.parametrize("form", ["k1", "k3"])
def test_a_wrong_form_in_the_loss_warns(form: str) -> None:
    agent = TokenAgent(qwen())
    batch = every_token(agent, agent.initial, moved(agent.initial))
    with pytest.raises(EstimatorWarning, match="does not descend"):
        gradient_of(TokenObjective(kl=form), agent, agent.initial, batch, kl_coef=1.0)


def test_the_pull_goes_towards_the_reference() -> None:
    """A flipped sign would drive the policy away: verl commit a65c915, Logic-RL#58."""
    agent = TokenAgent(qwen())
    reference = moved(agent.initial, 0.1)
    batch = every_token(agent, agent.initial, reference)
    objective = TokenObjective(kl="full", value_coef=0.0)
    step = make_step(agent, objective, max_grad_norm=1.0)
    hparams = HyperParams(learning_rate=1e-3, kl_coef=1.0).tensor()
    state, index = initial_opt_state(agent.initial), torch.arange(VOCABULARY)

    def distance(params: Tensor) -> float:
        with torch.no_grad():
            now, ref = (agent.policy(x, batch.obs) for x in (params, reference))
            return agent.dist.kl(now, ref)[0].item()

    before = distance(state.params)
    for _ in range(10):
        active = torch.ones(1, dtype=torch.bool)
        state = step(
            state, Minibatch(batch, index, torch.ones(VOCABULARY), hparams, active)
        ).opt_state
    assert distance(state.params) < 0.8 * before


# --- the mask law, padding, micro-batches -------------------------------------------------------


REDUCTIONS = {
    "token-mean": {},
    "token-sum": {},
    "seq-mean-token-sum": {},
    "seq-mean-token-mean": {},
    "constant": {"constant": 8.0},
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("form", ["clip", "sequence", "cispo"])
def test_micro_batches_add_up_to_their_minibatch(reduction: str, form: str) -> None:
    agent = TokenAgent(qwen())
    found = completions(agent)
    batch = batch_of(agent, found)
    objective = TokenObjective(
        surrogate=form, reduction=reduction, value_coef=0.0, **REDUCTIONS[reduction]
    )
    params = moved(agent.initial, 0.02)
    index, real = torch.tensor([3, 0, 5, 1, 4, 2]), torch.ones(6)
    steps = [
        make_step(agent, objective, max_grad_norm=1e9, micro=micro, workers=workers)(
            initial_opt_state(params),
            Minibatch(batch, index, real, HyperParams().tensor(), torch.ones(1).bool()),
        )
        for micro, workers in ((None, 1), (1, 1), (4, 1), (None, 2), (1, 2))
    ]
    whole = steps[0]
    assert whole.gradient_norm.item() > 1e-3
    for other in steps[1:]:
        gap = (other.opt_state.first - whole.opt_state.first).norm() / whole.opt_state.first.norm()
        assert gap.item() < 1e-5
        for name in ("loss", "entropy", "clip_fraction", "log_ratio_max"):
            a, b = (getattr(x.statistics, name) for x in (whole, other))
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["clip", "sequence", "cispo"])
def test_what_does_not_count_may_hold_anything(form: str) -> None:
    """Tool text and padding: other log-probs, other advantages, even NaN, change nothing."""
    agent = TokenAgent(qwen())
    found = completions(agent)
    batch = batch_of(agent, found)
    weight = batch.weight.clone()
    weight[:, 1] = 0.0  # a token of tool text in every row
    batch = batch._replace(weight=weight)
    objective, params = TokenObjective(surrogate=form, value_coef=0.0), moved(agent.initial)
    expected = gradient_of(objective, agent, params, batch)
    hole = weight == 0
    spoilt = batch._replace(
        log_prob=torch.where(hole, torch.nan, batch.log_prob),
        advantage=torch.where(hole, 1e6, batch.advantage),
    ).take(torch.arange(6), torch.ones(6))
    loss, gradient, _ = gradient_of(objective, agent, params, spoilt)
    assert loss == pytest.approx(expected[0], rel=1e-5)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-4, atol=1e-6)


def test_more_padding_changes_nothing() -> None:
    agent = TokenAgent(qwen())
    found = completions(agent)
    batch, params = batch_of(agent, found), moved(agent.initial)
    objective = TokenObjective(value_coef=0.0)
    expected = gradient_of(objective, agent, params, batch)

    def wider(x: Tensor, left: int, right: int) -> Tensor:
        return torch.nn.functional.pad(x, (left, right))

    obs = {
        TOKENS: wider(found.tokens, 4, 3),
        ATTENTION: wider(found.attention, 4, 3),
        RESPONSE_MASK: wider(found.response_mask, 0, 3),
    }
    more = {
        name: wider(getattr(batch, name), 0, 3)
        for name in ("action", "log_prob", "advantage", "target", "weight")
    }
    old_value = torch.nn.functional.pad(batch.old_value, (0, 0, 0, 3))
    padded = batch._replace(obs=obs, old_value=old_value, **more)
    loss, gradient, _ = gradient_of(objective, agent, params, padded)
    assert loss == pytest.approx(expected[0], abs=1e-5)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-3, atol=1e-5)


def test_reductions_weigh_short_and_long_answers_as_they_say() -> None:
    """Two sequences, of 1 and of 3 tokens, with advantages of 1 and −1, on-policy: the loss is
    −Σ w·A by hand. Per-sequence means let each token of the short one weigh three times as much
    (the length bias of Dr.GRPO)."""
    agent = TokenAgent(qwen())
    found = completions(agent, group=1)
    weight = torch.zeros_like(found.response_mask)
    weight[0, 0] = 1.0
    weight[1, :3] = 1.0
    advantage = torch.tensor([1.0, -1.0, 0.0])[:, None].expand_as(weight)
    log_prob = agent.dist.log_prob(agent.policy(agent.initial, found.obs), found.action)
    batch = batch_of(agent, found, advantage)._replace(weight=weight, log_prob=log_prob.detach())
    batch = batch._replace(advantage=advantage)
    expected = {
        "token-mean": (-1.0 + 3.0) / 4.0,
        "token-sum": 2.0,
        "seq-mean-token-sum": 1.0,
        "seq-mean-token-mean": 0.0,
        "constant": 2.0 / (2 * 8.0),
    }
    for reduction, value in expected.items():
        objective = TokenObjective(reduction=reduction, value_coef=0.0, **REDUCTIONS[reduction])
        loss, _, _ = gradient_of(objective, agent, agent.initial, batch)
        assert loss == pytest.approx(value, abs=1e-5)


# --- covariance ---------------------------------------------------------------------------------


def test_covariances_by_hand() -> None:
    log_prob = torch.tensor([[-1.0, -3.0, 7.0]])
    advantage = torch.tensor([[2.0, 0.0, 9.0]])
    weight = torch.tensor([[1.0, 1.0, 0.0]])
    assert covariances(log_prob, advantage, weight).tolist() == [[1.0, 1.0, -torch.inf]]


@pytest.mark.parametrize("kind", ["clip", "kl"])
def test_tokens_that_drain_the_entropy_are_held(kind: str) -> None:
    agent = TokenAgent(qwen())
    found = completions(agent)
    batch, params = batch_of(agent, found), moved(agent.initial)
    plain = TokenObjective(value_coef=0.0)
    limit = Covariance(kind, share=0.1, low=0.0, high=100.0)
    held = dataclasses.replace(plain, covariance=limit)
    a, b = (gradient_of(x, agent, params, batch) for x in (plain, held))
    assert not torch.allclose(a[1], b[1])
    tokens = int((batch.weight > 0).sum())
    more = (b[2].clip_fraction - a[2].clip_fraction).item() * tokens
    assert round(more) == (max(1, int(0.1 * tokens)) if kind == "clip" else 0)
    assert (b[0] == pytest.approx(a[0])) == (kind == "clip")
