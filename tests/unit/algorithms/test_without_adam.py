"""Steps along the gradient itself: what note 000 argues from, and what Adam takes away."""

from __future__ import annotations

import pytest
import torch

from keel.algorithms.optimizer import Step, StepResult, without_adam
from keel.algorithms.ppo import PPO
from keel.losses.ppo import Objective
from keel.types import HyperParams, OptimizerState

from .conftest import Setting

RATE = 0.01


REGION = PPO(
    epochs=1, minibatch=96, max_grad_norm=1e9, objective=Objective(value_coef=0.0), gate=False
)
"""One step on all rows of a setting, of the policy alone, without gradient clipping."""


def first_step(setting: Setting, step: Step, gain: float) -> torch.Tensor:
    """How parameters move on advantages that are `gain` times as large."""
    learned = setting.targets(setting.opt_state.params)
    after, _ = REGION.update(
        setting.agent,
        setting.opt_state,
        setting.batch,
        lambda _: learned._replace(advantage=learned.advantage * gain),
        HyperParams(learning_rate=RATE),
        torch.Generator().manual_seed(0),
        step,
    )
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
    result = without_adam(adam)(old, None, empty, empty, hparams, empty)  # type: ignore[arg-type]
    assert result.opt_state.params.tolist() == [[pytest.approx(0.97), pytest.approx(1.04)]]


def test_advantages_thirty_times_larger_take_a_step_thirty_times_longer(steps: Setting) -> None:
    """Under Adam they take the same."""
    plain = without_adam(steps.step(REGION))
    one, thirty = first_step(steps, plain, 1.0), first_step(steps, plain, 30.0)
    assert one.abs().max() > 0
    torch.testing.assert_close(thirty, 30.0 * one, rtol=1e-3, atol=1e-6)
    adam = steps.step(REGION)
    one, thirty = first_step(steps, adam, 1.0), first_step(steps, adam, 30.0)
    assert (thirty - one).norm() < 0.05 * one.norm()
