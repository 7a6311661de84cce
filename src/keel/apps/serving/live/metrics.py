"""Metrics of the router in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from keel.apps.serving.live.backends import Backend
from keel.apps.serving.live.guarded_policy import GuardedPolicy
from keel.data import read_beside

PREFIX = "keel_route_"
HELP = read_beside(__file__, "metrics.yaml", dict[str, tuple[str, str]])
"""Kind and help of each metric."""
BOUNDS = (
    2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 1.0,
)  # fmt: skip
"""Upper bounds of the histograms' buckets, in seconds."""

Labels = tuple[tuple[str, str], ...]
Gauge = tuple[str, Mapping[str, str], float]
"""Name, labels, and value now."""


@dataclass
class Histogram:
    """Histogram of seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count an observation."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def lines(self, name: str) -> Iterable[str]:
        """Yield the lines of the text format; buckets are cumulative."""
        below = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {self.total}"
        yield f"{name}_count {below}"


class Metrics:
    """Counters and histograms of the router."""

    def __init__(self) -> None:
        self.decision_seconds, self.overhead_seconds = Histogram(), Histogram()
        self._counts: dict[str, Counter[Labels]] = {
            name: Counter() for name, (kind, _) in HELP.items() if kind == "counter"
        }

    def count(self, metric: str, **labels: str) -> None:
        """Increment a counter."""
        self._counts[metric][tuple(labels.items())] += 1

    def value(self, metric: str, **labels: str) -> int:
        """Return the sum of a counter over everything that has these labels."""
        wanted = set(labels.items())
        return sum(n for own, n in self._counts[metric].items() if wanted <= set(own))

    def render(self, gauges: Iterable[Gauge]) -> str:
        """Return all metrics as text, with the gauges of this moment."""
        now: dict[str, list[str]] = {}
        for name, labels, value in gauges:
            now.setdefault(name, []).append(_sample(name, tuple(labels.items()), value))
        lines = []
        for name, (kind, text) in HELP.items():
            lines += [f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}"]
            if kind == "counter":
                lines += [_sample(name, own, n) for own, n in self._counts[name].items()]
            elif kind == "histogram":
                lines += getattr(self, name).lines(PREFIX + name)
            lines += now.get(name, [])
        return "\n".join(lines) + "\n"


def gauges(backends: Sequence[Backend], guarded_policy: GuardedPolicy) -> Iterator[Gauge]:
    """Yield the gauges of this moment."""
    for own, share in zip(backends, guarded_policy.decisions.shares(), strict=True):
        labels = {"backend": own.url}
        yield "in_flight", labels, own.in_flight
        yield "up", labels, int(own.up)
        yield "share", labels, float(share)
        yield "pace_seconds", labels, own.pace
    yield "kl", {}, guarded_policy.kl()
    for reason, count in guarded_policy.episodes.items():
        yield "fallback_episodes_total", {"reason": reason}, count
        yield "falling_back", {"reason": reason}, int(reason in guarded_policy.falling_back())


def _sample(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{PREFIX}{name}{f'{{{inside}}}' if inside else ''} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
