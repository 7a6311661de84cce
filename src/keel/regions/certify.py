"""Certified updates: the exact KL is measured after every update, and held inside the bound."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from keel.errors import KeelError
from keel.functional import Ratio, RatioReport, ratio_report, walk_back
from keel.models.agent import Agent
from keel.regions.measure import (
    behaviour_at,
    exact_kl,
    group_mean,
    kl_metrics,
    measure,
    shown_kl,
)
from keel.regions.objective import Objective
from keel.regions.stepper import POLICY, Optimum, Step
from keel.rollout.batch import Rows, Targets
from keel.types import Knobs, UpdateReport


class Region(Protocol):
    """A trust region: how a policy is improved on one rollout."""

    @property
    def objective(self) -> Objective:
        """What it improves."""

    def init(self, agent: Agent) -> Optimum:
        """The optimizer before the first update."""

    def update(
        self,
        agent: Agent,
        state: Optimum,
        rows: Rows,
        targets: Targets,
        knobs: Knobs,
        rng: torch.Generator,
        step: Step,
    ) -> tuple[Optimum, UpdateReport]:
        """Improve; the report's KL is left to `Certified`."""


@dataclass(frozen=True)
class Certified:
    """Wraps a region: afterwards mean KL(old‖new) ≤ `Knobs.max_kl` for every group, always.

    It speaks of the states of this rollout; of states never seen it can say nothing. After a pulse
    of temperature the policy acts cold again, where the same step is a longer one: the bound holds
    for both.
    """

    region: Region
    enforce: bool = True
    """False: measure and report, but leave the update as it is"""

    def init(self, agent: Agent) -> Optimum:
        """The region's own state."""
        if not agent.dist.exact:
            raise KeelError(
                f"certification: {type(agent.dist).__name__} has no closed-form KL; "
                "an estimate cannot certify a bound"
            )
        return self.region.init(agent)

    def update(
        self,
        agent: Agent,
        state: Optimum,
        rows: Rows,
        targets: Targets,
        knobs: Knobs,
        rng: torch.Generator,
        step: Step,
    ) -> tuple[Optimum, UpdateReport]:
        """Update, measure, and walk back what is over the bound."""
        after, report = self.region.update(agent, state, rows, targets, knobs, rng, step)
        updated = time.perf_counter()

        cold = None
        if knobs.temperature != 1.0:
            cold = replace(rows, behaviour=behaviour_at(agent, state.params, rows, 1.0))

        def larger(kl: Tensor, params: Tensor) -> Tensor:
            """`[G]` on the CPU: the KL at the temperature that sampled, or without it; of agents
            that share a row, the largest."""
            if cold is not None:
                kl = torch.maximum(kl, exact_kl(agent, params, cold, 1.0))
            return agent.worst(kl).cpu()

        def kl_at(fraction: Tensor) -> Tensor:
            params = _interpolate(agent, state.params, after.params, fraction)
            return larger(exact_kl(agent, params, rows, knobs.temperature), params)

        measured = measure(agent, after.params, rows, knobs.temperature)
        requested = larger(group_mean(measured.kl, rows), after.params)
        fraction, kl = torch.ones_like(requested), requested
        measured_at = walked_at = time.perf_counter()
        if self.enforce and not bool((requested <= knobs.max_kl).all()):
            found = walk_back(kl_at, knobs.max_kl, requested.shape[0], requested=requested)
            fraction, kl, requested = found.fraction, found.kl, found.requested
            after = _walk(agent, state, after, fraction)
            measured = measure(agent, after.params, rows, knobs.temperature)
            walked_at = time.perf_counter()
        verdict = _verdict(report, fraction)
        ratios = ratio_report(measured.ratio, max_log_ratio=self.region.objective.max_log_ratio)
        quantiles = _ratio_quantiles(measured.ratio.ratio, measured.ratio.weight)
        entropy, own = group_mean(measured.entropy, rows), dict(report.agents)
        outside = group_mean(_outside(measured.ratio, knobs), rows)
        if rows.group_axis is not None:
            own |= {
                "train/kl_exact": group_mean(measured.kl, rows),
                "train/entropy": entropy,
                "train/ratio_outside": outside,
            }
        metrics = {
            **report.metrics,
            **kl_metrics(measured, rows),
            **quantiles,
            "train/entropy": entropy.mean().item(),
            **_warnings(ratios),
            "train/log_ratio_max": ratios.max_abs_log_ratio.item(),
            "train/ratio_outside": outside.mean().item(),
            "train/ratio_min": ratios.ratio_min.item(),
            "train/ratio_max": ratios.ratio_max.item(),
            "train/effective_sample_size": ratios.effective_sample_size.item(),
            "train/kl_exact": kl.max().item(),
            "train/kl_requested": requested.max().item(),
            "train/kl_step": kl.max().item() if verdict != "rejected" else float("nan"),
            "train/kl_is_exact": 1.0,
            "train/max_kl": knobs.max_kl,
            "train/alpha": (report.alpha * fraction).min().item(),
            "train/walk_back": float(verdict != "accepted"),
        }
        if rows.shown is not None:
            metrics["train/kl_demos"] = shown_kl(
                agent, state.params, after.params, rows.shown, knobs.temperature
            )
        spent = (measured_at - updated) + (time.perf_counter() - walked_at)
        metrics["time/certify_seconds"] = spent  # walking back, where it was needed, is apart
        reason = report.reason
        if bool((fraction < 1.0).any()):
            reason = "the exact KL was above max_kl"
        if not bool(requested.isfinite().all()):
            reason = "the exact KL was not finite"
        return after, replace(
            report,
            kl_exact=kl,
            kl_requested=requested,
            alpha=report.alpha * fraction,
            verdict=verdict,
            reason=reason,
            metrics=metrics,
            agents=own,
        )


Verdict = Literal["accepted", "walked_back", "rejected"]


def _verdict(report: UpdateReport, fraction: Tensor) -> Verdict:
    """What the region itself rejected stays rejected; the rest is by the share that was kept."""
    if report.verdict == "rejected" or bool((fraction == 0.0).all()):
        return "rejected"
    return "walked_back" if bool((fraction < 1.0).any()) else "accepted"


def _interpolate(agent: Agent, old: Tensor, new: Tensor, fraction: Tensor) -> Tensor:
    """old + fraction·(new − old) for the policy's columns; exactly `old` at 0 and `new` at 1."""
    share = fraction.to(new)[:, None]
    between = torch.where(
        share == 1.0, new, torch.where(share == 0.0, old, old + share * (new - old))
    )
    return torch.where(agent.policy_columns, between, new)


def _walk(agent: Agent, old: Optimum, new: Optimum, fraction: Tensor) -> Optimum:
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
    return Optimum(
        params=_interpolate(agent, old.params, new.params, fraction),
        first=torch.where(none, old.first, first),
        second=torch.where(none, old.second, new.second),
        steps=torch.where(nothing & kinds, old.steps, new.steps),
    )


def _outside(ratio: Ratio, knobs: Knobs) -> Tensor:
    """1 for ratios beyond the clip range, whatever their advantage."""
    low, high = 1.0 - knobs.clip_low, 1.0 + knobs.clip_high
    return ((ratio.ratio < low) | (ratio.ratio > high)).double()


def _warnings(ratios: RatioReport) -> dict[str, float]:
    """Note 001's alarms, each NaN while there is nothing to warn of."""
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
