"""Entries of the registry of metrics, and their names in other libraries.

The entries themselves stand in the YAML files of this folder, one for each topic. An entry names
how rows, minibatches and agents are combined by a word of `reductions.yaml`, or in full. Its
aliases have a scale where Keel's value is a multiple of theirs: -1 for the opposite sign, 0.5 for
a metric without the ½ that Keel's has; and an offset: 1 with the scale -1 for its complement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from msgspec import convert

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


TOPICS = (
    *("outcome", "trust_region", "natural", "learning", "imitation", "language"),
    "foreign",
)
"""Files of the catalogue, in the order in which the documentation lists them."""


def read_catalogue() -> Iterator[Metric]:
    """Yield every metric of the YAML files beside this module."""
    reductions = _read("reductions")
    for topic in TOPICS:
        for name, entry in _read(topic).items():
            aliases = {
                source: _aliases(names) for source, names in entry.get("aliases", {}).items()
            }
            reduction = reductions.get(entry["reduction"], entry["reduction"])
            yield convert(
                {**entry, "name": name, "reduction": reduction, "aliases": aliases}, Metric
            )


def _read(topic: str) -> dict[str, Any]:
    text = (Path(__file__).parent / f"{topic}.yaml").read_text(encoding="utf-8")
    entries: dict[str, Any] = yaml.load(text, _LOADER)
    return entries


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is eight times as fast


def _aliases(names: Any) -> list[Alias]:
    """Return the names in one library: a name, `{name: …, scale: …}`, or a list of these."""
    listed = names if isinstance(names, list) else [names]
    return [Alias(name) if isinstance(name, str) else Alias(**name) for name in listed]
