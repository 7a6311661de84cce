"""Controllers of the cloning coefficient: the weight of demonstrations beside the reward."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from keel.controllers.controllers import Adapted, Outcome, State, Stateless
from keel.types import HyperParams


@dataclass(frozen=True)
class LossBalance(Stateless):
    """Balance of losses: keep |coef · BC loss| ≤ max_ratio · |PPO loss|, and coef above a floor.

    A rule that only ever lowers it would let one rollout with a small PPO loss silence
    demonstrations for good; here it comes back, at most to where it began.
    """

    coef: float
    max_ratio: float = 1.0
    floor: float = 0.01

    def __call__(self, state: State, outcome: Outcome, hparams: HyperParams) -> Adapted:
        """Turn `bc_coef`."""
        if not outcome.bc_loss_ratio > 0.0:  # or NaN
            return state, hparams
        coef = hparams.bc_coef * self.max_ratio / outcome.bc_loss_ratio
        return state, replace(hparams, bc_coef=min(max(coef, self.floor), self.coef))


SMOOTHING = 0.95
"""Smoothing of the cosine: one rollout's gradient is mostly noise."""
SURE = 3.0
"""Standard errors below 0 from which a smoothed cosine is no noise."""
DISTRUST = 0.8
"""Factor on the trust in demonstrations for every update in conflict."""
RECOVERY = 1.05
"""Factor for every update without: trust is lost sooner than it is won."""


@dataclass(frozen=True)
class CloningTrust:
    """Take trust away from demonstrations while the reward teaches otherwise.

    `imitation.Limit` bounds the pull of an update by its norm. But a rollout's gradient is noisy,
    and its noise averages out while a steady pull does not; so where the smoothed cosine of both
    gradients is below 0 by more than its own noise, the coefficient goes down, step by step, to its
    floor. It comes back when the conflict is over.
    """

    coef: float
    floor: float = 0.01

    def init(self) -> State:
        """Return full trust, and moments of no cosine at all."""
        return {"trust": 1.0, "cosine": 0.0, "square": 0.0}

    def __call__(self, state: State, outcome: Outcome, hparams: HyperParams) -> Adapted:
        """Turn `bc_coef`."""
        measured = outcome.bc_cosine
        if not math.isfinite(measured):
            return state, hparams
        cosine = SMOOTHING * state["cosine"] + (1.0 - SMOOTHING) * measured
        square = SMOOTHING * state["square"] + (1.0 - SMOOTHING) * measured * measured
        # of an exponential mean of independent numbers around 0
        error = math.sqrt((1.0 - SMOOTHING) / (1.0 + SMOOTHING) * square)
        trust = state["trust"] * (DISTRUST if cosine < -SURE * error else RECOVERY)
        trust = min(1.0, max(trust, self.floor / self.coef))
        after = {"trust": trust, "cosine": cosine, "square": square}
        return after, replace(hparams, bc_coef=self.coef * trust)
