"""First-order updates: PPO's clip, a KL penalty, or both, in epochs of minibatches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from keel.algorithms.optimizer import Loss, Minibatch, Step, StepResult, initial_opt_state
from keel.errors import KeelError
from keel.experience.batch import Batch, Experience, minibatches
from keel.losses.ppo import Objective, Statistics
from keel.networks.agent import Agent
from keel.trust_region.gate import BAD_STEPS, GATE, check_objective, not_finite, replay_gap
from keel.types import AlgorithmState, HyperParams, OptimizerState, Tree, UpdateReport

if TYPE_CHECKING:
    from keel.losses.demos import Limit, Pull
    from keel.losses.token import TokenObjective

EarlyStop = Literal["off", "minibatch", "epoch"]
STOP_FACTOR = 1.5
"""Early stopping sets in at 1.5 × target."""
MEANS = ("policy_loss", "value_loss", "clip_fraction")
"""Statistics whose means are metrics, also of every agent for itself."""
PENALTIES = {
    "entropy_coef": "the entropy bonus",
    "kl_coef": "the KL penalty",
    "bc_coef": "the loss on demonstrations",
}
"""Coefficients that a loss may multiply a term with."""
ROWS = 64
"""Rows that are enough to tell a gradient from none."""
NEARBY = 1e-3
"""Standard deviation of the parameters around those that sampled: there a KL is 0, and flat."""


class DeadPenaltyError(KeelError):
    """A configured penalty has no gradient: a term that changes the loss and not its gradient.

    An entropy floor built on `entropy.item()` is one: the loss rises, the policy never feels it,
    and the log looks as if it did.
    """


@dataclass(frozen=True, eq=False)
class PPO:
    """PPO: `epochs` passes over the rollout in shuffled minibatches (Schulman et al. 2017).

    The clip is `Objective.surrogate`, the penalty `HyperParams.kl_coef`. Neither bounds the KL:
    that is what `Certified` is for.
    """

    agent: Agent
    step: Step
    """one step of the optimizer on the objective"""
    epochs: int = 4
    minibatch: int = 256
    """rows of a minibatch"""
    early_stop: EarlyStop = "off"
    """stop at `STOP_FACTOR` × `target_kl`: before a minibatch's step, or after an epoch"""
    target_kl: float | None = None
    recompute_advantages: bool = False
    """compute advantages anew for every epoch, with the critic as it is by then"""
    max_grad_norm: float = 0.5
    objective: Objective | TokenObjective = field(default_factory=Objective)
    gate: bool = True
    """refuse to learn where the objective sees another policy than a replay does, or where a
    penalty has no gradient"""
    limit: Limit | None = None
    """on what demonstrations may do"""

    def init(self) -> OptimizerState:
        """Return the optimizer before the first update."""
        return initial_opt_state(self.agent.initial)

    def update(
        self, state: AlgorithmState, experience: Experience, hparams: HyperParams
    ) -> tuple[AlgorithmState, UpdateReport]:
        """Improve on one rollout; the report holds means over the minibatches taken."""
        opt_state, pulled = state.opt_state, None
        batch = self._in_units(opt_state.params, experience.batch.without_nan())
        if self.gate and not bool(opt_state.steps.any()):
            check_penalties(self.agent, self.objective, opt_state.params, batch, hparams)
        if batch.demos is not None:
            from keel.losses.demos import pull

            pulled = pull(self.agent, opt_state.params, batch, hparams)
            hparams = hparams if self.limit is None else self.limit(hparams, pulled)
        device = opt_state.params.device
        active = torch.ones(opt_state.params.shape[0], dtype=torch.bool, device=device)
        progress = _Progress(
            opt_state, hparams.tensor().to(device), hparams.temperature, active, []
        )
        for epoch in range(self.epochs):
            if epoch and self.recompute_advantages:
                anew = experience.by_critic(progress.opt_state.params)
                anew = self._in_units(progress.opt_state.params, anew)
                batch = batch._replace(advantage=anew.advantage, target=anew.target)
            progress = self._epoch(progress, batch, state.rng, epoch)
            if progress.stopped_at >= 0:
                break
        return (
            replace(state, opt_state=progress.opt_state),
            self._report(progress, hparams, batch, pulled),
        )

    def _in_units(self, params: Tensor, batch: Batch) -> Batch:
        """Return the batch with targets in the units of the critic."""
        return batch._replace(target=self.agent.target_of(params, batch.target))

    def _epoch(
        self, progress: _Progress, batch: Batch, rng: torch.Generator, epoch: int
    ) -> _Progress:
        """Take all minibatches once, or as many as early stopping lets pass."""
        device, first = batch.weight.device, len(progress.records)
        for index, real in minibatches(batch.rows, self.minibatch, rng):
            chosen = index.to(device), real.to(device)
            minibatch = Minibatch(batch, *chosen, progress.hparams, progress.active)
            progress = self._minibatch(progress, minibatch)
            if self.early_stop == "minibatch" and not progress.active.any():
                break
        active, kl = progress.active, progress.records[-1].statistics.kl
        if self.early_stop == "epoch":
            kl = torch.stack([r.statistics.kl for r in progress.records[first:]]).mean(0)
            active = active & ~self._over(self.agent.worst(kl))
        stopped = self.early_stop != "off" and not active.any()
        return progress._replace(
            active=active,
            epochs=epoch + 1,
            stopped_at=epoch if stopped else -1,
            stop_kl=kl.max().item() if stopped else math.nan,
        )

    def _minibatch(self, progress: _Progress, minibatch: Minibatch) -> _Progress:
        """Take one step, for every group that did not stop."""
        before, active, skipped = progress.opt_state, progress.active, progress.skipped
        result = self.step(before, minibatch)
        gap = progress.gap if progress.records else self._gate(result, minibatch, progress)
        if not math.isfinite(result.gradient_norm.sum().item()):
            skipped += 1
            _check_finite(result, before, minibatch.taken, skipped)
        after, over = result.opt_state, None
        if self.early_stop == "minibatch":
            over = self._over(self.agent.worst(result.statistics.kl))
        if over is not None and over.any():
            # That KL was there before the step: the step is not taken.
            after, active = _where(over, before, after), active & ~over
        progress.records.append(_StepRecord(result.statistics, result.gradient_norm))
        return progress._replace(opt_state=after, active=active, skipped=skipped, gap=gap)

    def _gate(self, result: StepResult, minibatch: Minibatch, progress: _Progress) -> float:
        """Return the largest |log-ratio| of the first minibatch, before its step."""
        gap = result.statistics.log_ratio_max.max().item()
        if gap <= GATE:
            return gap
        params, temperature = progress.opt_state.params, progress.temperature
        replayed = replay_gap(self.agent, params, minibatch.taken, temperature)
        check_objective(gap, replayed, self.gate)
        return max(gap, replayed) if math.isfinite(gap) else replayed

    def _over(self, kl: Tensor) -> Tensor:
        limit = float("inf") if self.target_kl is None else STOP_FACTOR * self.target_kl
        return kl > limit

    def _report(
        self, progress: _Progress, hparams: HyperParams, batch: Batch, pulled: Pull | None
    ) -> UpdateReport:
        stopped, statistics = progress.stopped_at >= 0, _stacked(progress.records)
        metrics = _summary(progress.records, statistics, self.max_grad_norm)
        complete = not stopped or self.early_stop == "epoch"
        metrics["train/epochs"] = float(progress.epochs if complete else progress.epochs - 1)
        metrics["train/early_stop_epoch"] = float(progress.stopped_at) if stopped else math.nan
        metrics["train/early_stop_kl"] = progress.stop_kl
        metrics["train/gate_log_ratio"] = progress.gap
        if pulled is not None:
            from keel.losses.demos import cloning_metrics

            cloned = statistics.bc_loss.mean().item()
            metrics |= cloning_metrics(pulled, hparams, metrics["train/policy_loss"], cloned)
        groups = progress.opt_state.params.shape[0]
        nothing = torch.zeros(groups, dtype=torch.float64)
        whole_step = torch.ones(groups, dtype=torch.float64)
        own = {}
        if batch.group_axis is not None:
            own = {f"train/{x}": getattr(statistics, x).mean(0).double().cpu() for x in MEANS}
        return UpdateReport(nothing, nothing, whole_step, metrics=metrics, agents=own)


