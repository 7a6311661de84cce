"""Sequential updates: agents learn one after the other, each aware of the policies before it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.algorithms.optimizer import Step
from keel.experience.batch import Rows, TargetFunction, Targets, of_members
from keel.losses.ppo import Objective
from keel.networks.agent import Agent
from keel.trust_region.certify import Region
from keel.trust_region.measure import measure
from keel.types import HyperParams, OptimizerState, UpdateReport


@dataclass(frozen=True)
class HAPPO:
    """HAPPO: agents in random order, advantages weighted by the ratios of those before.

    So every agent improves on the joint policy as it is by then, not on one that no longer exists
    (Kuba et al. 2022, HAPPO). What is kept of each step is up to `Certified`, afterwards.
    """

    region: Region

    @property
    def objective(self) -> Objective:
        """The region's own objective."""
        return self.region.objective

    def init(self, agent: Agent) -> OptimizerState:
        """Return the region's own state."""
        return self.region.init(agent)

    def update(
        self,
        agent: Agent,
        state: OptimizerState,
        rows: Rows,
        targets: TargetFunction,
        hparams: HyperParams,
        rng: torch.Generator,
        step: Step,
    ) -> tuple[OptimizerState, UpdateReport]:
        """Improve every row of the matrix in turn; `step` is that of a single agent."""
        weight = torch.ones_like(rows.log_prob[:, 0])
        states = [OptimizerState(*(x[row : row + 1] for x in state)) for row in range(agent.groups)]
        reports: list[UpdateReport | None] = [None] * agent.groups
        alone = agent.alone()
        for row in torch.randperm(agent.groups, generator=rng).tolist():
            who = agent.who(row)

            own, _ = of_members(rows, _nothing(rows), who)
            own_targets = _MemberTargets(rows, targets, state.params, row, who, weight)
            after, reports[row] = self.region.update(
                alone, states[row], own, own_targets, hparams, rng, step
            )
            states[row] = after
            ratio = measure(alone, after.params, own, hparams.temperature).ratio
            moved = torch.where(ratio.weight > 0, ratio.ratio, 1.0)
            weight = weight * moved.reshape(len(weight), -1).prod(1)
        finished = [report for report in reports if report is not None]
        return OptimizerState(*map(torch.cat, zip(*states, strict=True))), _joined(agent, finished)


@dataclass(frozen=True, eq=False)
class _MemberTargets:
    """Targets of the agents of one row, with the critic at the parameters of the moment."""

    rows: Rows
    targets: TargetFunction
    params: Tensor
    row: int
    who: tuple[int, ...]
    weight: Tensor

    def __call__(self, params: Tensor) -> Targets:
        all_params = self.params.clone()
        all_params[self.row] = params[0]
        _, own = of_members(self.rows, self.targets(all_params), self.who)
        weight = self.weight.repeat_interleave(len(self.who))  # as `of_members` lays them
        return own._replace(advantage=own.advantage * weight)


def _nothing(rows: Rows) -> Targets:
    empty = torch.zeros_like(rows.log_prob)
    return Targets(empty, empty, empty[..., None])


def _joined(agent: Agent, reports: list[UpdateReport]) -> UpdateReport:
    """Average over agents; the largest of what warns, the sum of what counts."""
    tables = [report.metrics for report in reports]
    metrics = {key: math.fsum(table[key] for table in tables) / len(tables) for key in tables[0]}
    metrics["train/gate_log_ratio"] = max(table["train/gate_log_ratio"] for table in tables)
    for key in ("train/non_finite_gradients", "error/non_finite_ratio_count"):
        if key in metrics:
            metrics[key] *= len(tables)
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
        metrics,
        own,
    )
