"""Controllers: what turns the hyperparameters between updates. Pure: state in, state out.

They read the KL that was *requested*; the one that was kept cannot show the trouble.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from keel.errors import InputError, KeelError
from keel.types import HyperParams

State = Mapping[str, float]
Adapted = tuple[State, HyperParams]
"""The state after an update, and the hyperparameters for the next."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of an update, as controllers see it."""

    kl: float
    """requested, the largest over agents"""
    return_mean: float
    """of the episodes that ended in the rollout; NaN if none did"""
    accepted: bool = True
    """whether any of the step was kept"""
    gain_ratio: float = math.nan
    """actual over predicted improvement of a line search; NaN where there was none"""
    curvature_min: float = math.nan
    """the least curvature that its solver met; ≤ 0: the Fisher matrix was not positive definite"""
    bc_loss_ratio: float = math.nan
    """of cloning, with its coefficient, to the policy's own loss; NaN without demonstrations"""
    bc_cosine: float = math.nan
    """between the gradients of both"""
    kl_reference: float = math.nan
    """exact KL(policy‖reference), in the unit of its controller; NaN without a reference"""
    temperature: float = 1.0
    """at which the next rollout is sampled"""


class Controller(Protocol):
    """An adaptive rule for hyperparameters."""

    def init(self) -> State:
        """Return the state before the first update."""

    def __call__(self, state: State, outcome: Outcome, hparams: HyperParams) -> Adapted:
        """Return the state after an update, and the hyperparameters for the next."""


class Stateless:
    """A rule without a state of its own: the hyperparameter is the state."""

    def init(self) -> State:
        """Return no state."""
        return {}


@dataclass(frozen=True)
class AdaptivePenalty(Stateless):
    """Double the KL coefficient above 1.5 × target, halve it below target / 1.5 (PPO 2017, §4).

    Bounded at both ends: an unbounded coefficient winds up and never comes back.
    """

    target: float
    low: float = 1e-4
    high: float = 100.0

    def __call__(self, state: State, outcome: Outcome, hparams: HyperParams) -> Adapted:
        """Turn `kl_coef`."""
        factor = _factor(outcome.kl, self.target, 1.5, 2.0)
        coef = min(max(hparams.kl_coef * factor, self.low), self.high)
        return state, replace(hparams, kl_coef=coef)


@dataclass(frozen=True)
class ProportionalPenalty(Stateless):
    """β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon) (Ziegler et al. 2019, arXiv 1909.08593).

    Of the KL to a reference, in the unit of `target`. The factor is never below 0.8: with more
    samples than the horizon it would turn negative, and β with it. β stays inside its bounds, and a
    KL that is negative or not finite is a fault, not a reason to lower β.
    """

    target: float
    horizon: float
    samples: int
    """n: seen in an update"""
    low: float = 1e-5
    high: float = 10.0

    def __call__(self, state: State, outcome: Outcome, hparams: HyperParams) -> Adapted:
        """Turn `kl_coef`."""
        kl = outcome.kl_reference
        if not 0.0 <= kl < math.inf:
            raise KeelError(
                f"the KL to the reference is {kl:g}, which no KL can be: an exact KL is never "
                "negative. Its estimate may be; steer by the exact one"
            )
        factor = proportional_factor(kl, self.target, self.samples, self.horizon)
        return state, replace(
            hparams, kl_coef=min(max(hparams.kl_coef * factor, self.low), self.high)
        )


