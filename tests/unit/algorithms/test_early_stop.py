"""Early stopping by hand: a step that adds 1 to every parameter, and KLs that are made up."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from keel.algorithms.optimizer import Minibatch, StepResult
from keel.algorithms.ppo import PPO, EarlyStop
from keel.losses.ppo import Statistics
from keel.types import HyperParams, OptimizerState, UpdateReport

from .conftest import Setting, build

QUIET, LOUD = 0.0, 0.02
"""KLs on either side of 1.5 × a target of 0.01."""


@dataclass
class Scripted:
    """A step that sees the KLs it is told to, `[G]` each, and moves all groups that are active."""

    kls: list[tuple[float, ...]]
    active: list[list[bool]] = field(default_factory=list)
    norms: tuple[float, ...] = ()
    """of the gradients; 0 without"""

    def __call__(self, opt_state: OptimizerState, minibatch: Minibatch) -> StepResult:
        active = minibatch.active
        kl = torch.tensor(self.kls[len(self.active)])
        self.active.append(active.tolist())
        zero = torch.zeros_like(kl)
        statistics = Statistics(*(zero for _ in Statistics._fields))._replace(kl=kl)
        moved = OptimizerState(*(x + active[:, None].to(x.dtype) for x in opt_state))
        norm = zero + (self.norms[len(self.active) - 1] if self.norms else 0.0)
        return StepResult(moved, statistics, norm, active)


def update(
    step: Scripted, early_stop: EarlyStop, *, epochs: int, groups: int, target_kl: float = 0.01
) -> tuple[OptimizerState, UpdateReport]:
    """Two minibatches an epoch, from parameters, moments and step counts of 0."""
    setting = build((8,) if groups == 1 else (8, groups), groups)
    algorithm = PPO(
        setting.agent,
        step,
        epochs=epochs,
        minibatch=4,
        early_stop=early_stop,
        target_kl=target_kl,
        gate=False,
    )
    opt_state = OptimizerState(*map(torch.zeros_like, setting.opt_state))
    return Setting(setting.agent, setting.batch, opt_state).update(algorithm, HyperParams())


def steps_taken(opt_state: OptimizerState) -> list[float]:
    """Of every group, by parameters and moments and step counts alike."""
    own = [x.unique(dim=1)[:, 0].tolist() for x in opt_state]
    assert all(x == own[0] for x in own)
    assert all(len(x.unique(dim=1).T) == 1 for x in opt_state)
    return own[0]


def test_the_step_that_a_minibatch_refuses_is_not_taken() -> None:
    """The third minibatch sees a KL that is too large: two steps were taken, and no moment moved
    with the third."""
    step = Scripted([(QUIET,), (QUIET,), (LOUD,)])
    after, report = update(step, "minibatch", epochs=9, groups=1)
    assert steps_taken(after) == [2.0]
    assert len(step.active) == 3
    assert report.metrics["train/early_stop_epoch"] == 1.0
    assert report.metrics["train/epochs"] == 1.0
    assert report.metrics["train/early_stop_kl"] == pytest.approx(LOUD)


def test_a_group_that_is_refused_stands_while_the_other_takes_its_step() -> None:
    step = Scripted([(QUIET, QUIET), (LOUD, QUIET), (LOUD, QUIET), (LOUD, QUIET)])
    after, report = update(step, "minibatch", epochs=2, groups=2)
    assert steps_taken(after) == [1.0, 4.0]
    assert step.active == [[True, True], [True, True], [False, True], [False, True]]
    assert torch.isnan(torch.tensor(report.metrics["train/early_stop_epoch"]))


def test_a_stopped_group_does_not_start_again_when_another_one_stops() -> None:
    """On the third minibatch the KL of the first group looks small again, and the second is
    stopped: then none is left, and the update ends."""
    step = Scripted([(LOUD, QUIET), (QUIET, QUIET), (QUIET, LOUD), (QUIET, QUIET)])
    after, report = update(step, "minibatch", epochs=2, groups=2)
    assert step.active == [[True, True], [False, True], [False, True]]
    assert steps_taken(after) == [0.0, 2.0]
    assert report.metrics["train/early_stop_epoch"] == 1.0


def test_a_group_that_an_epoch_stopped_does_not_start_again() -> None:
    step = Scripted([(LOUD, QUIET)] * 2 + [(QUIET, QUIET)] * 4)
    after, _ = update(step, "epoch", epochs=3, groups=2)
    assert step.active == [[True, True]] * 2 + [[False, True]] * 4
    assert steps_taken(after) == [2.0, 6.0]


@pytest.mark.parametrize(
    ("kls", "epochs"),
    [
        ([0.0, 0.0, 0.01, 0.03], 2),  # 0.02 of the second epoch, though 0.01 of both
        ([0.0, 0.029, 0.0, 0.031], 2),  # 0.0145 is inside, 0.0155 is not
        ([0.0, 0.031], 1),
        ([0.031, 0.0], 1),  # the mean, not the last
    ],
)
def test_an_epoch_is_stopped_by_the_mean_kl_of_its_own_minibatches(
    kls: list[float], epochs: int
) -> None:
    step = Scripted([(kl,) for kl in kls])
    after, report = update(step, "epoch", epochs=9, groups=1)
    assert steps_taken(after) == [float(len(kls))]
    assert report.metrics["train/epochs"] == epochs
    assert report.metrics["train/early_stop_epoch"] == epochs - 1
    assert report.metrics["train/early_stop_kl"] == pytest.approx(sum(kls[-2:]) / 2)


@pytest.mark.parametrize("early_stop", ["minibatch", "epoch"])
def test_a_kl_of_exactly_one_and_a_half_times_the_target_stops_nothing(
    early_stop: EarlyStop,
) -> None:
    """3/128 = 1.5 × 1/64, which floats hold exactly."""
    step = Scripted([(3 / 128,)] * 4)
    after, report = update(step, early_stop, epochs=2, groups=1, target_kl=1 / 64)
    assert steps_taken(after) == [4.0]
    assert torch.isnan(torch.tensor(report.metrics["train/early_stop_kl"]))


def test_gradients_count_as_clipped_above_their_limit() -> None:
    """Of norms ¼, ½, 1 and 2 against a limit of ½ two are above it; their mean is 15/16."""
    step = Scripted([(QUIET,)] * 4, norms=(0.25, 0.5, 1.0, 2.0))
    _, report = update(step, "off", epochs=2, groups=1)
    assert report.metrics["train/gradient_clipped"] == 0.5
    assert report.metrics["train/gradient_norm"] == pytest.approx(15 / 16)
    assert report.metrics["train/non_finite_gradients"] == 0.0
