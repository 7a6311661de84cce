"""Hierarchical exploration: a bandit chooses how much to explore, the policy explores by it.

The coarse level is a choice among a few temperatures for a block of updates, by what earlier blocks
returned (as the meta-controller of Agent57, Badia et al. 2020, arXiv 2003.13350); the fine level is
the policy's own sampling at that temperature. The temperature is part of the distribution, and
moves inside of the trust region (`keel.training.shift`): log-probs, gate and certificate see it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from keel.controllers.controllers import Adapted, Outcome, State
from keel.types import HyperParams

RUNGS = 3
"""Temperatures of the ladder."""
FORGET = 0.9
"""Factor on the weight of earlier blocks after each block: returns change while a run learns."""


@dataclass(frozen=True)
class TemperatureLadder:
    """Choose the temperature of the next `interval` updates by an upper confidence bound.

    The ladder goes from 1 to `magnitude` by equal factors. Every rung is tried once, from the
    coolest; then the one with the largest mean return + range · √(log N / n) is taken, with n the
    discounted number of its blocks, N their sum, and the range that of all rungs' means.
    """

    interval: int = 8
    magnitude: float = 2.0

    def init(self) -> State:
        """Return the state of no ended block; the coolest rung is in use."""
        return {"since": 0.0, "rung": 0.0, "sum": 0.0, "count": 0.0}

    def __call__(self, state: State, outcome: Outcome, hparams: HyperParams) -> Adapted:
        """Turn `temperature`."""
        now = dict(state)
        now["since"] += 1.0
        if not math.isnan(outcome.return_mean):
            now["sum"] += outcome.return_mean
            now["count"] += 1.0
        if now["since"] >= self.interval and now["count"] > 0.0:
            now = self._choose(self._credit(now))
        return now, replace(hparams, temperature=self.temperature(int(now["rung"])))

    def temperature(self, rung: int) -> float:
        """Return the temperature of a rung: exactly 1 at the foot, `magnitude` at the top."""
        if rung == RUNGS - 1:
            return self.magnitude
        return float(self.magnitude ** (rung / (RUNGS - 1)))

    def _credit(self, state: dict[str, float]) -> dict[str, float]:
        """Count the block that ended for its rung, all others a little less."""
        faded = {
            name: FORGET * value if name.startswith(("weight", "total")) else value
            for name, value in state.items()
        }
        rung = int(state["rung"])
        for name, value in (("weight", 1.0), ("total", state["sum"] / state["count"])):
            faded[f"{name}{rung}"] = faded.get(f"{name}{rung}", 0.0) + value
        return faded | {"since": 0.0, "sum": 0.0, "count": 0.0}

    def _choose(self, state: dict[str, float]) -> dict[str, float]:
        """Return the state with the next rung."""
        untried = [rung for rung in range(RUNGS) if f"weight{rung}" not in state]
        if untried:
            return state | {"rung": float(untried[0])}
        weights = [state[f"weight{rung}"] for rung in range(RUNGS)]
        means = [state[f"total{rung}"] / weights[rung] for rung in range(RUNGS)]
        scale = max(means) - min(means)
        total = math.log(max(sum(weights), 1.0))
        bounds = [
            mean + scale * math.sqrt(total / weight)
            for mean, weight in zip(means, weights, strict=True)
        ]
        return state | {"rung": float(bounds.index(max(bounds)))}
