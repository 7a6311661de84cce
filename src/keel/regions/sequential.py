"""Agents that learn one after the other, each aware of what those before it have become."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.models.agent import Agent
from keel.regions.certify import Region
from keel.regions.measure import measure
from keel.regions.objective import Objective
from keel.regions.stepper import OptimizerState, Step
from keel.rollout.batch import Rows, TargetFunction, Targets, of_members
from keel.types import HyperParams, UpdateReport


@dataclass(frozen=True)
class HAPPO:
    """In random order; the advantages of each are weighted by the ratios of those before it.

    So every agent improves on the joint policy as it is by then, not on one that no longer exists
    (Kuba et al. 2022, HAPPO). What is kept of each step is up to `Certified`, afterwards.
    """

    region: Region

    @property
    def objective(self) -> Objective:
        """The region's own."""
        return self.region.objective

    def init(self, agent: Agent) -> OptimizerState:
        """The region's own state."""
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
            lesson = _Lesson(rows, targets, state.params, row, who, weight)
            after, reports[row] = self.region.update(
                alone, states[row], own, lesson, hparams, rng, step
            )
            states[row] = after
            ratio = measure(alone, after.params, own, hparams.temperature).ratio
            moved = torch.where(ratio.weight > 0, ratio.ratio, 1.0)
            weight = weight * moved.reshape(len(weight), -1).prod(1)
        told = [report for report in reports if report is not None]
        return OptimizerState(*map(torch.cat, zip(*states, strict=True))), _joined(agent, told)


@dataclass(frozen=True, eq=False)
class _Lesson:
    """What the agents of one row learn, by a critic that is where it is by now."""

    rows: Rows
    targets: TargetFunction
    params: Tensor
    row: int
    who: tuple[int, ...]
    weight: Tensor

    def __call__(self, params: Tensor) -> Targets:
        everybody = self.params.clone()
        everybody[self.row] = params[0]
        _, learned = of_members(self.rows, self.targets(everybody), self.who)
        weight = self.weight.repeat_interleave(len(self.who))  # as `of_members` lays them
        return learned._replace(advantage=learned.advantage * weight)


def _nothing(rows: Rows) -> Targets:
    empty = torch.zeros_like(rows.log_prob)
    return Targets(empty, empty, empty[..., None])


def _joined(agent: Agent, reports: list[UpdateReport]) -> UpdateReport:
    """Means over agents; the largest of what warns, the sum of what counts."""
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
