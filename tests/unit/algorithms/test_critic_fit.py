"""Fitting the critic apart: the loss it reports, steps that are skipped, and shared trunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from keel.algorithms.critic import CriticFit, CriticObjective, Fit
from keel.algorithms.optimizer import Loss, initial_opt_state, make_step
from keel.config import Network
from keel.experience.batch import CHUNK, Batch
from keel.losses.ppo import Statistics
from keel.networks.agent import Agent
from keel.networks.build import build_agent
from keel.trust_region.gate import BAD_STEPS, NumericError
from keel.types import HyperParams

from .conftest import Setting, build


def fit(setting: Setting, critic: CriticFit, objective: Loss | None = None) -> Fit:
    step = make_step(
        setting.agent,
        objective or critic.objective,
        max_grad_norm=critic.max_grad_norm,
    )
    rng = torch.Generator().manual_seed(0)
    return critic(setting.agent, setting.opt_state, setting.batch, HyperParams(), rng, step)


def squared_error(agent: Agent, params: Tensor, rows: Batch, target: Tensor) -> float:
    """½(V − R)², the mean over the rows that count."""
    with torch.no_grad():
        value = agent.evaluate(params, rows.obs).value[..., 0]
    return ((0.5 * (value - target) ** 2 * rows.weight).sum() / rows.weight.sum()).item()


def test_the_losses_of_the_first_and_the_last_step() -> None:
    """All rows are one minibatch, so the loss of a step is that of the parameters before it."""
    setting = build((96,))
    target = setting.batch.target
    one, two = (fit(setting, CriticFit(epochs=epochs, minibatch=96)) for epochs in (1, 2))
    first = squared_error(setting.agent, setting.opt_state.params, setting.batch, target)
    second = squared_error(setting.agent, one.opt_state.params, setting.batch, target)
    assert one.metrics["train/critic_loss_first"] == pytest.approx(first)
    assert one.metrics["train/critic_loss_last"] == pytest.approx(first)
    assert two.metrics["train/critic_loss_first"] == pytest.approx(first)
    assert two.metrics["train/critic_loss_last"] == pytest.approx(second)
    assert two.metrics["train/value_loss"] == pytest.approx((first + second) / 2)
    assert second < first


def flat_loss(
    agent: Agent, params: Tensor, batch: Batch, hparams: Tensor
) -> tuple[Tensor, Statistics]:
    """The critic's loss plus √0, whose gradient is not a number."""
    loss, statistics = CriticObjective()(agent, params, batch, hparams)
    return loss + (0.0 * params.sum()).sqrt(), statistics


def test_a_step_without_a_finite_gradient_is_skipped() -> None:
    setting = build((96,))
    after, metrics = fit(setting, CriticFit(epochs=BAD_STEPS - 1, minibatch=96), flat_loss)
    for now, before in zip(after, setting.opt_state, strict=True):
        torch.testing.assert_close(now, before, rtol=0, atol=0)
    assert metrics["train/non_finite_gradients"] == BAD_STEPS - 1
    assert metrics["train/epochs"] == BAD_STEPS - 1


def test_ten_steps_without_a_finite_gradient_stop_the_run() -> None:
    setting = build((96,))
    message = r"the critic's gradient is not finite \(steps skipped, none applied: 10\)"
    with pytest.raises(NumericError, match=message):
        fit(setting, CriticFit(epochs=10, minibatch=96), flat_loss)


def test_a_loss_that_is_not_finite_stops_the_run_at_once() -> None:
    setting = build((96,))
    target = setting.batch.target.clone()
    target[int((setting.batch.weight > 0).nonzero()[5])] = torch.inf
    setting = setting.of(target=target)
    message = (
        r"the critic's loss is not finite .*not finite in the minibatch: target; "
        r"its largest number is inf \(target\), the largest parameter 0\.\d+"
    )
    with pytest.raises(NumericError, match=message) as caught:
        fit(setting, CriticFit(epochs=1, minibatch=96))
    assert torch.equal(caught.value.tensors["target"], target)


@pytest.mark.parametrize("count", [CHUNK + 30, 2 * CHUNK + 30])
def test_a_shared_trunk_sees_every_row_of_a_long_rollout(count: int) -> None:
    """Its pass is made in pieces; the first loss is that of all rows at once."""
    network: dict[str, Any] = {"kind": "decoupled", "hidden": (8,), "features": 6}
    box = spaces.Box(-1.0, 1.0, (5,))
    agent = build_agent(box, spaces.Discrete(3), Network(**network), 0)
    assert agent.shares
    generator = torch.Generator().manual_seed(0)
    nothing = torch.zeros(count)
    obs = {"obs": torch.randn(count, 5, generator=generator)}
    target = torch.randn(count, generator=generator)
    learned = nothing, target, nothing[:, None]
    rows = Batch(obs, {}, nothing, nothing, torch.ones(count), None, *learned)
    setting = Setting(agent, rows, initial_opt_state(agent.initial))
    metrics = fit(setting, CriticFit(epochs=1, minibatch=count)).metrics
    expected = squared_error(agent, agent.initial, rows, target)
    assert metrics["train/critic_loss_first"] == pytest.approx(expected, rel=1e-5)
