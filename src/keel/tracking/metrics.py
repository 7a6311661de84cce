"""The one registry of metrics: names, formulas, reductions, units, healthy ranges and aliases.

The writer's files, the plots, the documentation page and the readers of foreign logs all speak its
names. A metric of one agent carries the agent as a suffix: `train/kl_exact/industry`.

Examples:
    >>> metric("train/kl_exact/industry").unit
    'nats'
    >>> canonical("train/entropy_loss", "sb3")  # SB3 logs the negative entropy
    Canonical(name='train/entropy', scale=-1.0)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from keel.errors import check_choice
from keel.tracking.catalogue import (
    foreign,
    imitation,
    language,
    learning,
    natural,
    outcome,
    trust_region,
)
from keel.tracking.catalogue.metric import SOURCES, Alias, Metric
from keel.tracking.old_names import metric_name

__all__ = [
    "REGISTRY",
    "SOURCES",
    "Alias",
    "Canonical",
    "Metric",
    "canonical",
    "documentation",
    "metric",
]


def _registry(metrics: Iterable[Metric]) -> Mapping[str, Metric]:
    registry: dict[str, Metric] = {}
    for entry in metrics:
        assert entry.name not in registry, f"{entry.name} stands twice in the catalogue"
        registry[entry.name] = entry
    return MappingProxyType(registry)


REGISTRY: Mapping[str, Metric] = _registry(
    (
        *outcome.METRICS,
        *trust_region.METRICS,
        *natural.METRICS,
        *learning.METRICS,
        *imitation.METRICS,
        *language.METRICS,
        *foreign.METRICS,
    )
)
"""Every metric of Keel, by its name."""


class Canonical(NamedTuple):
    """Keel's name of a foreign metric: value here = `scale` × value there."""

    name: str
    scale: float


def metric(name: str) -> Metric:
    """Return the entry of a metric; an `InputError` if there is none.

    What an environment measures itself (`env/share_L`) has one entry for all: `env/*`.

    Args:
        name: of the metric, with or without an agent as suffix.
    """
    name = metric_name(name)
    if name.startswith("env/"):
        return REGISTRY["env/*"]
    entry = REGISTRY.get(name) or REGISTRY.get(name.rpartition("/")[0])
    return entry or REGISTRY[check_choice("metric", name, REGISTRY)]


def canonical(name: str, source: str) -> Canonical | None:
    """Return Keel's name and scale of another library's metric; None if Keel has no such metric.

    RLlib's module ids become agents: `learners/industry/entropy` is `train/entropy/industry`.

    Args:
        name: of the metric in the other library.
        source: the other library, one of `SOURCES`.
    """
    exact, patterns = _ALIASES[check_choice("source", source, SOURCES)]
    name = name.removeprefix("ray/tune/")
    if name in exact:
        return exact[name]
    for pattern, target in patterns:
        match = pattern.fullmatch(name)
        if match:
            agent = match["agent"]
            plain = agent is None or agent in _NO_AGENT
            return target if plain else target._replace(name=f"{target.name}/{agent}")
    return None


_NO_AGENT = {"default_policy", "default_agent", "__all_modules__", "shared_policy"}
_Lookup = tuple[dict[str, Canonical], list[tuple[re.Pattern[str], Canonical]]]


def _lookup(source: str) -> _Lookup:
    exact: dict[str, Canonical] = {}
    patterns: list[tuple[re.Pattern[str], Canonical]] = []
    for entry in REGISTRY.values():
        for alias in entry.aliases.get(source, ()):
            target = Canonical(entry.name, alias.scale)
            if "*" in alias.name:
                patterns.append((_pattern(alias.name), target))
            else:
                exact[alias.name] = target
    return exact, patterns


def _pattern(alias: str) -> re.Pattern[str]:
    """Compile `learners/*/entropy`, its agent as a group; the last part alone matches, too."""
    before, after = map(re.escape, alias.split("*"))
    return re.compile(f"{before}(?P<agent>[^/]+){after}|{after.rpartition('/')[2]}")


_ALIASES: dict[str, _Lookup] = {source: _lookup(source) for source in SOURCES}


def documentation() -> str:
    """Return the reference page of all metrics, in Markdown."""
    groups = dict.fromkeys(name.partition("/")[0] for name in REGISTRY)
    return "\n".join([*_INTRODUCTION, *(_section(group) for group in groups)])


_INTRODUCTION = (
    "# Metrics",
    "",
    "One name, one formula, one unit, and what others call it; generated from",
    "`keel.tracking.metrics`, which plots and readers use as well. With several agents each has",
    "its own value under `NAME/AGENT`. A value that is NaN or infinite is `null` in",
    "`metrics.jsonl`, and named in the line's `flags`.",
    "",
    "`keel train` watches the healthy ranges, and tells what lies outside in 3 of the last 5",
    "updates; `error/…`, losses that are not finite and a KL far over its bound are told at once.",
    "",
)


def _section(group: str) -> str:
    entries = [_describe(m) for name, m in REGISTRY.items() if name.startswith(f"{group}/")]
    return "\n".join([f"## {group}", "", *entries])


def _describe(m: Metric) -> str:
    """Return a heading, the meaning, and a line for each known fact."""
    names = [
        f"{source} {_times(alias.scale)}`{alias.name}`"
        for source, aliases in m.aliases.items()
        for alias in aliases
    ]
    facts = {
        "Formula": f"{m.formula} ({m.unit})" if m.unit else m.formula,
        "Combined": m.reduction,
        "Healthy": ": ".join(part for part in (_range(m), m.healthy_note) if part),
        "Elsewhere": ", ".join(names),
    }
    lines = [f"- **{title}:** {text}" for title, text in facts.items() if text]
    return "\n".join([f"### `{m.name}`", "", m.meaning, "", *lines, ""])


def _times(scale: float) -> str:
    return {1.0: "", -1.0: "−"}.get(scale, f"{scale:g} × ")


def _range(m: Metric) -> str:
    if m.healthy is None:
        return ""
    low, high = m.healthy
    mean = f", mean of {m.mean_over} updates" if m.mean_over else ""
    upper = f"`{m.at_most}`" if m.at_most else None if high is None else f"{high:g}"
    if low is None or upper is None:
        return (f"≤ {upper}" if upper is not None else f"≥ {low:g}") + mean
    return f"{low:g}{mean}" if low == high else f"{low:g} … {upper}{mean}"
