"""Catalog of the environments that have a name, and the extra that each needs."""

from __future__ import annotations

import importlib.util
import re
from typing import NamedTuple

import gymnasium
from gymnasium.envs.registration import EnvSpec

from keel.envs.names import ATARI_GAMES, NATIVE, PARALLEL

FAMILIES = {
    "gymnasium.envs.classic_control": ("classic control", "", ""),
    "gymnasium.envs.toy_text": ("toy text", "", ""),
    "gymnasium.envs.box2d": ("Box2D", "Box2D", "box2d"),
    "gymnasium.envs.mujoco": ("MuJoCo", "mujoco", "mujoco"),
}
"""Family, required package and extra of environments, by their module."""


class Entry(NamedTuple):
    """One environment."""

    name: str
    family: str
    extra: str
    """`keel-rl[…]` that brings what it needs; empty where nothing is needed"""
    ready: bool
    """whether it can be trained with what is installed"""


def catalog() -> list[Entry]:
    """Return every environment with a name of its own, by family.

    Of registered environments only the newest version is listed; others can be trained as well.
    """
    return [
        *(Entry(name, "simulator", "", ready=True) for name in NATIVE),
        *(_parallel(name) for name in PARALLEL),
        *_registered(),
        *(Entry(game, "Atari", "atari", _installed("ale_py")) for game in ATARI_GAMES),
    ]


def _parallel(name: str) -> Entry:
    if PARALLEL[name].startswith("keel."):
        return Entry(name, "several agents", "", ready=True)
    return Entry(name, "several agents", "multi-agent", _installed("mpe2"))


def _registered() -> list[Entry]:
    newest: dict[str, EnvSpec] = {}
    for spec in gymnasium.registry.values():
        previous = newest.get(spec.name)
        if spec.namespace is None and (
            previous is None or (spec.version or 0) > (previous.version or 0)
        ):
            newest[spec.name] = spec
    entries = []
    for family, (title, package, extra) in FAMILIES.items():
        for _, spec in sorted(newest.items()):
            if str(spec.entry_point).startswith(family):
                entries.append(Entry(spec.id, title, extra, not package or _installed(package)))
    return entries


def matching(entries: list[Entry], pattern: str) -> list[Entry]:
    """Return the entries whose name or family holds the pattern; `*` stands for anything.

    Args:
        entries: Where to look.
        pattern: Part of a name, in upper or lower case; empty for all.
    """
    parts = map(re.escape, pattern.split("*"))
    expression = re.compile(".*".join(parts), re.IGNORECASE)
    return [x for x in entries if expression.search(x.name) or expression.search(x.family)]


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
