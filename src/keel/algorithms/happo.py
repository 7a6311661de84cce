"""Sequential updates: agents learn one after the other, each aware of the policies before it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from keel.algorithms.optimizer import joined_metrics
from keel.experience.batch import Batch, Experience, Targets
from keel.losses.ppo import Objective
from keel.losses.token import TokenObjective
from keel.networks.agent import Agent
from keel.trust_region.certify import Algorithm
from keel.trust_region.measure import measure
from keel.types import AlgorithmState, HyperParams, OptimizerState, UpdateReport


@dataclass(frozen=True, eq=False)
class HAPPO:
    """HAPPO: agents in random order, advantages weighted by the ratios of those before.

    So every agent improves on the joint policy as it is by then, not on one that no longer exists
    (Kuba et al. 2022, HAPPO). What is kept of each step is up to `Certified`, afterwards.
    """

    agent: Agent
    algorithm: Algorithm
    """that of a single agent, `agent.alone()`"""

    @property
    def objective(self) -> Objective | TokenObjective:
        """The algorithm's own objective."""
        return self.algorithm.objective

    def init(self) -> OptimizerState:
        """Return the algorithm's own state."""
        return self.algorithm.init()

    def update(
        self, state: AlgorithmState, experience: Experience, hparams: HyperParams
    ) -> tuple[AlgorithmState, UpdateReport]:
        """Improve every row of the matrix in turn."""
        agent, batch, start = self.agent, experience.batch, state.opt_state
        weight = torch.ones_like(batch.log_prob[:, 0])
        states = [OptimizerState(*(x[row : row + 1] for x in start)) for row in range(agent.groups)]
        reports: list[UpdateReport | None] = [None] * agent.groups
        for row in torch.randperm(agent.groups, generator=state.rng).tolist():
            member = _Member(experience, start.params, row, agent.who(row), weight)
            own = replace(state, opt_state=states[row])
            after, reports[row] = self.algorithm.update(own, member.experience, hparams)
            states[row] = after.opt_state
            ratio = measure(
                self.algorithm.agent, states[row].params, member.batch, hparams.temperature
            ).ratio
            moved = torch.where(ratio.weight > 0, ratio.ratio, 1.0)
            weight = weight * moved.reshape(len(weight), -1).prod(1)
        finished = [report for report in reports if report is not None]
        joined = OptimizerState(*map(torch.cat, zip(*states, strict=True)))
        return replace(state, opt_state=joined), _joined(agent, finished)


@dataclass(frozen=True, eq=False)
class _Member:
    """The experience of the agents of one row, in the eyes of those who learned before them."""

    whole: Experience
    params: Tensor
    row: int
    who: tuple[int, ...]
    weight: Tensor
    """`[R]`: the product of the ratios of those before"""

    @cached_property
    def batch(self) -> Batch:
        """The agents' own rows `[R·K, …]`."""
        return self._weighted(self.whole.batch)

    @property
    def experience(self) -> Experience:
        """The same with targets by the critic at parameters `[1, P]` of the row."""
        return Experience(self.batch, self._targets)

    def _targets(self, params: Tensor) -> Targets:
        all_params = self.params.clone()
        all_params[self.row] = params[0]
        own = self._weighted(self.whole.by_critic(all_params))
        return Targets(own.advantage, own.target, own.old_value)

    def _weighted(self, batch: Batch) -> Batch:
        own = batch.of_members(self.who)
        weight = self.weight.repeat_interleave(len(self.who))  # as `of_members` lays them
        return own._replace(advantage=own.advantage * weight)


def _joined(agent: Agent, reports: list[UpdateReport]) -> UpdateReport:
    """Average over agents; the largest of what warns, the sum of what counts."""
    tables = [report.metrics for report in reports]
    own = {
        key: agent.of_agents(torch.tensor([table[key] for table in tables], dtype=torch.float64))
        for key in ("train/policy_loss", "train/value_loss", "train/clip_fraction")
        if key in tables[0]
    }
    rejected = all(report.verdict == "rejected" for report in reports)
    nothing = torch.zeros(len(reports), dtype=torch.float64)
    return UpdateReport(
        nothing,
        nothing,
        torch.cat([report.alpha for report in reports]),
        "rejected" if rejected else "accepted",
        ", ".join(sorted({report.reason for report in reports if report.reason})),
        joined_metrics(tables),
        own,
    )