class AdaptiveKLController:
    """The rule of `ProportionalPenalty` with verl's arguments: β that follows a measured KL.

    `value` is β. Unlike `ProportionalPenalty` it has no bounds, and takes an estimate of the KL,
    which may be negative and then counts as 0.

    Args:
        init_kl_coef: β before the first update.
        target_kl: The KL to hold, in the unit of what `update` is told.
        horizon: Steps in which β may change by e^±0.2, or thereabouts.

    Examples:
        >>> controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=0.05, horizon=1000)
        >>> controller.update(current_kl=0.2, n_steps=500)  # far above: 1 + 0.2 · 500/1000
        >>> round(controller.value, 4)
        0.11
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        self.value = _checked_coef("init_kl_coef", init_kl_coef)
        for name, number in (("target_kl", target_kl), ("horizon", horizon)):
            if not 0.0 < number < math.inf:
                raise InputError(f"{name}: expected a number above 0, got {number}")
        self.target, self.horizon = target_kl, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Turn `value` towards the target.

        Args:
            current_kl: KL(policy‖reference) as it was measured, exact or an estimate.
            n_steps: Steps it was measured over; above `horizon` they count as `horizon`.
        """
        kl = float(current_kl)
        if not math.isfinite(kl):
            raise KeelError(f"current_kl: {kl:g} is no KL to steer by; look for what made it so")
        if n_steps < 0:
            raise InputError(f"n_steps: expected no negative number, got {n_steps}")
        self.value *= proportional_factor(kl, self.target, n_steps, self.horizon)


