"""Distributions of the clusters and traces that a router is trained on."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from keel.apps.serving.cluster import Cluster, Replica
from keel.apps.serving.simulation import Conditions
from keel.apps.serving.synthetic import Synthetic, synthesize
from keel.apps.serving.tables import FORMS, closed_form
from keel.apps.serving.windows import sustainable_rate, window
from keel.apps.serving.workload import Workload
from keel.data import read_beside
from keel.errors import InputError, check_choice

Span = tuple[float, float]
"""Bounds of a uniform distribution."""
UNIT_RATE = {"conversation": 2.0, "code": 2.2, "arxiv": 0.94, "chat": 3.05}
"""Sustainable requests per second of one replica of speed 1 (Llama-2-7B on an A100), by their
lengths: the share `keel.apps.serving.windows.SUSTAINABLE_SHARE` of its peak rate."""
PREFIX_BLOCK = 64
"""Tokens of a prefix block, in requests that are drawn."""
FIRST_HELD_OUT = 2**40
"""First held-out seed: training never draws from here on."""


@dataclass(frozen=True)
class Setting:
    """Distribution of scenarios: parameters of clusters and traces, and their bounds."""

    replicas: int = 4
    fewest: int | None = None
    """least number of replicas of a scenario; `replicas` is the largest. None: always `replicas`"""
    requests: int = 256
    """requests of an episode"""
    model: str = "llama-2-7b-a100"
    load: Span = (0.5, 0.95)
    """arrival rate over the sustainable rate of all replicas"""
    speed: Span = (1.0, 1.0)
    """speed of each replica, log-uniform"""
    cache: Span = (0.0, 0.0)
    """prefix blocks of 64 tokens in each replica"""
    interval: Span = (0.0, 0.0)
    """seconds between reports"""
    dropped: float = 0.0
    """share of reports that get lost"""
    burst: Span = (0.0, 0.5)
    sessions: Span = (0.0, 0.0)
    """share of requests that go on with a conversation"""
    shared: int = 0
    """kinds of system prompts"""
    failing: float = 0.0
    """share of scenarios in which a replica fails for a tenth of the time"""
    alike: float = 0.0
    """share of scenarios in which all replicas are equally fast"""
    fresh: float = 0.0
    """share of scenarios in which reports are always up to date"""
    disturbed: float = 0.0
    """share of scenarios in which a disturbance sends many requests of the first half to one
    replica: a good router would never see a crowded replica otherwise"""
    lengths: Literal["conversation", "code", "arxiv", "chat", "any"] = "conversation"
    """lengths of prompts and outputs (`keel.apps.serving.synthetic`); `any`: one kind a scenario"""
    fixed: tuple[int, int] | None = None
    """prompt and output of every request"""
    trace: str | None = None
    """file of recorded requests: a scenario is a window of it, at the load that was drawn"""
    known_speeds: bool = False
    """heuristics know the speeds of the replicas"""

    def __post_init__(self) -> None:
        check_choice("model", self.model, FORMS)
        check_choice("lengths", self.lengths, (*UNIT_RATE, "any"))
        if self.replicas < 1 or self.requests < 2:
            raise InputError("setting: expected at least one replica and two requests")
        if self.fewest is not None and not 1 <= self.fewest <= self.replicas:
            raise InputError(f"fewest: expected 1 to {self.replicas}, got {self.fewest}")
        for name in ("load", "speed", "cache", "interval", "burst", "sessions"):
            low, high = getattr(self, name)
            if not 0.0 <= low <= high < np.inf:
                raise InputError(f"{name}: expected 0 ≤ low ≤ high, got {low}, {high}")
        if self.load[0] == 0.0 or self.speed[0] == 0.0:
            raise InputError("setting: expected load and speed above 0")


SETTINGS = read_beside(__file__, "settings.yaml", dict[str, Setting])
"""Distributions of scenarios by name."""
RENAMED = {"note-004": "light-load"}
"""Names of settings in version 0.1, which still work."""


def make_setting(name: str, **changes: Any) -> Setting:
    """Make a named setting with changes.

    Args:
        name: A name of `SETTINGS`.
        **changes: Other fields of `Setting`.
    """
    name = check_choice("setting", RENAMED.get(name, name), SETTINGS)
    known = {field.name for field in fields(Setting)}
    for key in changes:
        check_choice("setting", key, known)
    return replace(SETTINGS[name], **changes)


@dataclass(frozen=True)
class Scenario:
    """Cluster, trace, and conditions of one episode."""

    cluster: Cluster
    workload: Workload
    conditions: Conditions


def draw_scenario(setting: Setting, seed: int) -> Scenario:
    """Draw a scenario; the same seed always gives the same.

    Args:
        setting: Distribution of scenarios.
        seed: Below `FIRST_HELD_OUT` for training.
    """
    rng = np.random.default_rng([seed, 3])
    tables = closed_form(setting.model)
    low, high = np.log(setting.speed)
    count, chance = setting.replicas, np.random.default_rng([seed, 5])
    if setting.fewest is not None:
        count = int(chance.integers(setting.fewest, setting.replicas + 1))
    speeds = np.exp(rng.uniform(low, high, size=count))
    caches = rng.uniform(*setting.cache, size=count).astype(int)
    if rng.random() < setting.alike:
        speeds = np.ones(count)
    load = _between(setting.load, rng) * float(speeds.sum())
    if setting.trace is not None:
        rate = load * sustainable_rate(setting.trace, setting.model)
        workload = window(setting.trace, setting.requests, rate, seed >= FIRST_HELD_OUT, chance)
        caches = caches * PREFIX_BLOCK // workload.prefix_block
    else:
        lengths: str = setting.lengths
        if lengths == "any":
            lengths = str(chance.choice(list(UNIT_RATE)))
        workload = _drawn(setting, lengths, load * UNIT_RATE[lengths], seed, rng)
    replicas = tuple(
        Replica(tables, speed=float(s), cache=int(c)) for s, c in zip(speeds, caches, strict=True)
    )
    interval = _between(setting.interval, rng)
    conditions = Conditions(
        interval=0.0 if chance.random() < setting.fresh else interval,
        dropped=setting.dropped,
        known_speeds=setting.known_speeds,
        failures=_failures(setting.failing, count, float(workload.arrival[-1]), rng),
    )
    return Scenario(Cluster(replicas), workload, conditions)


def _drawn(
    setting: Setting, lengths: str, rate: float, seed: int, rng: np.random.Generator
) -> Workload:
    return synthesize(
        Synthetic(
            count=setting.requests,
            rate=rate,
            lengths=lengths,
            fixed=setting.fixed,
            burst=_between(setting.burst, rng),
            sessions=_between(setting.sessions, rng),
            shared=setting.shared,
            prefix_block=PREFIX_BLOCK,
        ),
        seed,
    )


def _failures(
    failing: float, count: int, span: float, rng: np.random.Generator
) -> tuple[tuple[float, int, bool], ...]:
    """Draw the failure and the return of one replica."""
    chance, when, which = rng.random(), rng.uniform(0.1, 0.8) * span, rng.integers(count)
    if count < 2 or chance >= failing:
        return ()
    return (when, int(which), False), (when + 0.1 * span, int(which), True)


def _between(span: Span, rng: np.random.Generator) -> float:
    return float(rng.uniform(*span))


def held_out(count: int) -> list[int]:
    """Return the first `count` held-out seeds, which training never draws."""
    return [FIRST_HELD_OUT + i for i in range(count)]


def training_seed(rng: np.random.Generator) -> int:
    """Draw a seed for training."""
    return int(rng.integers(FIRST_HELD_OUT))
