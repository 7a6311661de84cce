"""Whose names are these? The framework of a log by what it calls its metrics."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from keel.tracking.metrics import REGISTRY, SOURCES, Canonical, canonical

FRAMEWORKS = (
    "keel",
    *(source for source in SOURCES if source != "origins"),
    "csv",
)
"""Who may have written a log; `csv`: nobody in particular."""
GENERIC = "csv"
MOST_NAMES = 4_000
"""Different names that a log may have; further ones are passed over."""
LONGEST_NAME = 300
TRAINER = {"grad_norm", "learning_rate", "epoch"}
"""What Hugging Face's trainer writes in every row."""
VAGUE = {"kl"}
"""Names that mean something else in every script of one's own."""
STEPS = {
    "time/total_timesteps": "sb3",
    "num_env_steps_sampled_lifetime": "rllib",
    "timesteps_total": "rllib",
    "num_env_steps_sampled": "rllib",
    "Total timesteps": "rsl_rl",
    "Total steps": "rsl_rl",
    "global_step/max_steps": "swift",
    "train/global_step": "",
    "training/global_step": "verl",
    "global_step": "",
    "step": "",
    "Step": "",
    "_step": "",
    "iteration": "",
    "training_iteration": "rllib",
}
"""Names that count steps, the best first, and whose they are, where they are somebody's."""


@dataclass
class Names:
    """The names of a log, each looked up once.

    Args:
        framework: Whose names they are.
        mapping: Names in the log, by Keel's names, in place of the registry's aliases.
        wanted: Keel's names to keep, with those of their agents; all by default.
    """

    framework: str
    mapping: Mapping[str, str] = field(default_factory=dict)
    wanted: Collection[str] | None = None
    _found: dict[str, Canonical | None] = field(default_factory=dict)

    def find(self, name: str) -> Canonical | None:
        """Return Keel's name of a metric; None if it has none, or if there are too many."""
        try:
            return self._found[name]
        except KeyError:
            pass
        if len(self._found) >= MOST_NAMES or len(name) > LONGEST_NAME:
            return None
        found = self._mapped(name) if self.mapping else keel_name(name, self.framework)
        self._found[name] = found
        return found

    def is_wanted(self, name: str) -> bool:
        """Return whether a metric is to be kept."""
        wanted = self.wanted
        return wanted is None or name in wanted or name.rpartition("/")[0] in wanted

    def best(self, names: Iterable[str]) -> dict[str, tuple[str, Canonical]]:
        """Return the name of each wanted metric, and how to convert it; the best of several.

        Args:
            names: In the log.
        """
        chosen: dict[str, tuple[str, Canonical]] = {}
        for name in names:
            target = self.find(name)
            if target is None or not self.is_wanted(target.name):
                continue
            before = chosen.get(target.name)
            if before is None or self.rank(name, target) < self.rank(*before):
                chosen[target.name] = (name, target)
        return chosen

    def rank(self, name: str, target: Canonical) -> int:
        """Return how far back a name stands among those that a framework has for a metric."""
        entry = REGISTRY.get(target.name)
        aliases = () if entry is None else entry.aliases.get(self.framework, ())
        short = name.removeprefix("train/")
        return next((i for i, a in enumerate(aliases) if a.name in (name, short)), len(aliases))

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Names that Keel has no metric for."""
        return tuple(
            name for name, found in self._found.items() if found is None and name not in STEPS
        )

    def _mapped(self, name: str) -> Canonical | None:
        target = next((keel for keel, theirs in self.mapping.items() if theirs == name), None)
        return None if target is None else Canonical(target)


@lru_cache(maxsize=20_000)
def keel_name(name: str, framework: str) -> Canonical | None:
    """Return Keel's name of a metric of a framework; of nobody's logs where all agree.

    Args:
        name: In the log.
        framework: One of `FRAMEWORKS`.
    """
    if framework == "keel":
        return Canonical(name) if is_registered(name) else None
    if framework != GENERIC:
        return canonical(name, framework)
    if is_registered(name):
        return Canonical(name)
    targets = {canonical(name, source) for source in SOURCES if source != "origins"} - {None}
    if name in VAGUE or len(targets) > 1:
        return None
    return targets.pop() if targets else _by_last_part().get(name)


@lru_cache(maxsize=1)
def _by_last_part() -> dict[str, Canonical]:
    """Return metrics by the last part of their names, where only one has it: `value_loss`."""
    parts: dict[str, list[str]] = {}
    for name in REGISTRY:
        parts.setdefault(name.rpartition("/")[2], []).append(name)
    return {part: Canonical(names[0]) for part, names in parts.items() if len(names) == 1}


def is_registered(name: str) -> bool:
    """Return whether Keel has a metric of this name, with or without an agent."""
    return name in REGISTRY or name.rpartition("/")[0] in REGISTRY or name.startswith("env/")


def recognize(names: Iterable[str]) -> str:
    """Return the framework that calls its metrics so; `csv` where none is recognized.

    A framework is recognized by a name that counts its steps, or by metrics of which one has a name
    that nobody would think of by chance: `losses/clipfrac`, and not `loss`.

    Args:
        names: In the log.
    """
    names = list(dict.fromkeys(names))[:MOST_NAMES]
    for name in names:
        if owner := STEPS.get(name):
            return owner
    if set(names) >= TRAINER:
        return "trl"
    scores = {name: _score(names, name) for name in FRAMEWORKS if name != GENERIC}
    best = max(scores, key=lambda name: scores[name])
    alone = [name for name, score in scores.items() if score] == [best]
    return best if scores[best] >= 2 or alone else GENERIC


def _score(names: list[str], framework: str) -> int:
    matched = [name for name in names if keel_name(name, framework) is not None]
    return len(matched) if any(_is_telling(name) for name in matched) else 0


def _is_telling(name: str) -> bool:
    return "/" in name or " " in name or name.startswith(("actor_", "critic_", "ppo_", "vllm_"))


_RUN = re.compile(r"^.{1,200}? - (?=\S)")


def without_run(name: str) -> str:
    """Return the name of a metric without the name of the run that W&B's export puts before it.

    Examples:
        >>> without_run("warm-sky-7 - train/loss"), without_run("train/loss")
        ('train/loss', 'train/loss')
    """
    return _RUN.sub("", name)
