"""Settings that worked, one YAML file per environment; `default` for everything else."""

from __future__ import annotations

from pathlib import Path

from keel.config import Config, load
from keel.errors import InputError, similar

FOLDER = Path(__file__).parent
NAMED = {"serving": "router"}
"""Environments whose preset is called by what is trained on them."""
SOURCES = ("gymnasium:", "envpool:")
"""Beginnings of names that say whose environment it is; its preset is the same."""
RENAMED = {
    "note-002-v1": "breakout-trpo-one-env",
    "note-002-v2": "breakout-trpo-stabilized",
    "note-004-before": "router-collapse",
    "note-004-after": "router-rebalanced",
}
"""Names of presets in version 0.1, which still work."""


def names() -> list[str]:
    """Return the names of all presets."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def path_of(name: str) -> Path:
    """Return the file of a preset."""
    name = RENAMED.get(name, name)
    if name not in names():
        near = similar(name, names())
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(names())}"
        raise InputError(f"preset: {name!r} does not exist{hint}")
    return FOLDER / f"{name}.yaml"


def preset(name: str) -> Config:
    """Return a preset by its name."""
    return load(path_of(name))


def preset_for(env: str, algo: str = "ppo") -> tuple[str, Config]:
    """Return the preset of an environment for an algorithm, or that algorithm's default.

    Args:
        env: Name of the environment.
        algo: Name of the algorithm.
    """
    for source in SOURCES:
        env = env.removeprefix(source)
    stem = NAMED.get(env, env.split("/")[-1])
    for candidate in (stem, stem.rsplit("-v", 1)[0]):
        name = candidate if algo == "ppo" else f"{candidate.lower()}-{algo}"
        if name in names():
            return name, preset(name)
    name = "default" if algo == "ppo" else f"default-{algo}"
    return (name, preset(name)) if name in names() else ("default", preset("default"))
