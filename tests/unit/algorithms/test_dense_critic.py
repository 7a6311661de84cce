"""The critic's step by hand against the step by autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from keel.algorithms import dense_critic
from keel.algorithms.critic import CriticObjective, Sweeping, _sweep
from keel.algorithms.optimizer import Minibatch, make_step
from keel.config import Critic, Network
from keel.experience.batch import Batch
from keel.networks.accelerate import critic_step_obstacle
from keel.networks.actor_critic import FEATURES
from keel.networks.agent import Agent
from keel.networks.build import build_agent
from keel.types import HyperParams, OptimizerState

ROWS, MINIBATCH = 24, 16


def make(act: str, critic: str = "scalar") -> tuple[Agent, OptimizerState, Batch]:
    network = Network(hidden=(8, 7), activation=act)  # type: ignore[arg-type]
    box, kind = spaces.Box(-1.0, 1.0, (5,)), Critic(kind=critic)  # type: ignore[arg-type]
    agent = build_agent(box, spaces.Discrete(3), network, 0, kind)
    generator = torch.Generator().manual_seed(1)
    own = agent.initial[:, agent.critic_from :].clone()
    nothing = torch.zeros(ROWS)
    batch = Batch(
        obs={FEATURES: torch.randn(ROWS, 5, generator=generator)},
        behavior={},
        action=nothing,
        log_prob=nothing,
        advantage=nothing,
        target=torch.randn(ROWS, generator=generator),
        old_value=nothing[:, None].expand(-1, agent.critic.outputs),
        weight=(torch.rand(ROWS, generator=generator) < 0.8).float(),
    )
    return agent, OptimizerState(own, own * 0, own * 0, torch.zeros(1, 2)), batch


@pytest.mark.parametrize("critic", ["scalar", "quantile", "hl_gauss"])
@pytest.mark.parametrize("act", ["tanh", "relu"])
@pytest.mark.parametrize("norm", [0.01, 10.0])
def test_both_give_the_same_parameters(act: str, norm: float, critic: str) -> None:
    agent, begin, batch = make(act, critic)
    objective = CriticObjective()
    assert critic_step_obstacle(agent, objective.value_clip) == ""
    by_hand = dense_critic.DenseCriticStep(agent, max_grad_norm=norm)
    by_autograd = make_step(agent, objective, max_grad_norm=norm)
    index, real = torch.arange(MINIBATCH) + 4, torch.ones(MINIBATCH)
    real[-3:] = 0.0
    active, hparams = torch.ones(1, dtype=torch.bool), HyperParams(learning_rate=1e-2).tensor()
    ours = theirs = begin
    for _ in range(3):
        a = by_hand(ours, Minibatch(batch, index, real, hparams, active))
        b = by_autograd(theirs, Minibatch(batch, index, real, hparams, active))
        torch.testing.assert_close(a.statistics, b.statistics)
        torch.testing.assert_close(a.gradient_norm, b.gradient_norm, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(a.opt_state, b.opt_state, rtol=1e-3, atol=2e-5)
        ours, theirs = a.opt_state, b.opt_state


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    agent, begin, batch = make("tanh")
    batch.target[batch.weight > 0] = np.inf
    step = dense_critic.DenseCriticStep(agent, max_grad_norm=1.0)
    rows, active = (torch.arange(ROWS), torch.ones(ROWS)), torch.ones(1, dtype=torch.bool)
    result = step(begin, Minibatch(batch, *rows, HyperParams().tensor(), active))
    assert not result.applied.any()
    assert result.opt_state is begin


@pytest.mark.parametrize(("moves", "rows"), [(False, ROWS), (True, 0)])
def test_a_step_that_is_stopped_or_has_no_rows_moves_nothing(moves: bool, rows: int) -> None:
    agent, begin, batch = make("tanh")
    step = dense_critic.DenseCriticStep(agent, max_grad_norm=1.0)
    index, real = torch.arange(ROWS), (torch.arange(ROWS) < rows).float()
    active = torch.tensor([moves])
    result = step(
        begin, Minibatch(batch, index, real, HyperParams(learning_rate=1e-2).tensor(), active)
    )
    torch.testing.assert_close(result.opt_state, begin, rtol=0, atol=0)
    assert result.applied.tolist() == [moves]
    assert result.gradient_norm.tolist() == [0.0]
    assert result.statistics.value_loss.tolist() == [0.0]


def test_what_does_not_fit_is_left_to_autograd() -> None:
    agent, _, _ = make("gelu")
    reason = "a layer is wider than 256, or not tanh or relu"
    assert critic_step_obstacle(agent, None) == reason
    agent, _, _ = make("tanh")
    assert critic_step_obstacle(agent, 0.2) == "region.value_clip is set"


@pytest.mark.parametrize("minibatch", [7, 8, 24])
def test_a_pass_is_its_steps_one_after_the_other(minibatch: int) -> None:
    agent, begin, batch = make("tanh")
    step = dense_critic.DenseCriticStep(agent, max_grad_norm=0.5)
    assert isinstance(step, Sweeping)
    hparams, order = HyperParams(learning_rate=1e-2).tensor(), torch.randperm(ROWS)
    by_autograd = make_step(agent, CriticObjective(), max_grad_norm=0.5, compiled=False)
    whole, told = step.sweep(begin, batch, order, minibatch, hparams)
    parts, said = _sweep(by_autograd)(begin, batch, order, minibatch, hparams)
    torch.testing.assert_close(told, said, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(whole, parts, rtol=1e-3, atol=2e-5)
    assert whole.steps.tolist() == [[-(-ROWS // minibatch)] * 2]
