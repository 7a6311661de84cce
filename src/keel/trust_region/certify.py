"""Certified updates: the exact KL is measured after every update, and held inside the bound."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from keel.errors import KeelError
from keel.experience.batch import Rows, TargetFunction
from keel.functional import Ratio, RatioReport, ratio_report, walk_back
from keel.losses.ppo import Objective
from keel.networks.agent import Agent
from keel.trust_region.gate import check_replay, is_due, is_odd
from keel.trust_region.measure import (
    Bounded,
    Measurement,
    demo_kl,
    group_mean,
    kl_metrics,
    measure,
)
from keel.types import POLICY, HyperParams, OptimizerState, UpdateReport

if TYPE_CHECKING:
    from keel.algorithms.optimizer import Step


class Region(Protocol):
    """A trust-region algorithm, which improves a policy on one rollout."""

    @property
    def objective(self) -> Objective:
        """The objective that it improves."""

    def init(self, agent: Agent) -> OptimizerState:
        """Return the optimizer before the first update."""

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
        """Improve the policy; the report's KL is left to `Certified`.

        Args:
            agent: the agent.
            state: parameters `[G, P]` and optimizer that sampled the rows.
            rows: the rollout, `[R, *rest]`.
            targets: maps parameters to advantages and value targets.
            hparams: values in force during this update.
            rng: source of the shuffling.
            step: one step of the optimizer.
        """


@dataclass(frozen=True)
class Certified:
    """A wrapped region: afterwards mean KL(old‖new) ≤ `HyperParams.max_kl` for every group.

    Old is the policy that sampled, as it sampled: its statistics, its temperature. New is the one
    that acts next. Where either has a temperature, the bound holds without it, too. It speaks of
    the states of this rollout; of states never seen it can say nothing.
    """

    region: Region
    enforce: bool = True
    """False: measure and report, but leave the update as it is"""
    gate: bool = True
    """refuse to learn from another policy's actions"""

    def init(self, agent: Agent) -> OptimizerState:
        """Return the region's own state."""
        if not agent.dist.exact:
            raise KeelError(
                f"certification: {type(agent.dist).__name__} has no closed-form KL; "
                "an estimate cannot certify a bound"
            )
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
        number: int = 0,
    ) -> tuple[OptimizerState, UpdateReport]:
        """Update, measure, and walk back what is over the bound.

        Args:
            agent: whose policy it is.
            state: parameters and optimizer that sampled the rows.
            rows: the rollout.
            targets: advantages and what the critic learns.
            hparams: those of this update; the temperature is that of the policy acting next.
            rng: for shuffling.
            step: one step of the optimizer.
            number: of the update, from 0: the gate looks at all rows in some of them.
        """
        began = time.perf_counter()
        gate = _Gate(agent, state.params, rows, hparams, self.gate)
        if is_due(number):
            gate.look()
        gate_seconds = time.perf_counter() - began
        after, report = self.region.update(agent, state, rows, targets, hparams, rng, step)
        updated = time.perf_counter()
        bounded = Bounded(agent, state.params, rows, hparams.temperature)
        measured = measure(agent, after.params, rows, hparams.temperature)
        requested = kl = bounded.kl(after.params, measured.kl)
        gate.look_again(report.metrics["train/gate_log_ratio"], requested)
        fraction, certify_seconds = torch.ones_like(requested), time.perf_counter() - updated
        if self.enforce and not bool((requested <= hparams.max_kl).all()):
            fraction = _share_to_keep(bounded, state, after, hparams.max_kl, requested)
            after = _walk(agent, state, after, fraction)
            began = time.perf_counter()  # walking back, where it was needed, is apart
            measured = measure(agent, after.params, rows, hparams.temperature)
            kl = bounded.kl(after.params, measured.kl)
            certify_seconds += time.perf_counter() - began
        verdict = _verdict(report, fraction)
        own, metrics = self._measures(measured, rows, hparams)
        metrics = {
            **report.metrics,
            **metrics,
            **gate.metrics,
            "train/kl_exact": kl.max().item(),
            "train/kl_requested": requested.max().item(),
            "train/kl_step": kl.max().item() if verdict != "rejected" else float("nan"),
            "train/entropy_is_exact": float(agent.dist.exact_entropy),
            "train/alpha": (report.alpha * fraction).min().item(),
            "train/walk_back": float(verdict != "accepted"),
        }
        if rows.demos is not None:
            metrics["train/kl_demos"] = demo_kl(
                agent, state.params, after.params, rows.demos, hparams.temperature
            )
        metrics["time/certify_seconds"] = certify_seconds
        metrics["time/gate_seconds"] = gate_seconds
        return after, replace(
            report,
            kl_exact=kl,
            kl_requested=requested,
            alpha=report.alpha * fraction,
            verdict=verdict,
            reason=_reason(report, requested, fraction),
            metrics=metrics,
            agents={**report.agents, **own},
        )

    def _measures(
        self, measured: Measurement, rows: Rows, hparams: HyperParams
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return metrics of every agent for itself, and of all together."""
        ratios = ratio_report(measured.ratio, max_log_ratio=self.region.objective.max_log_ratio)
        entropy = group_mean(measured.entropy, rows)
        outside = group_mean(_outside(measured.ratio, hparams), rows)
        own = {
            "train/kl_exact": group_mean(measured.kl, rows),
            "train/entropy": entropy,
            "train/ratio_outside": outside,
        }
        return {} if rows.group_axis is None else own, {
            **kl_metrics(measured, rows),
            **_ratio_quantiles(measured.ratio.ratio, measured.ratio.weight),
            **_warnings(ratios),
            "train/entropy": entropy.mean().item(),
            "train/log_ratio_max": ratios.max_abs_log_ratio.item(),
            "train/ratio_outside": outside.mean().item(),
            "train/ratio_min": ratios.ratio_min.item(),
            "train/ratio_max": ratios.ratio_max.item(),
            "train/effective_sample_size": ratios.effective_sample_size.item(),
            "train/kl_is_exact": 1.0,
            "train/max_kl": hparams.max_kl,
        }


@dataclass
class _Gate:
    """The consistency gate of one update."""

    agent: Agent
    params: Tensor
    rows: Rows
    hparams: HyperParams
    enforce: bool
    gap: float = math.nan
    all_rows: bool = False

    def look(self) -> None:
        """Replay all rows."""
        temperature = self.hparams.temperature
        self.gap = check_replay(self.agent, self.params, self.rows, temperature, self.enforce)
        self.all_rows = True

    def look_again(self, gap: float, requested: Tensor) -> None:
        """Take the gap of the objective's first pass, and replay all rows if it is odd."""
        if self.all_rows:
            return
        as_sampled = self.rows.sampled is None
        if as_sampled:
            self.gap = gap
        if is_odd(self.gap, requested, self.hparams.max_kl) or (as_sampled and math.isnan(gap)):
            self.look()

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the gate; NaN where nothing was looked at."""
        return {
            "train/gate_log_ratio": self.gap,
            "train/gate_all_rows": float(self.all_rows),
        }


def _share_to_keep(
    bounded: Bounded, old: OptimizerState, new: OptimizerState, max_kl: float, requested: Tensor
) -> Tensor:
    """Return the share of each group's step whose KL is inside the bound, `[G]`."""

    def kl_at(fraction: Tensor) -> Tensor:
        return bounded.kl(_interpolate(bounded.agent, old.params, new.params, fraction))

    return walk_back(kl_at, max_kl, requested.shape[0], requested=requested).fraction


def _reason(report: UpdateReport, requested: Tensor, fraction: Tensor) -> str:
    if not bool(requested.isfinite().all()):
        return "the exact KL was not finite"
    return "the exact KL was above max_kl" if bool((fraction < 1.0).any()) else report.reason


Verdict = Literal["accepted", "walked_back", "rejected"]


def _verdict(report: UpdateReport, fraction: Tensor) -> Verdict:
    """Return the verdict: a rejection by the region stays, the rest is by the share kept."""
    if report.verdict == "rejected" or bool((fraction == 0.0).all()):
        return "rejected"
    return "walked_back" if bool((fraction < 1.0).any()) else "accepted"


def _interpolate(agent: Agent, old: Tensor, new: Tensor, fraction: Tensor) -> Tensor:
    """Return old + fraction·(new − old) in the policy's columns; exactly `old` at 0, `new` at 1."""
    share = fraction.to(new)[:, None]
    between = torch.where(
        share == 1.0, new, torch.where(share == 0.0, old, old + share * (new - old))
    )
    return torch.where(agent.policy_columns, between, new)


def _walk(
    agent: Agent, old: OptimizerState, new: OptimizerState, fraction: Tensor
) -> OptimizerState:
    """Walk parameters back, and Adam with them: its first moment is scaled by the share kept.

    A policy that keeps nothing is restored bit for bit, moments and step count included. No exact
    repair exists for the rest: scaling the momentum keeps it from pushing through the bound again.
    """
    share = fraction.to(new.first)[:, None]
    nothing = share == 0.0
    none = nothing & agent.policy_columns
    together = bool(agent.policy_columns.all())  # a critic on the same trunk goes back as well
    kinds = POLICY.to(old.steps.device) | together
    first = torch.where(agent.policy_columns, share * new.first, new.first)
    return OptimizerState(
        params=_interpolate(agent, old.params, new.params, fraction),
        first=torch.where(none, old.first, first),
        second=torch.where(none, old.second, new.second),
        steps=torch.where(nothing & kinds, old.steps, new.steps),
    )


def _outside(ratio: Ratio, hparams: HyperParams) -> Tensor:
    """Return 1 for ratios beyond the clip range, whatever their advantage."""
    low, high = 1.0 - hparams.clip_low, 1.0 + hparams.clip_high
    return ((ratio.ratio < low) | (ratio.ratio > high)).double()


def _warnings(ratios: RatioReport) -> dict[str, float]:
    """Return alarms about the ratios, each NaN while there is nothing to warn of."""
    largest, smallest = ratios.ratio_max.item(), ratios.ratio_min.item()
    extreme = largest > 100.0 or smallest < 0.01
    size, nan = ratios.max_abs_log_ratio.item(), float("nan")
    share = ratios.non_finite_share.item()
    return {
        "warn/large_log_ratio": size if size > 5.0 else nan,
        "warn/extreme_ratio_max": largest if extreme else nan,
        "warn/extreme_ratio_min": smallest if extreme else nan,
        "warn/ratio_all_nonfinite": float(share == 1.0),
        "error/non_finite_ratio_frac": share,
    }


def _ratio_quantiles(ratio: Tensor, weight: Tensor) -> dict[str, float]:
    counted = ratio[weight > 0]
    if not counted.numel():
        return {}
    levels = torch.tensor([0.01, 0.5, 0.99], dtype=counted.dtype, device=counted.device)
    low, middle, high = torch.quantile(counted, levels).tolist()
    return {"train/ratio_p01": low, "train/ratio_p50": middle, "train/ratio_p99": high}
