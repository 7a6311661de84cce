"""Samples of the return, which a distributional critic is fitted to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from keel.config import Advantage, Critic, Network
from keel.experience.rollout import Rollout
from keel.experience.targets import compute_targets
from keel.functional import gae
from keel.networks import popart
from keel.networks.agent import Agent
from keel.networks.build import build_agent
from keel.networks.critics import Histogram, Quantile, calibration

T, N = 12, 3
DRAWS = 500
"""From which means are taken; the margin is in their standard errors."""
kinds = pytest.mark.parametrize("kind", ["quantile", "hl_gauss"])


def setting(kind: Any) -> tuple[Agent, Rollout]:
    """Some episodes end, some are cut off, some rows do not count."""
    generator = torch.Generator().manual_seed(0)
    box = spaces.Box(-1.0, 1.0, (4,))
    agent = build_agent(box, spaces.Discrete(2), Network(hidden=(16,)), 0, Critic(kind=kind))
    # units of its own, so that forgetting to translate would show
    moments = torch.tensor([3.0]), torch.tensor([4.0])
    agent.initial = popart.rescale_critic(agent, agent.initial, *moments)
    ended = torch.rand(T, N, generator=generator) < 0.15
    cut = (torch.rand(T, N, generator=generator) < 0.15) & ~ended
    weight = torch.ones(T, N)
    weight[4, 1] = 0.0
    ended[4, 1] = cut[4, 1] = False
    zero = torch.zeros(T, N)
    rollout = Rollout(
        obs={"obs": torch.randn(T, N, 4, generator=generator)},
        action=zero.long(),
        log_prob=zero,
        behavior={"logits": torch.zeros(T, N, 2)},
        reward=torch.randn(T, N, generator=generator),
        terminated=ended,
        truncated=cut,
        weight=weight,
        last_obs={"obs": torch.randn(N, 4, generator=generator)},
    )
    return agent, rollout


def targets(agent: Agent, rollout: Rollout, lam: float, rng: torch.Generator | None) -> Tensor:
    config = Advantage(gamma=0.9, lam=lam, normalize="none")
    learned, _ = compute_targets(agent, agent.initial, rollout, config, rng=rng)
    return learned.target.reshape(T, N)


@kinds
@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
def test_their_mean_is_the_lambda_return(kind: str, lam: float):
    """Over draws of horizon and quantile. The mean of a histogram's 32 quantiles is not quite its
    own mean, hence the wider margin."""
    agent, rollout = setting(kind)
    rng = torch.Generator().manual_seed(1)
    drawn = torch.stack([targets(agent, rollout, lam, rng) for _ in range(DRAWS)]).double()
    expected = targets(agent, rollout, lam, None).double()
    error = drawn.std(0) / DRAWS**0.5
    margin = 4.5 * error + (1e-4 if kind == "quantile" else 0.02)
    assert ((drawn.mean(0) - expected).abs() <= margin).all()


def test_their_spread_is_that_of_the_distribution_one_step_on():
    """λ = 0: reward + γ·Z(next): the standard deviation is γ times that of the quantiles."""
    agent, rollout = setting("quantile")
    rng = torch.Generator().manual_seed(1)
    drawn = torch.stack([targets(agent, rollout, 0.0, rng) for _ in range(1500)])
    raw = agent.raw_value(agent.initial, rollout.obs)
    spread = popart.in_reward(agent.initial, raw).std(-1, correction=0)
    goes_on = ~rollout.terminated[:-1] & (rollout.weight[1:] > 0) & (rollout.weight[:-1] > 0)
    found = drawn.std(0)[:-1][goes_on]
    assert torch.allclose(found, 0.9 * spread[1:][goes_on], rtol=0.09)
    over = rollout.terminated & (rollout.weight > 0)
    assert torch.allclose(drawn.std(0)[over], torch.zeros(int(over.sum())), atol=1e-5)


@kinds
def test_without_bootstrapping_they_are_what_was_earned(kind: str):
    """λ = 1 and every episode ends: nothing is left to draw."""
    agent, rollout = setting(kind)
    over = rollout.terminated.clone()
    over[-1] = True
    rollout = Rollout(**{**vars(rollout), "terminated": over, "truncated": torch.zeros_like(over)})
    first, second = (
        targets(agent, rollout, 1.0, torch.Generator().manual_seed(seed)) for seed in (1, 2)
    )
    assert torch.allclose(first, second, atol=1e-5)
    assert torch.allclose(first, targets(agent, rollout, 1.0, None), atol=1e-5)


def test_a_lambda_for_every_row_is_gae():
    generator = torch.Generator().manual_seed(0)
    reward, value = torch.randn(2, T, N, generator=generator, dtype=torch.float64)
    last = torch.randn(N, generator=generator, dtype=torch.float64)
    never = torch.zeros(T, N, dtype=torch.bool)
    one = gae(reward, value, last, never, lam=0.7)
    many = gae(reward, value, last, never, lam=torch.full((T, N), 0.7, dtype=torch.float64))
    assert torch.equal(one.target, many.target)


@kinds
def test_calibration_is_measured_on_what_is_learned(kind: str):
    agent, rollout = setting(kind)
    assert isinstance(agent.critic, Quantile | Histogram)
    config = Advantage(gamma=0.9, lam=0.6)
    rng = torch.Generator().manual_seed(0)
    rollout.weight[5:] = 0.0
    learned, statistics = compute_targets(agent, agent.initial, rollout, config, rng=rng)
    assert 0.0 <= statistics["train/coverage_80"] <= 1.0
    assert 0.0 <= statistics["train/calibration_error"] <= 0.5
    counted = rollout.weight.reshape(-1) > 0
    aim = agent.target_of(agent.initial, learned.target)
    own = calibration(agent.critic, learned.raw[counted], aim[counted])
    assert {key: statistics[key] for key in own} == own


@kinds
def test_a_truncated_row_is_bootstrapped_from_its_own_final_observation(kind: str):
    """With λ = 0 its target is r + γ V(final), whatever the next row holds."""
    agent, rollout = setting(kind)
    t, n = map(int, rollout.truncated.nonzero()[0])
    obs = {"obs": torch.full((1, 4), 0.5)}
    rollout = replace(rollout, final_obs=obs, final_index=torch.tensor([t * N + n]))
    value = agent.value_of(agent.initial, agent.raw_value(agent.initial, obs))
    expected = rollout.reward[t, n] + 0.9 * value[0]
    assert targets(agent, rollout, 0.0, None)[t, n].item() == pytest.approx(expected.item())
