"""The configuration of a run: what can be set, what is possible, and how it is read."""

from __future__ import annotations

from keel.config.checks import check
from keel.config.common import Backend, Checkpoints
from keel.config.reading import (
    MINARI,
    anchored,
    from_dict,
    load,
    merged,
    nested,
    options,
    read,
    to_dict,
)
from keel.config.schema import (
    Advantage,
    Agents,
    Atari,
    Config,
    Critic,
    Demonstrations,
    Envs,
    Evaluation,
    Explore,
    Faults,
    Natural,
    Network,
    Region,
    Stabilizer,
)
from keel.config.values import describe, named_values, parse_yaml

__all__ = [
    "MINARI",
    "Advantage",
    "Agents",
    "Atari",
    "Backend",
    "Checkpoints",
    "Config",
    "Critic",
    "Demonstrations",
    "Envs",
    "Evaluation",
    "Explore",
    "Faults",
    "Natural",
    "Network",
    "Region",
    "Stabilizer",
    "anchored",
    "check",
    "describe",
    "from_dict",
    "load",
    "merged",
    "named_values",
    "nested",
    "options",
    "parse_yaml",
    "read",
    "to_dict",
]
