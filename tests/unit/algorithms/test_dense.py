"""The step by hand against the step by autograd: the same parameters, moments and statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.algorithms import dense
from keel.algorithms.optimizer import Minibatch, initial_opt_state, make_step
from keel.config import Critic, Network
from keel.experience.batch import Batch, DemoBatch
from keel.losses.ppo import Objective
from keel.networks.accelerate import step_obstacle
from keel.networks.agent import Agent
from keel.networks.build import build_agent
from keel.types import HyperParams, OptimizerState

ROWS, MINIBATCH = 24, 16
OBSERVATION = spaces.Box(-1.0, 1.0, (5,))
SPACES: dict[str, gymnasium.Space[Any]] = {
    "discrete": spaces.Discrete(3),
    "box": spaces.Box(-1.0, 1.0, (2,)),
}


def agent_for(action: str, critic: Critic | None = None, **network: Any) -> Agent:
    return build_agent(OBSERVATION, SPACES[action], Network(hidden=(8, 7), **network), 0, critic)


def batch_for(agent: Agent, seed: int, *, shift: float = 0.3) -> Batch:
    """A rollout of a policy near the agent's own: some ratios are clipped, some are not."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    obs = {"obs": noise(ROWS, 5)}
    before = agent.initial + shift * noise(*agent.initial.shape)
    with torch.no_grad():
        behavior = agent.policy(before, obs)
    if "logits" in behavior:
        action = torch.randint(3, (ROWS,), generator=generator)
    else:
        action = behavior["mean"] + noise(ROWS, 2)
    return Batch(
        obs=obs,
        behavior=behavior,
        action=action,
        log_prob=agent.dist.log_prob(behavior, action),
        advantage=noise(ROWS),
        target=noise(ROWS),
        old_value=noise(ROWS, agent.critic.outputs),
        weight=torch.ones(ROWS),
    )


def whole(batch: Batch) -> Minibatch:
    """All rows, with the defaults of the hyperparameters, of one agent that may move."""
    active = torch.ones(1, dtype=torch.bool)
    return Minibatch(batch, torch.arange(ROWS), torch.ones(ROWS), HyperParams().tensor(), active)


