"""Certified updates: the exact KL is measured after every update, and held inside the bound."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from keel.errors import KeelError
from keel.experience.batch import Batch, Experience
from keel.functional.ratio import Ratio, RatioReport, ratio_report
from keel.functional.walk_back import walk_back
from keel.losses.ppo import Objective
from keel.networks.agent import Agent
from keel.trust_region.gate import check_replay, is_due, is_odd
from keel.trust_region.measure import Bounded, Measurement, demo_kl, group_mean, kl_metrics, measure
from keel.types import AlgorithmState, HyperParams, OptimizerState, UpdateReport

if TYPE_CHECKING:
    from keel.losses.token import TokenObjective


POLICY = torch.tensor([True, False])
"""Mask of `OptimizerState.steps`: the policy's."""


class Algorithm(Protocol):
    """A trust-region algorithm: it owns agent, loss and optimizer step, and improves a policy on
    one rollout at a time."""

    @property
    def agent(self) -> Agent:
        """The agent that it improves."""

    @property
    def objective(self) -> Objective | TokenObjective:
        """The objective that it improves."""

    def init(self) -> OptimizerState:
        """Return the optimizer before the first update."""

    def update(
        self, state: AlgorithmState, experience: Experience, hparams: HyperParams
    ) -> tuple[AlgorithmState, UpdateReport]:
        """Improve the policy; the report's KL is left to `Certified`.

        Args:
            state: optimizer with the parameters `[G, P]` that sampled, and the source of shuffling.
            experience: the rollout, rows `[R, *rest]` with targets.
            hparams: values in force during this update.
        """


@dataclass(frozen=True, eq=False)
class Wrapper:
    """What is around an algorithm, of which it has agent, objective and state."""

    algorithm: Algorithm

    @property
    def agent(self) -> Agent:
        """The algorithm's own agent."""
        return self.algorithm.agent

    @property
    def objective(self) -> Objective | TokenObjective:
        """The algorithm's own objective."""
        return self.algorithm.objective

    def init(self) -> OptimizerState:
        """Return the algorithm's own state."""
        return self.algorithm.init()


