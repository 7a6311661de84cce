"""The one registry of metrics: names, formulas, reductions, units, healthy ranges and aliases.

The writer's files, the plots, the documentation page and the readers of foreign logs all speak its
names. A metric of one agent carries the agent as a suffix: `train/kl_exact/industry`.

Examples:
    >>> metric("train/kl_exact/industry").unit
    'nats'
    >>> canonical("train/entropy_loss", "sb3")  # SB3 logs the negative entropy
    Canonical(name='train/entropy', scale=-1.0, offset=0.0)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from keel.errors import check_choice
from keel.tracking.catalogue.metric import SOURCES, Alias, Metric, read_catalogue
from keel.tracking.old_names import metric_name

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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


REGISTRY: Mapping[str, Metric] = _registry(read_catalogue())
"""Every metric of Keel, by its name."""

DOMINATES = 2.0
"""Ratio of gradients from which on demonstrations dominate; above, `bc_gradient_ratio` is sick."""


Value = TypeVar("Value", float, "NDArray[np.float64]")


class Canonical(NamedTuple):
    """Keel's name of a foreign metric: value here = `offset` + `scale` × value there."""

    name: str
    scale: float = 1.0
    offset: float = 0.0

    def convert(self, value: Value) -> Value:
        """Return Keel's value of a number or an array."""
        if self.scale == 1.0 and self.offset == 0.0:
            return value
        return self.offset + self.scale * value


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
    """Return Keel's name of another library's metric; None if Keel has no such metric.

    RLlib's module ids become agents: `learners/industry/entropy` is `train/entropy/industry`. What
    TRL and ms-swift measure in evaluations, `eval_reward`, is Keel's `eval/return_mean`.

    Args:
        name: of the metric in the other library.
        source: the other library, one of `SOURCES`.
    """
    exact, patterns = _ALIASES[check_choice("source", source, SOURCES)]
    if name in exact:
        return exact[name]
    prefix = _PREFIXES.get(source)
    if prefix and name.startswith(prefix):
        return canonical(name.removeprefix(prefix), source)
    for pattern, target in patterns:
        match = pattern.fullmatch(name)
        if match:
            agent = match.groupdict().get("agent")
            plain = agent is None or agent in _NO_AGENT
            return target if plain else target._replace(name=f"{target.name}/{agent}")
    return _evaluated(name, source) if source in _EVALUATED else None


def _evaluated(name: str, source: str) -> Canonical | None:
    """Return the metric of an evaluation: `eval_reward` is `reward` of held-out prompts."""
    if not name.startswith(("eval_", "eval/")):
        return None
    inner = canonical(name[len("eval_") :], source)
    if inner is None or not inner.name.startswith("rollout/"):
        return None
    name = inner.name.replace("rollout/", "eval/", 1)
    return inner._replace(name=name) if name in REGISTRY else None


_PREFIXES = {"rllib": "ray/tune/", "trl": "train/", "swift": "train/", "openrlhf": "train/"}
"""What TensorBoard and W&B put before the names."""
_EVALUATED = ("trl", "swift")


_NO_AGENT = {"default_policy", "default_agent", "__all_modules__", "shared_policy"}
_Lookup = tuple[dict[str, Canonical], list[tuple[re.Pattern[str], Canonical]]]


def _lookup(source: str) -> _Lookup:
    exact: dict[str, Canonical] = {}
    patterns: list[tuple[re.Pattern[str], Canonical]] = []
    for entry in REGISTRY.values():
        for alias in entry.aliases.get(source, ()):
            target = Canonical(entry.name, alias.scale, alias.offset)
            if "*" in alias.name:
                patterns.append((_pattern(alias.name, source), target))
            else:
                exact[alias.name] = target
    return exact, patterns


def _pattern(alias: str, source: str) -> re.Pattern[str]:
    """Compile `learners/*/entropy`, its agent as a group; RLlib's last part alone matches, too."""
    if "**" in alias:
        return re.compile(".+".join(map(re.escape, alias.split("**"))))
    before, after = map(re.escape, alias.split("*"))
    alone = f"|{after.rpartition('/')[2]}" if source == "rllib" else ""
    return re.compile(f"{before}(?P<agent>[^/]+){after}{alone}")


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
        f"{source} {_times(alias)}`{alias.name}`"
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


def _times(alias: Alias) -> str:
    times = {1.0: "", -1.0: "−"}.get(alias.scale, f"{alias.scale:g} × ")
    if alias.offset == 0.0:
        return times
    return f"{alias.offset:g} − " if alias.scale == -1.0 else f"{alias.offset:g} + {times}"


def _range(m: Metric) -> str:
    if m.healthy is None:
        return ""
    low, high = m.healthy
    mean = f", mean of {m.mean_over} updates" if m.mean_over else ""
    upper = f"`{m.at_most}`" if m.at_most else None if high is None else f"{high:g}"
    if low is None or upper is None:
        return (f"≤ {upper}" if upper is not None else f"≥ {low:g}") + mean
    return f"{low:g}{mean}" if low == high else f"{low:g} … {upper}{mean}"
