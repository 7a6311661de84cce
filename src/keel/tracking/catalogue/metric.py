"""Entries of the registry of metrics, and their names in other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

SOURCES = ("sb3", "cleanrl", "trl", "verl", "openrlhf", "rllib", "rsl_rl", "swift", "origins")


class Alias(NamedTuple):
    """A name elsewhere; Keel's value = `offset` + `scale` × theirs.

    One `*` in the name stands for the agent, `**` for anything.
    """

    name: str
    scale: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True)
class Metric:
    """A metric: meaning, reduction, healthy range, and its names in other libraries."""

    name: str
    formula: str
    meaning: str
    """one sentence, including in what it differs from its aliases"""
    reduction: str
    """Reduction over rows, minibatches and agents."""
    unit: str = "1"
    healthy: tuple[float | None, float | None] | None = None
    """lowest and highest healthy value; None where there is no such end"""
    healthy_note: str = ""
    """Source of the range, a colon, and the meaning; `keel.tracking.health` shows the first."""
    aliases: Mapping[str, tuple[Alias, ...]] = field(default_factory=dict, hash=False)
    at_most: str = ""
    """metric that holds the highest healthy value, where it is there"""
    mean_over: int = 0
    """judge the mean of so many updates; 0: judge every value"""

    def range_in(self, metrics: Mapping[str, float]) -> tuple[float | None, float | None]:
        """Return the healthy range, with the bound that is in force.

        Args:
            metrics: of the same update.
        """
        low, high = self.healthy or (None, None)
        return low, metrics.get(self.at_most, high)

    def is_healthy(self, value: float, metrics: Mapping[str, float] | None = None) -> bool | None:
        """Return whether `value` lies in the healthy range; None where there is no range.

        Args:
            value: of the metric.
            metrics: of the same update, for a bound that one of them holds.
        """
        if self.healthy is None:
            return None
        low, high = self.range_in(metrics or {})
        return (low is None or value >= low) and (high is None or value <= high)


Names = str | Alias | tuple[str | Alias, ...]


def elsewhere(**names: Names) -> dict[str, tuple[Alias, ...]]:
    """Return aliases by source: `elsewhere(sb3="time/fps", cleanrl=("charts/SPS",))`."""
    return {source: tuple(map(_alias, _as_tuple(alias))) for source, alias in names.items()}


def _as_tuple(names: Names) -> tuple[str | Alias, ...]:
    return (names,) if isinstance(names, str | Alias) else names


def _alias(alias: str | Alias) -> Alias:
    return Alias(alias) if isinstance(alias, str) else alias


def minus(name: str) -> Alias:
    """Return an alias of the opposite sign."""
    return Alias(name, -1.0)


def complement(name: str) -> Alias:
    """Return an alias of the other share: Keel's value = 1 − theirs."""
    return Alias(name, -1.0, 1.0)


def half(name: str) -> Alias:
    """Return an alias without the ½ that Keel's metric has."""
    return Alias(name, 0.5)


# How rows, minibatches and agents are combined. With several agents each has its own value under
# `NAME/AGENT`, and the plain name holds what the last words of these say.
WHOLE = "all valid rows of the update's rollout, after the update, in float64"
LARGEST = f"mean over {WHOLE}; agents: the largest"
ROWS = f"mean over {WHOLE}; agents: mean"
MINIBATCHES = "mean over the minibatches of all epochs; agents: mean"
ROLLOUT = "all valid rows of the rollout, before the update; agents: mean"
SETTING = "the value in force during the update"
COUNT = "sum over the update; agents: sum"
UPDATE = "one value an update"
EPISODES = "over the last 100 episodes; null before the first has ended"
EVALUATION = "over the episodes of one evaluation"
CLOCK = "wall clock of the iteration"