@dataclass(frozen=True, eq=False)
class Certified(Wrapper):
    """A wrapped algorithm: afterwards mean KL(old‖new) ≤ `HyperParams.max_kl` for every group.

    Old is the policy that sampled, as it sampled: its statistics, its temperature. New is the one
    that acts next. Where either has a temperature, the bound holds without it, too. It speaks of
    the states of this rollout; of states never seen it can say nothing.
    """

    enforce: bool = True
    """False: measure and report, but leave the update as it is"""
    gate: bool = True
    """refuse to learn from another policy's actions"""

    def init(self) -> OptimizerState:
        """Return the algorithm's own state."""
        if not self.agent.dist.exact:
            raise KeelError(
                f"certification: {type(self.agent.dist).__name__} has no closed-form KL; "
                "an estimate cannot certify a bound"
            )
        return self.algorithm.init()

    def update(
        self, state: AlgorithmState, experience: Experience, hparams: HyperParams
    ) -> tuple[AlgorithmState, UpdateReport]:
        """Update, measure, and walk back what is over the bound.

        Args:
            state: optimizer with the parameters that sampled; by the number of its updates the gate
                looks at all rows in some of them.
            experience: the rollout.
            hparams: those of this update; the temperature is that of the policy acting next.
        """
        batch, old = experience.batch, state.opt_state
        began = time.perf_counter()
        gate = _Gate(self.agent, old.params, batch, hparams, self.gate)
        if is_due(state.updates):
            gate.look()
        gate_seconds = time.perf_counter() - began
        updated, report = self.algorithm.update(state, experience, hparams)
        began = time.perf_counter()
        bounded = Bounded(self.agent, old.params, batch, hparams.temperature)
        measured = measure(self.agent, updated.opt_state.params, batch, hparams.temperature)
        requested = bounded.kl(updated.opt_state.params, measured.kl)
        gate.look_again(report.metrics["train/gate_log_ratio"], requested)
        certificate = _Certificate(
            updated.opt_state, measured, requested, requested, torch.ones_like(requested)
        )
        certify_seconds = time.perf_counter() - began
        if self.enforce and not bool((requested <= hparams.max_kl).all()):
            certificate = _walked_back(bounded, old, certificate, hparams)
            certify_seconds += certificate.seconds  # walking back, where it was needed, is apart
        after = replace(updated, opt_state=certificate.opt_state, updates=state.updates + 1)
        report = self._reported(report, certificate, batch, hparams)
        metrics = {
            **report.metrics,
            **gate.metrics,
            "time/certify_seconds": certify_seconds,
            "time/gate_seconds": gate_seconds,
        }
        if batch.demos is not None:
            metrics["train/kl_demos"] = demo_kl(
                self.agent, old.params, after.opt_state.params, batch.demos, hparams.temperature
            )
        return after, replace(report, metrics=metrics)

    def _reported(
        self, report: UpdateReport, certificate: _Certificate, batch: Batch, hparams: HyperParams
    ) -> UpdateReport:
        """Return the algorithm's report with what was measured of the policy that was kept."""
        requested, kl, fraction = certificate.requested, certificate.kl, certificate.fraction
        verdict = _verdict(report, fraction)
        own, metrics = self._measures(certificate.measured, batch, hparams)
        metrics = {
            **report.metrics,
            **metrics,
            "train/kl_exact": kl.max().item(),
            "train/kl_requested": requested.max().item(),
            "train/kl_step": kl.max().item() if verdict != "rejected" else float("nan"),
            "train/entropy_is_exact": float(self.agent.dist.exact_entropy),
            "train/alpha": (report.alpha * fraction).min().item(),
            "train/walk_back": float(verdict != "accepted"),
        }
        return replace(
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
        self, measured: Measurement, batch: Batch, hparams: HyperParams
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return metrics of every agent for itself, and of all together."""
        ratios = ratio_report(measured.ratio, max_log_ratio=self.objective.max_log_ratio)
        entropy = group_mean(measured.entropy, batch)
        outside = group_mean(_outside(measured.ratio, hparams), batch)
        own = {
            "train/kl_exact": group_mean(measured.kl, batch),
            "train/entropy": entropy,
            "train/ratio_outside": outside,
        }
        return {} if batch.group_axis is None else own, {
            **kl_metrics(measured, batch),
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


class _Certificate(NamedTuple):
    """The policy that is kept, and how much of the step that was asked for."""

    opt_state: OptimizerState
    measured: Measurement
    requested: Tensor
    """`[G]`, the KL of the whole step"""
    kl: Tensor
    """`[G]`, that of the step that was kept"""
    fraction: Tensor
    """`[G]`, the share of it"""
    seconds: float = 0.0
    """that measuring it again took"""


def _walked_back(
    bounded: Bounded, old: OptimizerState, asked: _Certificate, hparams: HyperParams
) -> _Certificate:
    """Return the largest share of a step that is inside the bound."""
    agent, new, requested = bounded.agent, asked.opt_state, asked.requested

    def kl_at(fraction: Tensor) -> Tensor:
        return bounded.kl(_interpolate(agent, old.params, new.params, fraction))

    fraction = walk_back(kl_at, hparams.max_kl, requested.shape[0], requested=requested).fraction
    kept = _walk(agent, old, new, fraction)
    began = time.perf_counter()
    measured = measure(agent, kept.params, bounded.batch, hparams.temperature)
    kl = bounded.kl(kept.params, measured.kl)
    seconds = time.perf_counter() - began
    return _Certificate(kept, measured, requested, kl, fraction, seconds)


@dataclass
class _Gate:
    """The consistency gate of one update."""

    agent: Agent
    params: Tensor
    batch: Batch
    hparams: HyperParams
    enforce: bool
    gap: float = math.nan
    all_rows: bool = False

    def look(self) -> None:
        """Replay all rows."""
        temperature = self.hparams.temperature
        self.gap = check_replay(self.agent, self.params, self.batch, temperature, self.enforce)
        self.all_rows = True

    def look_again(self, gap: float, requested: Tensor) -> None:
        """Take the gap of the objective's first pass, and replay all rows if it is odd."""
        if self.all_rows:
            return
        as_sampled = self.batch.sampled is None
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


def _reason(report: UpdateReport, requested: Tensor, fraction: Tensor) -> str:
    if not bool(requested.isfinite().all()):
        return "the exact KL was not finite"
    return "the exact KL was above max_kl" if bool((fraction < 1.0).any()) else report.reason


Verdict = Literal["accepted", "walked_back", "rejected"]


def _verdict(report: UpdateReport, fraction: Tensor) -> Verdict:
    """Return the verdict: a rejection by the algorithm stays, the rest is by the share kept."""
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
