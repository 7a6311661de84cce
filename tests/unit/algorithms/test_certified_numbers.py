"""Certification by hand: from uniform choices among three to ½, ⅓ and ⅙, whatever is observed.

Ratios are 3/2, 1 and 1/2, and KL(old‖new) = ⅓·ln(⅔) + ⅓·ln 1 + ⅓·ln 2 = ⅓·ln(4/3) = 0.09589.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from keel.algorithms.optimizer import initial_opt_state
from keel.functional import policy_ratio, ratio_report
from keel.losses.ppo import Objective
from keel.networks.agent import Agent
from keel.trust_region.certify import Certified, _interpolate, _warnings
from keel.types import AlgorithmState, HyperParams, OptimizerState, UpdateReport

from .conftest import Setting, build

KL = math.log(4 / 3) / 3
BIAS = torch.tensor([1.5, 1.0, 0.5]).log()
"""Of the last layer, whose softmax is ½, ⅓ and ⅙ where all other parameters are 0."""
ACTIONS = torch.tensor([0, 0, 1, 2, 0, 2])
WEIGHTS = torch.tensor([1.0, 1.0, 2.0, 1.0, 0.0, 0.0])


@dataclass
class Prepared:
    """An algorithm whose update was made beforehand."""

    agent: Agent
    after: OptimizerState
    alpha: Tensor
    objective: Objective = field(default_factory=Objective)

    def init(self) -> OptimizerState:
        return initial_opt_state(self.agent.initial)

    def update(self, state: AlgorithmState, *_: object) -> tuple[AlgorithmState, UpdateReport]:
        nothing = torch.zeros_like(self.alpha)
        metrics = {"train/gate_log_ratio": 0.0}
        after = replace(state, opt_state=self.after)
        return after, UpdateReport(nothing, nothing, self.alpha, metrics=metrics)


def uniform(groups: int) -> Setting:
    """Agents that choose uniformly, each with the same actions and weights."""
    lead = (6,) if groups == 1 else (6, groups)
    setting = build(lead, groups)
    action, weight = (
        x if groups == 1 else x[:, None].expand(lead).clone() for x in (ACTIONS, WEIGHTS)
    )
    batch = setting.batch._replace(
        behavior={"logits": torch.zeros(*lead, 3)},
        action=action,
        log_prob=torch.full(lead, math.log(1 / 3)),
        weight=weight,
    )
    return replace(
        setting,
        batch=batch,
        opt_state=initial_opt_state(torch.zeros_like(setting.opt_state.params)),
    )


def moved(setting: Setting, *shares: float) -> OptimizerState:
    """Every group after a share of the step; the critic and all moments have moved, too."""
    params = torch.zeros_like(setting.opt_state.params)
    params[:, setting.agent.layout.slice_of("actor.layers.1.bias")] = (
        torch.tensor(shares)[:, None] * BIAS
    )
    params[:, ~setting.agent.policy_columns] = 0.25
    return OptimizerState(
        params,
        torch.full_like(params, 0.5),
        torch.full_like(params, 4.0),
        torch.full_like(setting.opt_state.steps, 7.0),
    )


def certified(
    setting: Setting, after: OptimizerState, hparams: HyperParams, alpha: tuple[float, ...]
) -> tuple[OptimizerState, UpdateReport]:
    prepared = Prepared(setting.agent, after, torch.tensor(alpha, dtype=torch.float64))
    return setting.update(Certified(prepared), hparams)


@pytest.mark.parametrize(
    ("low", "high", "outside"),
    [
        (0.2, 0.6, 0.2),  # ½ alone, of weight 1 in 5
        (0.6, 0.2, 0.4),  # 3/2, twice
        (0.2, 0.2, 0.6),
        (0.6, 0.6, 0.0),
    ],
)
def test_the_share_of_ratios_outside_of_the_clip_range(
    low: float, high: float, outside: float
) -> None:
    """Three ratios of 3/2, one of weight 0; one of 1 and weight 2; two of ½, one of weight 0."""
    setting = uniform(1)
    hparams = HyperParams(clip_low=low, clip_high=high, max_kl=1.0)
    _, report = certified(setting, moved(setting, 1.0), hparams, (1.0,))
    assert report.metrics["train/ratio_outside"] == pytest.approx(outside)
    assert report.metrics["train/ratio_min"] == pytest.approx(0.5)
    assert report.metrics["train/ratio_max"] == pytest.approx(1.5)
    assert report.metrics["train/kl_exact"] == pytest.approx(KL)
    assert report.metrics["train/kl_is_exact"] == 1.0
    assert (report.verdict, report.reason) == ("accepted", "")


def alarms(largest: float, smallest: float, log_ratio: float) -> tuple[float, ...]:
    healthy = ratio_report(policy_ratio(torch.zeros(2), torch.zeros(2)))
    told = _warnings(
        healthy._replace(
            ratio_max=torch.tensor(largest, dtype=torch.float64),
            ratio_min=torch.tensor(smallest, dtype=torch.float64),
            max_abs_log_ratio=torch.tensor(log_ratio, dtype=torch.float64),
        )
    )
    names = ("extreme_ratio_max", "extreme_ratio_min", "large_log_ratio")
    return tuple(told[f"warn/{name}"] for name in names)


def test_alarms_of_ratios_and_that_their_thresholds_are_none() -> None:
    """Above 100 or below 1/100 both extremes are told; of log-ratios what is beyond 5."""
    assert all(math.isnan(x) for x in alarms(100.0, 0.01, 5.0))
    assert alarms(100.5, 1.0, 5.5) == (100.5, 1.0, 5.5)
    assert alarms(1.0, 0.009, 5.5) == (1.0, 0.009, 5.5)


@pytest.mark.parametrize(("bad", "share", "alarm"), [(0, 0.0, 0.0), (1, 0.5, 0.0), (2, 1.0, 1.0)])
def test_the_alarm_of_ratios_of_which_none_is_finite(bad: int, share: float, alarm: float) -> None:
    old = torch.where(torch.arange(2) < bad, torch.nan, 0.0)
    told = _warnings(ratio_report(policy_ratio(torch.zeros(2), old)))
    assert told["error/non_finite_ratio_frac"] == share
    assert told["warn/ratio_all_nonfinite"] == alarm


def test_a_step_whose_kl_is_the_bound_itself_is_kept_whole() -> None:
    setting = uniform(1)
    after = moved(setting, 1.0)
    _, free = certified(setting, after, HyperParams(max_kl=1.0), (1.0,))
    same, report = certified(setting, after, HyperParams(max_kl=free.kl_requested.item()), (1.0,))
    assert report.verdict == "accepted"
    assert torch.equal(same.params, after.params)


def test_nothing_is_kept_of_parameters_that_are_not_finite() -> None:
    """0·∞ is not a number, and a step of which nothing is kept is none."""
    setting = uniform(3)
    old, columns = setting.opt_state.params, setting.agent.policy_columns
    new = torch.stack([torch.full_like(old[0], x) for x in (torch.inf, torch.nan, 4.0)])
    after = _interpolate(setting.agent, old, new, torch.tensor([0.0, 0.0, 0.25]))
    assert (after[:, columns] == torch.tensor([[0.0], [0.0], [1.0]])).all()


def test_the_seconds_of_certification_are_told() -> None:
    """Of what was measured, once and again where it was walked back: not a minute, not nothing."""
    setting = uniform(1)
    for bound in (1.0, 0.02):
        _, report = certified(setting, moved(setting, 1.0), HyperParams(max_kl=bound), (1.0,))
        assert 0.0 < report.metrics["time/certify_seconds"] < 60.0


def test_a_ratio_at_the_edge_of_the_clip_range_is_not_outside() -> None:
    """A policy that did not move has ratios of exactly 1, inside of a range that is only 1."""
    setting = uniform(1)
    hparams = HyperParams(clip_low=0.0, clip_high=0.0)
    _, report = certified(setting, setting.opt_state, hparams, (1.0,))
    assert report.metrics["train/ratio_outside"] == 0.0


def test_every_agent_has_its_share_of_ratios_outside_and_the_mean_is_over_agents() -> None:
    setting = uniform(2)
    _, report = certified(setting, moved(setting, 1.0, 0.0), HyperParams(max_kl=1.0), (1.0, 1.0))
    assert report.agents["train/ratio_outside"].tolist() == pytest.approx([0.6, 0.0])
    assert report.metrics["train/ratio_outside"] == pytest.approx(0.3)
    assert report.agents["train/kl_exact"].tolist() == pytest.approx([KL, 0.0], abs=1e-7)


def kept(setting: Setting, after: OptimizerState) -> float:
    """The share of the first group's step, told by where its parameters are."""
    bias = after.params[0, setting.agent.layout.slice_of("actor.layers.1.bias")]
    share = (bias[0] / BIAS[0]).item()
    torch.testing.assert_close(bias, share * BIAS)
    assert 0.3 < share < 0.5  # by a KL that is nearly quadratic: √(0.02 / KL) = 0.457 at most
    return share