class _StepRecord(NamedTuple):
    """Statistics of a step; not its parameters, which a CNN has by the million."""

    statistics: Statistics
    gradient_norm: Tensor


class _Progress(NamedTuple):
    """An update that is under way."""

    opt_state: OptimizerState
    hparams: Tensor
    """values in the order of `HPARAM_INDEX`"""
    temperature: float
    active: Tensor
    """`[G]` bool: the groups that did not stop"""
    records: list[_StepRecord]
    skipped: int = 0
    """steps that were not taken, for want of a finite gradient"""
    gap: float = 0.0
    """the largest |log-ratio| before the first step"""
    epochs: int = 0
    stopped_at: int = -1
    """the epoch in which all groups stopped"""
    stop_kl: float = math.nan


def _check_finite(result: StepResult, state: OptimizerState, batch: Batch, skipped: int) -> None:
    """Raise after too many steps that were not taken, or if the loss is not finite."""
    finite = bool(result.statistics.loss.isfinite().all())
    if finite and skipped < BAD_STEPS:
        return
    what = "the gradient" if finite else "the loss"
    raise not_finite(what, skipped, state.params, _tensors(batch))


def _tensors(batch: Batch) -> Tree:
    """Return all of a minibatch, flat and named, as floats."""
    flat: Tree = {}
    parts = {name: x for name, x in batch._asdict().items() if isinstance(x, Tensor | dict)}
    if batch.demos is not None:
        parts |= {f"demos.{name}": x for name, x in batch.demos._asdict().items()}
    for name, x in parts.items():
        flat |= {f"{name}.{k}": v for k, v in x.items()} if isinstance(x, dict) else {name: x}
    return {name: x.detach().float() for name, x in flat.items()}