def both(
    agent: Agent,
    objective: Objective,
    batch: Batch,
    hparams: HyperParams,
    opt_state: OptimizerState | None = None,
) -> None:
    """Take three steps with each, and compare everything."""
    assert step_obstacle(agent, objective) == ""
    by_hand = dense.make_dense_step(agent, objective, max_grad_norm=0.5)
    by_autograd = make_step(agent, objective, max_grad_norm=0.5)
    index = torch.arange(MINIBATCH) + 4
    real = torch.ones(MINIBATCH)
    real[-3:] = 0.0
    active = torch.ones(1, dtype=torch.bool)
    ours = theirs = initial_opt_state(agent.initial) if opt_state is None else opt_state
    for _ in range(3):
        a = by_hand(ours, Minibatch(batch, index, real, hparams.tensor(), active))
        b = by_autograd(theirs, Minibatch(batch, index, real, hparams.tensor(), active))
        torch.testing.assert_close(a.statistics, b.statistics, rtol=1e-4, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(a.gradient_norm, b.gradient_norm, rtol=1e-4, atol=1e-7)
        # Adam divides by the gradient's size: where that is near 0, so is the agreement
        torch.testing.assert_close(a.opt_state, b.opt_state, rtol=1e-3, atol=2e-5)
        assert torch.equal(a.applied, b.applied)
        ours, theirs = a.opt_state, b.opt_state


CRITICS = {
    "scalar": Critic(),
    "quantile": Critic(kind="quantile", quantiles=6, kappa=0.7),
    "plain quantile": Critic(kind="quantile", quantiles=6, kappa=0.0, normalize="off"),
    "ordered": Critic(kind="quantile", quantiles=6, ordered=True),
    "two_hot": Critic(kind="two_hot", atoms=9, reach=2.0),
    "hl_gauss": Critic(kind="hl_gauss", atoms=31, reach=2.0),
}


@settings(max_examples=100, deadline=None)
@given(
    critic=st.sampled_from(list(CRITICS)),
    action=st.sampled_from(["discrete", "box"]),
    activation=st.sampled_from(["tanh", "relu"]),
    entropy=st.sampled_from([0.0, 0.02]),
    track_kl=st.booleans(),
    kl_measure=st.sampled_from(["exact", "k1", "k3"]),
    temperature=st.sampled_from([1.0, 2.0]),
    value_coef=st.sampled_from([0.5, 1.0]),
    seed=st.integers(0, 10_000),
)
def test_equals_autograd(
    critic: str,
    action: str,
    activation: Any,
    entropy: float,
    track_kl: bool,
    kl_measure: Any,
    temperature: float,
    value_coef: float,
    seed: int,
) -> None:
    agent = agent_for(action, CRITICS[critic], activation=activation)
    objective = Objective(
        entropy_bonus=entropy > 0,
        track_kl=track_kl,
        kl_measure=kl_measure,
        value_coef=value_coef,
        max_log_ratio=1.0,
    )
    hparams = HyperParams(
        learning_rate=1e-3,
        clip_low=0.1,
        clip_high=0.3,
        entropy_coef=entropy,
        temperature=temperature,
    )
    both(agent, objective, batch_for(agent, seed), hparams)


def demos_for(agent: Agent, seed: int) -> DemoBatch:
    generator = torch.Generator().manual_seed(seed)
    discrete = "logits" in agent.policy(agent.initial, {"obs": torch.zeros(1, 5)})
    weight = torch.rand(ROWS, generator=generator) * (torch.arange(ROWS) % 4 > 0)
    return DemoBatch(
        {"obs": torch.randn(ROWS, 5, generator=generator)},
        torch.randint(3, (ROWS,), generator=generator)
        if discrete
        else torch.randn(ROWS, 2, generator=generator),
        weight,
        torch.ones(ROWS),
    )


@settings(max_examples=40, deadline=None)
@given(
    action=st.sampled_from(["discrete", "box"]),
    activation=st.sampled_from(["tanh", "relu"]),
    temperature=st.sampled_from([1.0, 2.0]),
    coef=st.sampled_from([0.0, 0.3, 5.0]),
    seed=st.integers(0, 10_000),
)
def test_equals_autograd_with_demonstrations(
    action: str, activation: Any, temperature: float, coef: float, seed: int
) -> None:
    agent = agent_for(action, activation=activation)
    batch = batch_for(agent, seed)._replace(demos=demos_for(agent, seed + 1))
    hparams = HyperParams(
        learning_rate=1e-3, temperature=temperature, bc_coef=coef, entropy_coef=0.01
    )
    both(agent, Objective(), batch, hparams)


def test_demonstrations_under_a_mask_equal_autograd() -> None:
    agent = agent_for("discrete")
    demos = demos_for(agent, 3)
    mask = torch.ones(ROWS, 3, dtype=torch.bool)
    mask[torch.arange(ROWS), (demos.action + 1) % 3] = False
    batch = batch_for(agent, 2)
    every = torch.ones(ROWS, 3, dtype=torch.bool)
    batch = batch._replace(
        obs=batch.obs | {"action_mask": every},
        demos=demos._replace(obs=demos.obs | {"action_mask": mask}),
    )
    both(agent, Objective(), batch, HyperParams(learning_rate=1e-3, bc_coef=1.0))


@pytest.mark.parametrize("action", ["discrete", "box"])
def test_rows_without_weight_may_hold_anything(action: str) -> None:
    agent = agent_for(action)
    batch = batch_for(agent, 1)
    hole = torch.arange(ROWS) % 3 == 0
    nan = torch.full((ROWS,), torch.nan)
    batch = batch._replace(
        weight=(~hole).float(),
        advantage=torch.where(hole, nan, batch.advantage),
        target=torch.where(hole, nan, batch.target),
    )
    both(agent, Objective(), batch, HyperParams())


def test_a_log_ratio_that_is_not_finite_is_quarantined() -> None:
    agent = agent_for("discrete")
    batch = batch_for(agent, 2)
    log_prob = batch.log_prob.clone()
    log_prob[6], log_prob[7] = torch.nan, -torch.inf
    batch = batch._replace(log_prob=log_prob)
    both(agent, Objective(), batch, HyperParams())
    step = dense.make_dense_step(agent, Objective(), max_grad_norm=0.5)
    result = step(initial_opt_state(agent.initial), whole(batch))
    assert result.statistics.non_finite.item() == 2.0
    assert result.applied.item()


def test_a_gradient_that_is_not_finite_is_never_applied() -> None:
    agent = agent_for("discrete")
    batch = batch_for(agent, 3)
    target = batch.target.clone()
    target[9] = torch.inf
    before = initial_opt_state(agent.initial)
    step = dense.make_dense_step(agent, Objective(), max_grad_norm=0.5)
    result = step(before, whole(batch._replace(target=target)))
    assert not result.applied.item()
    assert all(torch.equal(a, b) for a, b in zip(before, result.opt_state, strict=True))


def test_the_optimum_it_was_given_stays_as_it_is() -> None:
    agent = agent_for("box")
    before = initial_opt_state(agent.initial.clone())
    copies = [x.clone() for x in before]
    step = dense.make_dense_step(agent, Objective(), max_grad_norm=0.5)
    result = step(before, whole(batch_for(agent, 4)))
    assert all(torch.equal(a, b) for a, b in zip(before, copies, strict=True))
    assert not torch.equal(result.opt_state.params, before.params)


def test_a_policy_younger_than_its_critic() -> None:
    """After a rejected step the policy's age in Adam is behind."""
    agent = agent_for("discrete")
    opt_state = initial_opt_state(agent.initial)
    opt_state = opt_state._replace(
        steps=torch.tensor([[2.0, 7.0]]),
        first=opt_state.first + 0.01,
        second=opt_state.second + 0.02,
    )
    both(agent, Objective(), batch_for(agent, 5), HyperParams(), opt_state)


def test_a_critic_with_a_learning_rate_of_its_own() -> None:
    agent = agent_for("box")
    both(agent, Objective(), batch_for(agent, 5), HyperParams(critic_factor=3.0))


def test_minibatches_of_several_sizes() -> None:
    """A step keeps its room to work in; a minibatch that needs more or less gets its own."""
    agent = agent_for("discrete")
    batch = batch_for(agent, 8)
    by_hand = dense.make_dense_step(agent, Objective(), max_grad_norm=0.5)
    by_autograd = make_step(agent, Objective(), max_grad_norm=0.5)
    active, hparams = torch.ones(1, dtype=torch.bool), HyperParams().tensor()
    opt_state = initial_opt_state(agent.initial)
    for size in (4, ROWS, 4, 9):
        index, real = torch.arange(size), torch.ones(size)
        a = by_hand(opt_state, Minibatch(batch, index, real, hparams, active))
        b = by_autograd(opt_state, Minibatch(batch, index, real, hparams, active))
        torch.testing.assert_close(a.gradient_norm, b.gradient_norm, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(a.opt_state, b.opt_state, rtol=1e-3, atol=2e-5)


def test_without_an_entropy_bonus() -> None:
    """Neither loss nor gradient has one, whatever the coefficient."""
    agent = agent_for("discrete")
    batch = batch_for(agent, 9)
    both(agent, Objective(entropy_bonus=False), batch, HyperParams(entropy_coef=0.02))


def test_a_log_std_at_its_bound_has_no_gradient() -> None:
    agent = agent_for("box", log_std=3.0)  # the bound is 2
    batch = batch_for(agent, 6, shift=0.0)
    both(agent, Objective(entropy_bonus=True), batch, replace(HyperParams(), entropy_coef=0.01))


@pytest.mark.parametrize(
    ("objective", "reason"),
    [
        (Objective(surrogate="unclipped"), "the surrogate is unclipped"),
        (Objective(penalize=True), "the loss has a KL penalty"),
        (Objective(dual_clip=3.0), "region.dual_clip is set"),
        (Objective(value_clip=0.2), "region.value_clip is set"),
        (Objective(entropy_floor=0.5), "explore.entropy_floor is set"),
    ],
)
def test_other_objectives_are_left_to_autograd(objective: Objective, reason: str) -> None:
    assert step_obstacle(agent_for("discrete"), objective) == reason


def test_other_networks_are_left_to_autograd() -> None:
    reason = "a layer is wider than 256, or not tanh or relu"
    assert step_obstacle(agent_for("discrete", activation="gelu"), Objective()) == reason
    decoupled = agent_for("discrete", kind="decoupled")
    assert step_obstacle(decoupled, Objective()).startswith("the network is a ")
    wide = build_agent(OBSERVATION, SPACES["discrete"], Network(hidden=(512,)), 0)
    assert step_obstacle(wide, Objective()) == reason


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_actions_that_are_ruled_out(temperature: float) -> None:
    agent = agent_for("discrete")
    batch = batch_for(agent, 7)
    mask = torch.ones(ROWS, 3, dtype=torch.bool)
    mask[::2, 1] = False
    action = torch.where(mask.gather(1, batch.action[:, None])[:, 0], batch.action, 0)
    behavior = {"logits": batch.behavior["logits"].masked_fill(~mask, -torch.inf)}
    batch = batch._replace(
        obs={**batch.obs, "action_mask": mask},
        action=action,
        behavior=behavior,
        log_prob=agent.dist.log_prob(behavior, action),
    )
    hparams = HyperParams(entropy_coef=0.02, temperature=temperature)
    both(agent, Objective(entropy_bonus=True, track_kl=True), batch, hparams)