def test_alpha_is_the_regions_own_times_what_was_kept_the_smallest_of_all_groups() -> None:
    """The region itself kept ½ of the first step, which is walked back, and ¾ of the others, of
    which the third does not move at all."""
    setting = uniform(3)
    after, report = certified(
        setting, moved(setting, 1.0, 0.1, 0.0), HyperParams(max_kl=0.02), (0.5, 0.75, 0.75)
    )
    share = kept(setting, after)
    assert report.alpha.tolist() == pytest.approx([0.5 * share, 0.75, 0.75])
    assert report.metrics["train/alpha"] == pytest.approx(0.5 * share)
    assert report.metrics["train/kl_requested"] == pytest.approx(KL)
    assert 0.01 <= report.metrics["train/kl_exact"] <= 0.02


def test_alpha_is_the_regions_own_where_nothing_is_walked_back() -> None:
    setting = uniform(2)
    _, report = certified(setting, moved(setting, 0.1, 0.1), HyperParams(max_kl=0.02), (0.25, 0.75))
    assert report.verdict == "accepted"
    assert report.metrics["train/alpha"] == 0.25


def test_adams_momentum_is_scaled_by_the_share_that_was_kept_and_nothing_else_is() -> None:
    """Of the policy of the first group, that is: its second moment stays 4 and its age 7, and all
    of the critic and of the group that is inside of the bound stays, too."""
    setting = uniform(2)
    given = moved(setting, 1.0, 0.1)
    after, report = certified(setting, given, HyperParams(max_kl=0.02), (1.0, 1.0))
    policy = setting.agent.policy_columns
    assert report.verdict == "walked_back"
    assert after.first[0, policy].unique().tolist() == pytest.approx([0.5 * kept(setting, after)])
    assert torch.equal(after.first[:, ~policy], given.first[:, ~policy])
    assert torch.equal(after.first[1], given.first[1])
    assert torch.equal(after.second, given.second)
    assert torch.equal(after.steps, given.steps)
    assert torch.equal(after.params[:, ~policy], given.params[:, ~policy])