def _where(condition: Tensor, a: OptimizerState, b: OptimizerState) -> OptimizerState:
    rows = condition[:, None]
    return OptimizerState(*(torch.where(rows, x, y) for x, y in zip(a, b, strict=True)))


def _summary(
    records: list[_StepRecord], statistics: Statistics, max_grad_norm: float
) -> dict[str, float]:
    """Average over minibatches and groups; counts are summed."""
    norms = torch.stack([record.gradient_norm for record in records])
    return {
        **{f"train/{name}": getattr(statistics, name).mean().item() for name in ("loss", *MEANS)},
        "train/gradient_norm": norms[torch.isfinite(norms)].mean().item(),
        "train/gradient_clipped": (norms > max_grad_norm).double().mean().item(),
        "train/non_finite_gradients": float((~torch.isfinite(norms)).sum().item()),
        "error/non_finite_ratio_count": statistics.non_finite.sum().item(),
    }


def _stacked(records: list[_StepRecord]) -> Statistics:
    """Return the statistics of all minibatches, `[M, G]` each."""
    fields = zip(*(record.statistics for record in records), strict=True)
    return Statistics(*(torch.stack(x) for x in fields))


def check_penalties(
    agent: Agent,
    loss: Loss,
    params: Tensor,
    batch: Batch,
    hparams: HyperParams,
) -> None:
    """Raise if a coefficient changes the loss of some rows and not its gradient.

    Args:
        agent: whose policy it is.
        loss: (agent, parameters, rows, hparams) to a loss per group and statistics.
        params: `[G, P]`.
        batch: a rollout with what it teaches; its first rows are used.
        hparams: as they are.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(params.shape, generator=generator, dtype=params.dtype).to(params.device)
    near = params + NEARBY * noise
    some = batch.split(min(ROWS, batch.rows))[0]

    def evaluate(values: HyperParams) -> tuple[Tensor, Tensor]:
        leaf = near.detach().requires_grad_()
        total = loss(agent, leaf, some, values.tensor().to(params.device))[0].sum()
        return total.detach(), torch.autograd.grad(total, leaf)[0]

    set_now = [name for name in PENALTIES if getattr(hparams, name) != 0.0]
    if not set_now:
        return
    value, gradient = evaluate(hparams)
    for name in set_now:
        without, plain = evaluate(replace(hparams, **{name: 0.0}))
        if bool(value.isfinite()) and value != without and torch.equal(gradient, plain):
            raise DeadPenaltyError(
                f"{name}: {PENALTIES[name]} changes the loss ({without.item():.4g} without, "
                f"{value.item():.4g} with it) but its gradient is exactly 0: the policy never "
                "feels it. Build it from tensors that carry a gradient, not from numbers"
            )
