"""The first-order trust regions: PPO's clip, a KL penalty, or both, in epochs of minibatches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from keel.algorithms.optimizer import Step, StepResult, initial_opt_state
from keel.algorithms.penalties import check_penalties
from keel.experience.batch import Rows, TargetFunction, minibatches, wiped
from keel.losses.demos import Limit, Pull, cloning_metrics, pull
from keel.losses.ppo import Batch, Objective, Statistics
from keel.networks.agent import Agent
from keel.trust_region.gate import GATE, check_objective, replay_gap
from keel.trust_region.numeric import BAD_STEPS, not_finite
from keel.types import HyperParams, OptimizerState, Tree, UpdateReport

EarlyStop = Literal["off", "minibatch", "epoch"]
STOP_FACTOR = 1.5
"""Early stopping sets in at 1.5 × target."""


@dataclass(frozen=True)
class PPO:
    """PPO: `epochs` passes over the rollout in shuffled minibatches (Schulman et al. 2017).

    The clip is `Objective.surrogate`, the penalty `HyperParams.kl_coef`. Neither bounds the KL:
    that is what `Certified` is for.
    """

    epochs: int = 4
    minibatch: int = 256
    """rows of a minibatch"""
    early_stop: EarlyStop = "off"
    """stop at `STOP_FACTOR` × `target_kl`: before a minibatch's step, or after an epoch"""
    target_kl: float | None = None
    recompute_advantages: bool = False
    """compute advantages anew for every epoch, with the critic as it is by then"""
    max_grad_norm: float = 0.5
    objective: Objective = field(default_factory=Objective)
    gate: bool = True
    """refuse to learn where the objective sees another policy than a replay does, or where a
    penalty has no gradient"""
    limit: Limit | None = None
    """on what demonstrations may do"""

    def init(self, agent: Agent) -> OptimizerState:
        """Return the optimizer before the first update."""
        return initial_opt_state(agent.initial)

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
        """Improve on one rollout; the report holds means over the minibatches taken."""
        groups = state.params.shape[0]
        device = state.params.device
        active = torch.ones(groups, dtype=torch.bool, device=device)
        hparam_values = hparams.tensor().to(device)
        records: list[_StepRecord] = []
        stopped_at, stop_kl, epoch = -1, float("nan"), 0
        batch, skipped, gap = None, 0, 0.0
        pulled: Pull | None = None
        for epoch in range(self.epochs):
            if batch is None or self.recompute_advantages:
                newborn = batch is None and not bool(state.steps.any())
                batch = _batch(agent, rows, targets, state.params, batch)
                if newborn and self.gate:
                    axis = rows.group_axis
                    check_penalties(agent, self.objective, state.params, batch, hparams, axis)
            if pulled is None and rows.demos is not None:
                pulled = pull(agent, state.params, rows, batch.advantage, hparams)
                hparams = hparams if self.limit is None else self.limit(hparams, pulled)
                hparam_values = hparams.tensor().to(device)
            in_epoch = len(records)
            for index, real in minibatches(rows.count, self.minibatch, rng):
                index, real = index.to(device), real.to(device)
                result = step(state, batch, index, real, hparam_values, active)
                if not records:
                    gap = result.statistics.log_ratio_max.max().item()
                    if not gap <= GATE:
                        first = batch.take(index, real)
                        replayed = replay_gap(agent, state.params, first, hparams)
                        check_objective(gap, replayed, self.gate)
                        gap = max(gap, replayed) if math.isfinite(gap) else replayed
                records.append(_StepRecord(result.statistics, result.gradient_norm))
                if not math.isfinite(result.gradient_norm.sum().item()):
                    skipped = self._skip(result, state, batch.take(index, real), skipped + 1)
                over = None
                if self.early_stop == "minibatch":
                    over = self._over(agent.worst(result.statistics.kl))
                if over is not None and over.any():
                    # That KL was there before the step: the step is not taken.
                    state = _where(over, state, result.opt_state)
                    active = active & ~over
                    if not active.any():
                        break
                else:
                    state = result.opt_state
            kl = records[-1].statistics.kl
            if self.early_stop == "epoch":
                kl = torch.stack([r.statistics.kl for r in records[in_epoch:]]).mean(0)
                active = active & ~self._over(agent.worst(kl))
            if self.early_stop != "off" and not active.any():
                stopped_at, stop_kl = epoch, kl.max().item()
                break
        metrics = _summary(records, self.max_grad_norm)
        complete = stopped_at < 0 or self.early_stop == "epoch"
        metrics["train/epochs"] = float(epoch + 1 if complete else epoch)
        metrics["train/early_stop_epoch"] = float(stopped_at) if stopped_at >= 0 else float("nan")
        metrics["train/early_stop_kl"] = stop_kl
        metrics["train/gate_log_ratio"] = gap
        if pulled is not None:
            cloned = torch.stack([t.statistics.bc_loss for t in records]).mean().item()
            metrics |= cloning_metrics(pulled, hparams, metrics["train/policy_loss"], cloned)
        nothing = torch.zeros(groups, dtype=torch.float64)
        whole_step = torch.ones(groups, dtype=torch.float64)
        own = {} if rows.group_axis is None else _by_agent(records)
        return state, UpdateReport(nothing, nothing, whole_step, metrics=metrics, agents=own)

    def _skip(self, result: StepResult, state: OptimizerState, rows: Batch, skipped: int) -> int:
        """Count a step that was not taken; raise after too many, or if the loss is not finite."""
        finite = bool(result.statistics.loss.isfinite().all())
        if finite and skipped < BAD_STEPS:
            return skipped
        what = "the gradient" if finite else "the loss"
        raise not_finite(what, skipped, state.params, _tensors(rows))

    def _over(self, kl: Tensor) -> Tensor:
        limit = float("inf") if self.target_kl is None else STOP_FACTOR * self.target_kl
        return kl > limit


