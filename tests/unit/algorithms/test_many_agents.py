"""Several agents in one region: shared rows, one after the other, a gate that names faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch

from keel.algorithms.happo import HAPPO
from keel.algorithms.optimizer import initial_opt_state
from keel.experience.batch import Batch, Experience
from keel.losses.ppo import Objective
from keel.networks.agent import Agent
from keel.trust_region.certify import Certified
from keel.trust_region.gate import ConsistencyError
from keel.trust_region.measure import exact_kl, group_mean, measure
from keel.types import AlgorithmState, HyperParams, OptimizerState, UpdateReport

from .conftest import Setting, small

FAST = HyperParams(learning_rate=0.05, max_kl=0.01)


def sharing(agents: Setting, members: tuple[int, ...]) -> Setting:
    """The same rows, with some of the three agents on one row of parameters."""
    made = Agent(agents.agent.network, agents.agent.dist, max(members) + 1, None, members)
    params = agents.opt_state.params[: made.groups]
    with torch.no_grad():
        behavior = made.policy(params, agents.batch.obs)
    log_prob = made.dist.log_prob(behavior, agents.batch.action)
    rows = agents.batch._replace(behavior=behavior, log_prob=log_prob)
    return Setting(made, rows, initial_opt_state(params))


@pytest.mark.parametrize("members", [(0, 0, 0), (0, 1, 0), (0, 1, 2)])
def test_the_bound_holds_for_every_agent_whoever_shares(
    agents: Setting, members: tuple[int, ...]
) -> None:
    shared = sharing(agents, members)
    after, report = shared.update(Certified(small(shared.agent)), FAST)
    kl = exact_kl(shared.agent, after.params, shared.batch, 1.0)
    assert kl.shape == (3,)
    assert bool((kl <= FAST.max_kl).all())
    assert report.verdict == "walked_back"
    assert report.alpha.shape == (len(set(members)),)
    assert torch.allclose(report.agents["train/kl_exact"], kl)
    assert torch.allclose(report.kl_exact, shared.agent.worst(kl))


def test_a_shared_row_takes_the_smallest_share_that_any_of_its_agents_allows(
    agents: Setting,
) -> None:
    shared = sharing(agents, (0, 0, 0))
    free, _ = shared.update(Certified(small(shared.agent), enforce=False), FAST)
    requested = exact_kl(shared.agent, free.params, shared.batch, 1.0)
    _, report = shared.update(Certified(small(shared.agent)), FAST)
    assert report.kl_requested.item() == pytest.approx(requested.max().item(), rel=1e-9)
    assert report.kl_exact.item() == pytest.approx(0.98 * FAST.max_kl, rel=0.05)


def test_agents_have_metrics_of_their_own(agents: Setting) -> None:
    _, report = agents.update(Certified(small(agents.agent)), HyperParams())
    names = {"policy_loss", "value_loss", "clip_fraction", "kl_exact", "entropy", "ratio_outside"}
    assert {f"train/{name}" for name in names} == set(report.agents)
    for key, own in report.agents.items():
        assert own.shape == (3,)
        if key != "train/kl_exact":  # whose roll-up is the largest
            assert report.metrics[key] == pytest.approx(own.mean().item(), rel=1e-5, abs=1e-6)


def in_turn(agents: Setting) -> HAPPO:
    return HAPPO(agents.agent, small(agents.agent.alone()))


@pytest.mark.parametrize("members", [(0, 1, 2), (0, 1, 0), (0, 0, 0)])
def test_in_sequence_each_learns_from_what_those_before_it_became(
    agents: Setting, members: tuple[int, ...]
) -> None:
    """The same by hand: a permutation, and a product of ratios on the advantages."""
    agents = sharing(agents, members)
    after, _ = agents.update(in_turn(agents), HyperParams(learning_rate=0.01))
    rng = torch.Generator().manual_seed(0)
    order = torch.randperm(agents.agent.groups, generator=rng).tolist()
    hparams, weight, alone = HyperParams(learning_rate=0.01), torch.ones(96), agents.agent.alone()
    for row in order:
        who = agents.agent.who(row)
        own = agents.batch.of_members(who)
        rows = own._replace(advantage=own.advantage * weight.repeat_interleave(len(who)))
        start = OptimizerState(*(x[row : row + 1] for x in agents.opt_state))
        taught = Setting(alone, rows, start)
        learned, _ = small(alone).update(AlgorithmState(start, rng), taught.experience, hparams)
        single = learned.opt_state
        assert torch.equal(after.params[row], single.params[0])
        ratio = measure(alone, single.params, rows, 1.0).ratio
        moved = torch.where(rows.weight > 0, ratio.ratio, 1.0)
        weight = weight * moved.reshape(96, len(who)).prod(1)
    assert not torch.allclose(weight, torch.ones(96))


@dataclass(frozen=True)
class Scripted:
    """A region that moves nothing, and reports what it is told to, one agent after the other."""

    agent: Agent
    reports: Iterator[tuple[Literal["accepted", "rejected"], str, float]]
    objective: Objective = field(default_factory=Objective)

    def init(self) -> OptimizerState:
        return initial_opt_state(self.agent.initial)

    def update(
        self, state: AlgorithmState, experience: Experience, hparams: HyperParams
    ) -> tuple[AlgorithmState, UpdateReport]:
        verdict, reason, number = next(self.reports)
        names = ("train/policy_loss", "train/gate_log_ratio", "error/non_finite_ratio_count")
        metrics = dict.fromkeys(names, number)
        zero = torch.zeros(1, dtype=torch.float64)
        return state, UpdateReport(zero, zero, zero + number, verdict, reason, metrics)


@pytest.mark.parametrize(
    ("verdicts", "verdict", "reason"),
    [
        (("rejected", "rejected", "rejected"), "rejected", "no_gradient"),
        (("rejected", "accepted", "rejected"), "accepted", "no_gradient"),
        (("accepted", "accepted", "accepted"), "accepted", ""),
    ],
)
def test_in_sequence_reports_are_put_together(
    agents: Setting, verdicts: tuple[Any, ...], verdict: str, reason: str
) -> None:
    """Means of what was measured (1 + 2 + 6 is 9), the largest gap of the gate, sums of counts; it
    was rejected if every agent's step was."""
    numbers = (1.0, 2.0, 6.0)
    reasons = ("no_gradient" if x == "rejected" else "" for x in verdicts)
    scripted = Scripted(agents.agent.alone(), zip(verdicts, reasons, numbers, strict=True))
    after, report = agents.update(HAPPO(agents.agent, scripted), HyperParams())
    assert torch.equal(after.params, agents.opt_state.params)
    assert (report.verdict, report.reason) == (verdict, reason)
    assert report.metrics["train/policy_loss"] == pytest.approx(3.0)
    assert report.metrics["train/gate_log_ratio"] == 6.0
    assert report.metrics["error/non_finite_ratio_count"] == pytest.approx(9.0)
    order = torch.randperm(3, generator=torch.Generator().manual_seed(0))
    own = torch.empty(3, dtype=torch.float64)
    own[order] = torch.tensor(numbers, dtype=torch.float64)
    assert torch.equal(report.agents["train/policy_loss"], own)
    assert torch.equal(report.alpha, own)


