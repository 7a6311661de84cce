"""The terms of token objectives by hand: a model whose parameters are its logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.algorithms.optimizer import Minibatch, StepResult, initial_opt_state
from keel.algorithms.supervised import Likelihood, one_pass
from keel.distributions.vocabulary import HEAD, HIDDEN, Vocabulary
from keel.experience.batch import Batch
from keel.functional import categorical_kl
from keel.losses.ppo import Statistics
from keel.losses.token import (
    IMPORTANCE,
    REFERENCE,
    REFERENCE_HEAD,
    REFERENCE_HIDDEN,
    Covariance,
    TokenObjective,
    covariances,
)
from keel.networks.actor_critic import Scalar
from keel.networks.agent import Evaluation
from keel.types import HyperParams, OptimizerState

TOKENS = 4
"""of the vocabulary"""
UNSURE = math.log(1 / TOKENS)
"""the log-prob of a token where all logits are equal"""
VALUE = "value"


class Logits:
    """Parameters `[1, R·L·V]` are logits; the critic says what the rows have it say."""

    dist = Vocabulary(TOKENS, TOKENS)
    critic = Scalar()

    def policy(self, params: Tensor, obs: dict[str, Tensor], heat: Any = 1.0) -> dict[str, Tensor]:
        logits = params.reshape(*obs[VALUE].shape, TOKENS)
        return {HIDDEN: logits / heat, HEAD: torch.eye(TOKENS)}

    def evaluate(self, params: Tensor, obs: dict[str, Tensor], heat: Any) -> Evaluation:
        return Evaluation(self.policy(params, obs, heat), obs[VALUE][..., None])


AGENT: Any = Logits()


def batch_of(log_prob: Tensor, advantage: Tensor, weight: Tensor | None = None) -> Batch:
    """Token 0 everywhere; values of 3 and targets of 1."""
    one = torch.ones_like(log_prob)
    weight = one if weight is None else weight
    obs = {VALUE: 3.0 * one}
    return Batch(
        obs,
        behavior={},
        action=0 * one.long(),
        log_prob=log_prob,
        weight=weight,
        advantage=advantage,
        target=one,
        old_value=one[..., None],
    )


def evaluated(
    objective: Any, batch: Batch, logits: Tensor | None = None, **hparams: float
) -> tuple[float, Tensor, Statistics]:
    """Loss, gradient in the logits `[R, L, V]`, and statistics; without logits all are 0."""
    shape = (*batch.weight.shape, TOKENS)
    leaf = (torch.zeros(shape) if logits is None else logits).reshape(1, -1).requires_grad_()
    loss, statistics = objective(AGENT, leaf, batch, HyperParams(**hparams).tensor())
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.item(), gradient.reshape(shape), statistics


def with_ratios(*ratios: float, advantage: tuple[float, ...]) -> Batch:
    """One sequence whose tokens have these ratios."""
    log_prob = UNSURE - torch.tensor([ratios]).log()
    return batch_of(log_prob, torch.tensor([advantage]))


@pytest.mark.parametrize(
    ("form", "loss"),
    [
        ("clip", (-1.2 + 1.6) / 2),  # −min(2, 1.2) and −min(½·−2, 0.8·−2)
        ("unclipped", (-2.0 + 1.0) / 2),
        ("sequence", (-1.0 + 2.0) / 2),  # √(2·½) = 1 for both
        ("cispo", (-1.2 * UNSURE + 1.6 * UNSURE) / 2),  # −clip(r)·A·log π
    ],
)
def test_forms_of_the_surrogate(form: Any, loss: float) -> None:
    """Ratios of 2 and ½ with advantages of 1 and −2, clipped to 0.8 and 1.2."""
    batch = with_ratios(2.0, 0.5, advantage=(1.0, -2.0))
    measured, _, _ = evaluated(TokenObjective(surrogate=form, value_coef=0.0), batch)
    assert measured == pytest.approx(loss, abs=1e-6)


def test_the_second_clip_bounds_a_bad_token_that_became_likelier() -> None:
    """A ratio of 5 with an advantage of −2 costs 10, and at most 3·2."""
    batch = with_ratios(5.0, advantage=(-2.0,))
    plain, _, _ = evaluated(TokenObjective(value_coef=0.0), batch)
    bounded, gradient, _ = evaluated(TokenObjective(value_coef=0.0, dual_clip=3.0), batch)
    assert (plain, bounded) == (pytest.approx(10.0, rel=1e-5), pytest.approx(6.0))
    assert not gradient.any()


def test_the_loss_is_the_sum_of_its_terms() -> None:
    """On-policy with no advantage: 0.5·½(3 − 1)² − 0.1·log 4 + 0.3·KL(π‖reference)."""
    logits = torch.tensor([[[1.0, 0.0, -1.0, 2.0]]])
    reference = torch.tensor([[[0.0, 0.5, 0.0, -0.5]]])
    objective = TokenObjective(kl="full")
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum().item()
    kl = categorical_kl(logits, reference).item()
    batch = batch_of(log_p[..., 0], torch.zeros(1, 1))
    batch = batch._replace(
        obs=batch.obs | {REFERENCE_HIDDEN: reference},
        constants={REFERENCE_HEAD: torch.eye(TOKENS)},
    )
    loss, gradient, told = evaluated(objective, batch, logits, entropy_coef=0.1, kl_coef=0.3)
    assert loss == pytest.approx(0.5 * 2.0 - 0.1 * entropy + 0.3 * kl, rel=1e-5)
    assert told.value_loss.item() == pytest.approx(2.0)
    assert told.entropy.item() == pytest.approx(entropy, rel=1e-5)
    p, gap = log_p.exp(), log_p - reference.log_softmax(-1)
    slope = 0.1 * p * (log_p + entropy) + 0.3 * p * (gap - kl)  # −0.1·∂H/∂z + 0.3·∂KL/∂z
    torch.testing.assert_close(gradient, slope, rtol=1e-4, atol=1e-6)


def test_weights_of_tokens_that_another_distribution_drew() -> None:
    """2·(−1) and 0·(−1), over two tokens."""
    batch = with_ratios(1.0, 1.0, advantage=(1.0, 1.0))
    batch = batch._replace(obs=batch.obs | {IMPORTANCE: torch.tensor([[2.0, 0.0]])})
    loss, gradient, _ = evaluated(TokenObjective(value_coef=0.0), batch)
    assert loss == pytest.approx(-1.0)
    assert gradient[0, 0].any()
    assert not gradient[0, 1].any()


@pytest.mark.filterwarnings("ignore::keel.errors.EstimatorWarning")
def test_a_reference_of_tokens_that_do_not_count_may_hold_anything() -> None:
    """k2 of the only token that counts: ½(log ¼ − log ½)² = ½(log 2)²."""
    weight = torch.tensor([[1.0, 0.0]])
    batch = batch_of(torch.full((1, 2), UNSURE), torch.zeros(1, 2), weight)
    reference = torch.tensor([[math.log(0.5), torch.nan]])
    batch = batch._replace(obs=batch.obs | {REFERENCE: reference})
    loss, gradient, _ = evaluated(TokenObjective(kl="k2", value_coef=0.0), batch, kl_coef=1.0)
    assert loss == pytest.approx(0.5 * math.log(2.0) ** 2)
    assert gradient.isfinite().all()
    assert not gradient[0, 1].any()


def test_the_kl_to_the_policy_that_sampled_is_tracked_and_not_learned() -> None:
    old = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])
    batch = batch_of(old.log_softmax(-1)[..., 0], torch.zeros(1, 1))
    batch = batch._replace(behavior={HIDDEN: old}, constants={HEAD: torch.eye(TOKENS)})
    loss, gradient, told = evaluated(TokenObjective(track_kl=True, value_coef=0.0), batch)
    assert told.kl.item() == pytest.approx(categorical_kl(old, 0.0 * old).item(), rel=1e-5)
    assert loss == 0.0
    assert not gradient.any()
    assert evaluated(TokenObjective(value_coef=0.0), batch)[2].kl.item() == 0.0


# --- covariance -----------------------------------------------------------------------------------


def test_covariances_are_products() -> None:
    """Log-probs ±1 and advantages ±2 around their means; the third token does not count."""
    log_prob = torch.tensor([[-1.0, -3.0, 7.0]])
    advantage = torch.tensor([[4.0, 0.0, 9.0]])
    weight = torch.tensor([[1.0, 1.0, 0.0]])
    assert covariances(log_prob, advantage, weight).tolist() == [[2.0, 2.0, -torch.inf]]


def test_the_limits_are_those_of_the_authors() -> None:
    """arXiv 2505.22617, their recipe in verl: a share of 0.0002, covariances of 1 to 5, and 1."""
    assert Covariance("clip") == ("clip", 2e-4, 1.0, 5.0, 1.0)


def together(*products: float) -> tuple[Batch, Tensor]:
    """Pairs of tokens with a log-prob of ±1 around their mean and advantages that make these
    covariances; their logits, and ratios of e⁰·¹."""
    signs = torch.tensor([1.0, -1.0]).repeat(len(products))
    log_prob = -2.0 + signs
    advantage = signs * torch.tensor(products).repeat_interleave(2)
    rest = torch.log((1.0 - log_prob.exp()) / (TOKENS - 1))[:, None].expand(-1, TOKENS - 1)
    logits = torch.cat([log_prob[:, None], rest], 1)[None]
    return batch_of(log_prob[None] - 0.1, advantage[None]), logits


def test_the_token_with_the_largest_covariance_inside_loses_its_gradient() -> None:
    """Of 0.5, 4 and 6 that is 4, twice; a share of ⅓ of six tokens is two."""
    batch, logits = together(0.5, 4.0, 6.0)
    limit = Covariance("clip", share=0.34)
    objective = TokenObjective(value_coef=0.0, covariance=limit)
    loss, gradient, told = evaluated(objective, batch, logits)
    plain, _, _ = evaluated(TokenObjective(value_coef=0.0), batch, logits)
    assert gradient.any(-1).tolist() == [[True, True, False, False, True, True]]
    assert loss == pytest.approx(plain)
    assert told.clip_fraction.item() == pytest.approx(2 / 6)


@pytest.mark.parametrize("end", ["low", "high"])
def test_both_ends_of_the_range_belong_to_it(end: str) -> None:
    """The only token inside has a covariance of exactly that end."""
    batch, logits = together(4.0)
    log_prob, _ = AGENT.dist.both(AGENT.policy(logits, batch.obs), batch.action)
    together_now = covariances(log_prob, batch.advantage, batch.weight)
    largest, smallest = together_now.max().item(), together_now.min().item()
    ends = {"low": (largest, 9.0), "high": (0.0, smallest)}[end]
    objective = TokenObjective(value_coef=0.0, covariance=Covariance("clip", 0.01, *ends))
    _, gradient, _ = evaluated(objective, batch, logits)
    assert gradient.any(-1).sum() == 1


def test_the_tokens_with_the_largest_covariance_are_held_by_their_log_ratio() -> None:
    """2·|0.1| on the two of 6, over six tokens."""
    batch, logits = together(0.5, 4.0, 6.0)
    limit = Covariance("kl", share=0.34, coef=2.0)
    objective = TokenObjective(value_coef=0.0, covariance=limit)
    loss, _, _ = evaluated(objective, batch, logits)
    plain, _, _ = evaluated(TokenObjective(value_coef=0.0), batch, logits)
    assert loss - plain == pytest.approx(2 * 2.0 * 0.1 / 6, rel=1e-4)


@pytest.mark.parametrize("kind", ["clip", "kl"])
def test_where_no_token_counts_nothing_is_held(kind: Any) -> None:
    batch, logits = together(4.0)
    batch = batch._replace(weight=torch.zeros_like(batch.weight))
    objective = TokenObjective(value_coef=0.0, covariance=Covariance(kind))
    loss, gradient, _ = evaluated(objective, batch, logits)
    assert loss == 0.0
    assert not gradient.any()


# --- supervised -----------------------------------------------------------------------------------


def test_the_likelihood_of_tokens() -> None:
    """−log π of token 0, the mean over the two of three that count; its gradient in the logits is
    (π − 1 at token 0)/2."""
    logits = torch.tensor([[[2.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [9.0, 1.0, 0.0, 0.0]]])
    weight = torch.tensor([[1.0, 1.0, 0.0]])
    log_p = logits.log_softmax(-1)
    batch = batch_of(torch.zeros(1, 3), torch.zeros(1, 3), weight)
    loss, gradient, told = evaluated(Likelihood(), batch, logits)
    assert loss == pytest.approx(-(log_p[0, 0, 0] + UNSURE).item() / 2)
    entropies = -(log_p.exp() * log_p).sum(-1)[0]
    assert told.entropy.item() == pytest.approx((entropies[0] + entropies[1]).item() / 2)
    assert told.loss.item() == told.bc_loss.item() == pytest.approx(loss)
    first = torch.nn.functional.one_hot(torch.tensor(0), TOKENS)
    expected = 0.5 * weight[..., None] * (log_p.exp() - first)
    torch.testing.assert_close(gradient, expected)


def test_a_part_of_a_minibatch_is_divided_by_the_whole() -> None:
    """Two tokens of eight: 2·log 4 / 8."""
    batch = batch_of(torch.zeros(1, 2), torch.zeros(1, 2))
    loss, _ = Likelihood()(
        AGENT, torch.zeros(1, 2 * TOKENS), batch, HyperParams().tensor(), total=torch.tensor(8.0)
    )
    assert loss.shape == (1,)
    assert loss.item() == pytest.approx(-2 * UNSURE / 8)


def test_one_pass_takes_every_sequence_once() -> None:
    """Five in minibatches of two: three steps, whose losses of 3, 4 and 8 are 5 in the mean."""
    rows = Batch({}, {}, torch.zeros(5, 1), torch.zeros(5, 1), torch.ones(5, 1))
    losses, seen = iter((3.0, 4.0, 8.0)), []

    def step(opt_state: OptimizerState, minibatch: Minibatch) -> StepResult:
        assert minibatch.active.tolist() == [True]
        assert minibatch.rows.weight is rows.weight
        seen.extend(minibatch.chosen[minibatch.real > 0].tolist())
        loss = torch.tensor([next(losses)])
        statistics = Statistics(loss, *[torch.zeros(1)] * 8)
        return StepResult(
            opt_state._replace(params=opt_state.params + 1.0), statistics, loss, minibatch.active
        )

    start = initial_opt_state(torch.zeros(1, 3))
    rng = torch.Generator().manual_seed(0)
    after, mean = one_pass(start, rows, 2, HyperParams(), rng, step)
    assert after.params.tolist() == [[3.0, 3.0, 3.0]]
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert mean == pytest.approx(5.0)
