"""What the corpus holds: healthy setups, and faults planted in them, as YAML tables say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
HALVES = {"writing": (0, 1, 2), "judged": (100, 101, 102)}
"""Seeds of the half that rules are written on, and of the one that they are judged on."""
HEALTHY = "healthy"


@dataclass(frozen=True)
class Setup:
    """How a healthy run is made."""

    name: str
    trainer: str
    """`keel`, `sb3`, `cleanrl` or `trl`"""
    env: str
    steps: int
    settings: Mapping[str, Any]
    """in the words of the trainer"""
    inject: tuple[tuple[str, Any], ...] = ()
    """what is changed beside settings, by the names that wrappers and workers know"""
    only: tuple[str, ...] = tuple(HALVES)
    """halves that it belongs to"""


@dataclass(frozen=True)
class Fault:
    """One kind of fault; decided from its meaning, before a log of it was seen."""

    name: str
    what: str
    rules: tuple[str, ...]
    """each of them names the cause"""
    cure: bool
    """whether a setting cures it"""
    runs: tuple[Setup, ...]
    only: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """One run of the corpus."""

    kind: str
    """`healthy`, or the name of a fault"""
    setup: Setup
    seed: int

    @property
    def path(self) -> str:
        """Where its log is kept, below the folder of its half."""
        return f"{self.setup.trainer}/{self.kind}/{self.setup.name}/seed-{self.seed}"

    def as_dict(self) -> dict[str, Any]:
        """Return what a worker is told."""
        setup = self.setup
        return {
            "kind": self.kind,
            "setup": setup.name,
            "trainer": setup.trainer,
            "env": setup.env,
            "steps": setup.steps,
            "settings": dict(setup.settings),
            "inject": [list(pair) for pair in setup.inject],
            "seed": self.seed,
        }


def setups() -> dict[str, Setup]:
    """Return the healthy setups by name."""
    table = yaml.safe_load((HERE / "healthy.yaml").read_text())
    return {
        name: Setup(
            name,
            entry["trainer"],
            entry["env"],
            int(entry["steps"]),
            entry.get("settings", {}),
            _pairs(entry.get("inject", {})),
            tuple(entry.get("only", HALVES)),
        )
        for name, entry in table.items()
    }


def faults() -> dict[str, Fault]:
    """Return the faults by name."""
    bases = setups()
    found: dict[str, Fault] = {}
    for file in sorted(HERE.glob("faults*.yaml")):
        for name, entry in yaml.safe_load(file.read_text()).items():
            if name in found or name == HEALTHY:
                raise ValueError(f"{file.name}: {name} is there twice")
            runs = tuple(_planted(bases, run) for run in entry["runs"])
            rules, only = tuple(entry["rules"]), tuple(entry.get("only", HALVES))
            found[name] = Fault(name, entry["what"], rules, bool(entry["cure"]), runs, only)
    return found


def jobs(half: str) -> Iterator[Job]:
    """Yield the runs of a half, all of one seed before the next one.

    Args:
        half: One of `HALVES`.
    """
    planted = [fault for fault in faults().values() if half in fault.only]
    for seed in HALVES[half]:
        yield from (Job(HEALTHY, s, seed) for s in setups().values() if half in s.only)
        yield from (Job(fault.name, run, seed) for fault in planted for run in fault.runs)


def _planted(bases: Mapping[str, Setup], run: Mapping[str, Any]) -> Setup:
    """Return a healthy setup with a fault in it."""
    base = bases[run["base"]]
    return Setup(
        base.name,
        base.trainer,
        run.get("env", base.env),
        int(run.get("steps", base.steps)),
        {**base.settings, **run.get("set", {})},
        (*base.inject, *_pairs(run.get("inject", {}))),
    )


def _pairs(entry: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(entry.items())
