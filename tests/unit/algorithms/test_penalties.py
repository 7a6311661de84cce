"""Penalties without a gradient are refused; those that have one are left alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.algorithms.ppo import DeadPenaltyError, check_penalties
from keel.distributions.composed import SquashedGaussian
from keel.errors import InputError
from keel.experience.batch import Batch
from keel.losses.ppo import Objective, Statistics
from keel.trust_region.certify import Certified
from keel.types import HPARAM_INDEX, HyperParams

from .conftest import Setting, build, small

PENALISED = HyperParams(learning_rate=1e-3, entropy_coef=0.01, kl_coef=0.5)


@dataclass(frozen=True)
class WithNumber(Objective):
    """An objective with a penalty of its own: from the entropy as a number, or as a tensor."""

    number: bool = True

    def __call__(
        self, agent: Any, params: Tensor, batch: Batch, hparams: Tensor
    ) -> tuple[Tensor, Statistics]:
        loss, statistics = super().__call__(agent, params, batch, hparams)
        entropy = agent.dist.entropy(agent.policy(params, batch.obs)).mean()
        penalty = 1.0 - (entropy.item() if self.number else entropy)
        return loss + hparams[HPARAM_INDEX["kl_coef"]] * penalty, statistics


def test_a_penalty_on_a_number_is_refused_before_the_first_step(steps: Setting) -> None:
    region = Certified(small(steps.agent, objective=WithNumber()))
    with pytest.raises(
        DeadPenaltyError, match=r"kl_coef: the KL penalty changes the loss .* is exactly 0"
    ):
        steps.update(region, HyperParams(kl_coef=0.5))
    steps.update(region, HyperParams(kl_coef=0.0))
    steps.update(
        Certified(small(steps.agent, objective=WithNumber(), gate=False)), HyperParams(kl_coef=0.5)
    )


def test_penalties_with_a_gradient_pass(setting: Setting) -> None:
    for objective in (Objective(penalize=True), WithNumber(number=False)):
        region = Certified(small(setting.agent, objective=objective))
        setting.update(region, PENALISED)


@pytest.mark.parametrize("coef", [1.0, -1.0, 0.5])
def test_it_says_what_the_loss_is_without_the_penalty_and_with_it(
    steps: Setting, coef: float
) -> None:
    """2 without, and 2 + 3·coef with it, at any parameters."""

    def loss(agent: Any, params: Tensor, batch: Batch, hparams: Tensor) -> tuple[Tensor, None]:
        return 2.0 + 0.0 * params.sum(1) + 3.0 * hparams[HPARAM_INDEX["kl_coef"]], None

    message = rf"\(2 without, {2.0 + 3.0 * coef:.4g} with it\)"
    with pytest.raises(DeadPenaltyError, match=message):
        check_penalties(*inputs(steps, loss), HyperParams(kl_coef=coef))


def test_a_penalty_that_is_cut_off_far_away_passes(steps: Setting) -> None:
    """A KL that counts up to 0.01: it is looked at near the policy that sampled, where it has a
    gradient."""
    plain = Objective(penalize=True)

    def loss(
        agent: Any, params: Tensor, batch: Batch, hparams: Tensor
    ) -> tuple[Tensor, Statistics]:
        nothing = HyperParams().tensor()
        value, statistics = plain(agent, params, batch, nothing)
        kl = agent.dist.kl(batch.behavior, agent.policy(params, batch.obs)).mean()
        return value + hparams[HPARAM_INDEX["kl_coef"]] * kl.clamp(max=0.01), statistics

    check_penalties(*inputs(steps, loss), HyperParams(kl_coef=0.5))


def inputs(setting: Setting, loss: Any) -> tuple[Any, Any, Tensor, Batch]:
    return setting.agent, loss, setting.opt_state.params, setting.batch


def test_it_is_looked_at_once_in_a_run(steps: Setting) -> None:
    later = replace(steps, opt_state=steps.opt_state._replace(steps=steps.opt_state.steps + 1.0))
    algorithm = Certified(small(steps.agent, objective=WithNumber()))
    later.update(algorithm, HyperParams(kl_coef=0.5))


def test_a_floor_needs_the_entropy_that_it_is_under() -> None:
    with pytest.raises(InputError, match="entropy_floor: needs entropy_bonus"):
        Objective(entropy_bonus=False, entropy_floor=0.5)


def test_a_floor_has_the_gradient_of_the_entropy_below_it_and_none_above(steps: Setting) -> None:
    """∂ [0.1·max(0, floor − H)] / ∂θ = −0.1·∂H/∂θ, as a bonus with the coefficient 0.1 has."""

    def gradient(objective: Objective, hparams: HyperParams) -> Tensor:
        leaf = steps.opt_state.params.detach().requires_grad_()
        loss, _ = objective(steps.agent, leaf, steps.batch, hparams.tensor())
        return torch.autograd.grad(loss.sum(), leaf)[0]

    plain = gradient(Objective(), HyperParams())
    below = gradient(Objective(entropy_floor=10.0), HyperParams()) - plain
    bonus = gradient(Objective(), HyperParams(entropy_coef=0.1)) - plain
    torch.testing.assert_close(below, bonus)
    assert below.norm() > 1e-4
    assert torch.equal(gradient(Objective(entropy_floor=-10.0), HyperParams()), plain)


def test_an_estimated_entropy_says_so(steps: Setting) -> None:
    _, report = steps.update(Certified(small(steps.agent)), HyperParams())
    assert report.metrics["train/entropy_is_exact"] == 1.0
    assert not SquashedGaussian((-1.0,), (1.0,)).exact_entropy
    setting = build((96,))
    setting.agent.dist = replace(setting.agent.dist, exact_entropy=False)  # type: ignore[type-var]
    _, report = setting.update(Certified(small(setting.agent)), HyperParams())
    assert report.metrics["train/entropy_is_exact"] == 0.0
