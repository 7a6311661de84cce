"""Steps along the gradient itself, without Adam's normalization."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from keel.algorithms.optimizer import Minibatch, StepResult
from keel.algorithms.ppo import PPO
from keel.experiments.fault_injection import without_adam
from keel.losses.ppo import Objective
from keel.networks.agent import Agent
from keel.types import HyperParams, OptimizerState

from .conftest import Setting, small

RATE = 0.01


def on_all_rows(agent: Agent) -> PPO:
    """One step on all rows of a setting, of the policy alone, without gradient clipping."""
    objective = Objective(value_coef=0.0)
    return small(agent, epochs=1, minibatch=96, max_grad_norm=1e9, objective=objective, gate=False)


def first_step(setting: Setting, algorithm: PPO, gain: float) -> torch.Tensor:
    """How parameters move on advantages that are `gain` times as large."""
    louder = setting.of(advantage=setting.batch.advantage * gain)
    after, _ = louder.update(algorithm, HyperParams(learning_rate=RATE))
    return after.params - setting.opt_state.params


def test_a_step_is_the_rate_times_the_gradient() -> None:
    """Gradient (3, −4): 3·0.01 down, 4·0.01 up; Adam's first moment from 0 holds a tenth of it."""
    gradient = torch.tensor([[3.0, -4.0]])

    def adam(opt_state: OptimizerState, *_: object) -> StepResult:
        assert not opt_state.first.any()
        moved = opt_state._replace(
            params=opt_state.params - RATE * gradient.sign(), first=0.1 * gradient
        )
        nothing = torch.zeros(1)
        return StepResult(moved, None, nothing, nothing.bool())  # type: ignore[arg-type]

    old = OptimizerState(
        torch.tensor([[1.0, 1.0]]), torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, 2)
    )
    hparams = HyperParams(learning_rate=RATE).tensor()
    empty = torch.empty(0)
    minibatch = Minibatch(None, empty, empty, hparams, empty)  # type: ignore[arg-type]
    result = without_adam(adam)(old, minibatch)
    assert result.opt_state.params.tolist() == [[pytest.approx(0.97), pytest.approx(1.04)]]


def test_advantages_thirty_times_larger_take_a_step_thirty_times_longer(steps: Setting) -> None:
    """Under Adam they take the same."""
    adam = on_all_rows(steps.agent)
    plain = replace(adam, step=without_adam(adam.step))
    one, thirty = first_step(steps, plain, 1.0), first_step(steps, plain, 30.0)
    assert one.abs().max() > 0
    torch.testing.assert_close(thirty, 30.0 * one, rtol=1e-3, atol=1e-6)
    one, thirty = first_step(steps, adam, 1.0), first_step(steps, adam, 30.0)
    assert (thirty - one).norm() < 0.05 * one.norm()