def _batch(
    agent: Agent, rows: Rows, targets: TargetFunction, params: Tensor, before: Batch | None
) -> Batch:
    """Return all rows with their targets; the value clip is around values of the first epoch."""
    with torch.no_grad():
        epoch_targets = targets(params)
    if before is None:
        rows = replace(rows, obs=_without_nan(rows))
    return Batch(
        obs=rows.obs if before is None else before.obs,
        behavior=rows.behavior,
        action=rows.action,
        log_prob=rows.log_prob,
        advantage=epoch_targets.advantage,
        target=agent.target_of(params, epoch_targets.target),
        old_value=epoch_targets.raw if before is None else before.old_value,
        weight=rows.weight,
        demos=rows.demos,
    )


def _without_nan(rows: Rows) -> Tree:
    """Return observations without NaN: rows that do not count may hold anything."""
    counts = rows.weight > 0
    if bool(counts.all()):
        return rows.obs
    return {key: wiped(x, counts) for key, x in rows.obs.items()}


def _tensors(rows: Batch) -> Tree:
    """Return all of a minibatch, flat and named, as floats."""
    flat: Tree = {}
    parts = rows._asdict()
    demos = parts.pop("demos")
    if demos is not None:
        parts |= {f"shown.{name}": x for name, x in demos._asdict().items()}
    for name, x in parts.items():
        flat |= {f"{name}.{k}": v for k, v in x.items()} if isinstance(x, dict) else {name: x}
    return {name: x.detach().float() for name, x in flat.items()}


def _where(condition: Tensor, a: OptimizerState, b: OptimizerState) -> OptimizerState:
    rows = condition[:, None]
    return OptimizerState(
        torch.where(rows, a.params, b.params),
        torch.where(rows, a.first, b.first),
        torch.where(rows, a.second, b.second),
        torch.where(rows, a.steps, b.steps),
    )


class _StepRecord(NamedTuple):
    """Statistics of a step; not its parameters, which a CNN has by the million."""

    statistics: Statistics
    gradient_norm: Tensor


def _by_agent(records: list[_StepRecord]) -> dict[str, Tensor]:
    """Average over minibatches, `[A]` each."""

    def mean(values: list[Tensor]) -> Tensor:
        return torch.stack(values).mean(0).double().cpu()

    statistics = [result.statistics for result in records]
    return {
        "train/policy_loss": mean([s.policy_loss for s in statistics]),
        "train/value_loss": mean([s.value_loss for s in statistics]),
        "train/clip_fraction": mean([s.clip_fraction for s in statistics]),
    }


def _summary(records: list[_StepRecord], max_grad_norm: float) -> dict[str, float]:
    """Average over minibatches and groups; counts are summed."""

    def mean(values: list[Tensor]) -> float:
        return torch.stack(values).mean().item()

    statistics = [result.statistics for result in records]
    norms = torch.stack([result.gradient_norm for result in records])
    return {
        "train/loss": mean([s.loss for s in statistics]),
        "train/policy_loss": mean([s.policy_loss for s in statistics]),
        "train/value_loss": mean([s.value_loss for s in statistics]),
        "train/clip_fraction": mean([s.clip_fraction for s in statistics]),
        "train/gradient_norm": norms[torch.isfinite(norms)].mean().item(),
        "train/gradient_clipped": (norms > max_grad_norm).double().mean().item(),
        "train/non_finite_gradients": float((~torch.isfinite(norms)).sum().item()),
        "error/non_finite_ratio_count": sum(s.non_finite.sum().item() for s in statistics),
    }