def test_in_sequence_the_bound_holds_too(agents: Setting) -> None:
    after, report = agents.update(Certified(in_turn(agents)), FAST)
    assert bool((exact_kl(agents.agent, after.params, agents.batch, 1.0) <= FAST.max_kl).all())
    assert report.agents["train/clip_fraction"].shape == (3,)


def test_of_members_keeps_rows_together() -> None:
    x = torch.arange(12).reshape(4, 3).float()
    rows = Batch({"obs": x[..., None]}, {}, x, x, torch.ones(4, 3), 1, x, x, x[..., None])
    found = rows.of_members((0, 2))
    assert found.action.tolist() == [0, 2, 3, 5, 6, 8, 9, 11]
    assert found.group_axis is None
    assert found.advantage.tolist() == found.target.tolist() == found.action.tolist()
    assert found.old_value.shape == (8, 1)


def stopped(agents: Setting, rows: Batch, pattern: str) -> None:
    broken = replace(agents, batch=rows)
    with pytest.raises(ConsistencyError, match=pattern):
        broken.update(Certified(small(agents.agent)), HyperParams())


def named(agents: Setting) -> Setting:
    agents.agent.row_names = ("industry", "education", "council")
    return agents


def test_another_agents_actor_is_named(agents: Setting) -> None:
    agents = named(agents)
    agents.agent.members = (0, 0, 2)  # what education did is replayed by industry's network
    stopped(agents, agents.batch, r"wrong_actor: .* \(education's by industry's\)")


def test_old_log_probs_of_another_agent_are_named(agents: Setting) -> None:
    agents = named(agents)
    first = agents.opt_state.params[:1].expand_as(agents.opt_state.params)
    with torch.no_grad():
        behavior = agents.agent.policy(first, agents.batch.obs)
    log_prob = agents.agent.dist.log_prob(behavior, agents.batch.action)
    rows = agents.batch._replace(behavior=behavior, log_prob=log_prob)
    stopped(agents, rows, r"wrong_actor: .* \(industry's by education's, industry's by council's\)")


def test_exploration_outside_of_the_policy_is_named(agents: Setting) -> None:
    strayed = torch.rand(agents.batch.action.shape) < 0.2
    action = torch.where(strayed, (agents.batch.action + 1) % 3, agents.batch.action)
    stopped(named(agents), agents.batch._replace(action=action), "epsilon_greedy: .* of the rows")


def test_another_mask_is_named(agents: Setting) -> None:
    mask = torch.ones(96, 3, 3, dtype=torch.bool)
    mask.scatter_(-1, ((agents.batch.action + 1) % 3)[..., None], False)
    rows = agents.batch._replace(obs=agents.batch.obs | {"action_mask": mask})
    stopped(named(agents), rows, "mask_drift: on 100% of the rows other actions are legal")


def test_another_temperature_is_named(agents: Setting) -> None:
    behavior = {"logits": agents.batch.behavior["logits"] / 2.0}
    log_prob = agents.agent.dist.log_prob(behavior, agents.batch.action)
    rows = agents.batch._replace(behavior=behavior, log_prob=log_prob)
    stopped(named(agents), rows, "temperature: the actions were drawn at 2, the update .* at 1")


def test_what_leaves_no_trace_is_not_named(agents: Setting) -> None:
    behavior = {"logits": torch.randn(96, 3, 3)}
    log_prob = agents.agent.dist.log_prob(behavior, agents.batch.action)
    rows = agents.batch._replace(behavior=behavior, log_prob=log_prob)
    stopped(named(agents), rows, "Look for another network, dropout")


def test_group_means_skip_what_does_not_count(agents: Setting) -> None:
    x = torch.where(agents.batch.weight > 0, 2.0, torch.nan)
    assert group_mean(x, agents.batch).tolist() == [2.0, 2.0, 2.0]