class FixedKLController:
    """A β that stays, with the methods of `AdaptiveKLController`.

    Args:
        kl_coef: β, in `value`.
    """

    def __init__(self, kl_coef: float) -> None:
        self.value = _checked_coef("kl_coef", kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Leave `value` as it is.

        Args:
            current_kl: Ignored.
            n_steps: Ignored.
        """


def proportional_factor(kl: float, target: float, samples: float, horizon: float) -> float:
    """Return 1 + clip(KL/target − 1, ±0.2)·n/horizon, between 0.8 and 1.2 (Ziegler et al. 2019).

    Args:
        kl: What was measured, in the unit of `target`.
        target: What to hold.
        samples: n; above the horizon it counts as the horizon, or the factor could turn negative.
        horizon: Samples that move β by the whole error.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return 1.0 + error * min(samples / horizon, 1.0)


def _checked_coef(name: str, coef: float) -> float:
    if not 0.0 <= coef < math.inf:
        raise InputError(f"{name}: expected a number of 0 or more, got {coef}")
    return float(coef)


@dataclass(frozen=True)
class AdaptiveRate(Stateless):
    """Divide the learning rate by 1.5 above 2 × target, multiply it below target / 2."""

    target: float
    low: float = 1e-6
    high: float = 1e-2

    def __call__(self, state: State, outcome: Outcome, hparams: HyperParams) -> Adapted:
        """Turn `learning_rate`."""
        rate = hparams.learning_rate / _factor(outcome.kl, self.target, 2.0, 1.5)
        return state, replace(hparams, learning_rate=min(max(rate, self.low), self.high))


@dataclass(frozen=True)
class AdaptiveClip(Stateless):
    """Divide both ends of the clip by 1.5 above 2 × target, multiply them below target / 2, up to
    where they began: a wider clip than was asked for is another algorithm."""

    target: float
    widest: float
    narrowest: float = 0.02

    def __call__(self, state: State, outcome: Outcome, hparams: HyperParams) -> Adapted:
        """Turn `clip_low` and `clip_high` alike."""
        factor = 1.0 / _factor(outcome.kl, self.target, 2.0, 1.5)
        high = min(max(hparams.clip_high * factor, min(self.narrowest, self.widest)), self.widest)
        low = hparams.clip_low * high / hparams.clip_high
        return state, replace(hparams, clip_low=low, clip_high=high)


@dataclass(frozen=True)
class Decay(Stateless):
    """Decay of a hyperparameter, x ← max(floor, x · decay): of the entropy bonus, or of cloning."""

    hparam: Literal["entropy_coef", "bc_coef"]
    decay: float
    floor: float

    def __call__(self, state: State, outcome: Outcome, hparams: HyperParams) -> Adapted:
        """Turn it; a hyperparameter that begins below the floor stays where it is."""
        value: float = getattr(hparams, self.hparam)
        lower = max(min(self.floor, value), value * self.decay)
        return state, replace(hparams, **{self.hparam: lower})


@dataclass(frozen=True)
class Stabilizer:
    """Line-search stabiliser: tighten the region after `ls_fail_threshold` failed updates in a row.

    A failed update is one whose step was rejected, or brought less than `min_gain` of the
    improvement that was predicted. Curvature that is not positive raises the damping at once.
    After `recovery` good updates in a row one tightening is undone, up to where it began.
    """

    max_kl: float
    damping: float
    ls_fail_threshold: int = 20
    max_kl_decay: float = 0.8
    min_max_kl: float = 0.005
    damping_growth: float = 1.2
    max_damping: float = 0.2
    min_gain: float = 0.25
    recovery: int = 20

    def init(self) -> State:
        """Return a state without failures."""
        return {"failed": 0.0, "good": 0.0}

    def __call__(self, state: State, outcome: Outcome, hparams: HyperParams) -> Adapted:
        """Turn `max_kl` and `damping`."""
        bent = outcome.curvature_min <= 0.0
        good = outcome.accepted and not outcome.gain_ratio < self.min_gain and not bent
        failed = 0.0 if good else state["failed"] + 1.0
        streak = state["good"] + 1.0 if good else 0.0
        if bent:
            hparams = replace(hparams, damping=self._raised(hparams.damping))
        if failed >= self.ls_fail_threshold:
            failed = 0.0
            tight = max(hparams.max_kl * self.max_kl_decay, min(self.min_max_kl, hparams.max_kl))
            hparams = replace(hparams, max_kl=tight, damping=self._raised(hparams.damping))
        elif self.recovery and streak >= self.recovery:
            streak = 0.0
            hparams = replace(
                hparams,
                max_kl=min(hparams.max_kl / self.max_kl_decay, max(self.max_kl, hparams.max_kl)),
                damping=max(
                    hparams.damping / self.damping_growth, min(self.damping, hparams.damping)
                ),
            )
        return {"failed": failed, "good": streak}, hparams

    def _raised(self, damping: float) -> float:
        return min(damping * self.damping_growth, max(self.max_damping, damping))


@dataclass(frozen=True)
class TemperaturePulses:
    """Temperature pulses: heat the policy for a rollout every `interval` updates or on stagnation.

    The temperature is part of the distribution: sampling, log-probs and KL all see it. It moves as
    far as the trust region lets it in every update, so a pulse may take several updates to come and
    to go.
    """

    interval: int = 8
    magnitude: float = 2.0
    threshold: float = 0.005
    window: int = 5
    """returns among which stagnation is looked for"""

    def init(self) -> State:
        """Return a state without updates and returns."""
        return {"since": 0.0, "rising": 0.0}

    def __call__(self, state: State, outcome: Outcome, hparams: HyperParams) -> Adapted:
        """Turn `temperature`."""
        returns = [state[f"return{i}"] for i in range(self.window) if f"return{i}" in state]
        if outcome.return_mean == outcome.return_mean:
            returns = [*returns, outcome.return_mean][-self.window :]
        since = state["since"] + 1.0
        begins = since >= self.interval or self._stagnant(returns)
        unfinished = bool(state.get("rising", 0.0)) and outcome.temperature != self.magnitude
        remembered = [] if begins else returns
        after = {f"return{i}": value for i, value in enumerate(remembered)}
        hot = begins or unfinished
        return (
            {"since": 0.0 if begins else since, "rising": float(hot), **after},
            replace(hparams, temperature=self.magnitude if hot else 1.0),
        )

    def _stagnant(self, returns: list[float]) -> bool:
        if len(returns) < self.window:
            return False
        size = max(abs(x) for x in returns)
        return max(returns) - min(returns) < self.threshold * max(size, 1e-8)


def _factor(kl: float, target: float, band: float, step: float) -> float:
    """Return `step` when the KL is over its band, 1/`step` when it is under, 1 inside."""
    if kl > target * band:
        return step
    return 1.0 / step if kl < target / band else 1.0
