"""Traces that nobody had seen when the preset `router` was frozen: three families, judged once.

`python -m benchmarks.serving fresh --runs RUNS` calls it. What a family is like was written down
first; its numbers are drawn by the hash of the frozen preset, and its traces have seeds that no
other table uses. Nothing was chosen by the results.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keel.apps.serving import Workload
from keel.apps.serving.settings import FIRST_HELD_OUT, Scenario, Setting, Span, draw_scenario
from keel.config import read
from keel.config.reading import rename_settings
from keel.presets import path_of

FROZEN = "ee0a90f"
"""The commit whose preset is judged."""
FROZEN_HASH = "64491c8ec09229f809125f27a1b43f2f405f10f28d40ef54f0b8673bdfaad29d"
"""SHA-256 of its `router.yaml`; all numbers are drawn by it."""
FROZEN_SETTINGS = "e8f38bd5305605a01711820046a609b34600c8a809bcf7b8987c5cd48b00abb8"
"""SHA-256 of the settings in it, under the names of today."""
FIRST_SEED = FIRST_HELD_OUT + 1_000_000
LONGEST = 12_000
"""Tokens that the tail of a prompt has at most."""
Change = Callable[[Scenario, np.random.Generator], Scenario]


@dataclass(frozen=True)
class Family:
    """Traces of one kind."""

    what: str
    setting: Setting
    change: Change
    """what the setting has no name for"""
    first_seed: int

    def draw(self, setting: Setting, seed: int) -> Scenario:
        """Return the scenario of a seed."""
        return self.change(draw_scenario(setting, seed), np.random.default_rng([seed, 7]))

    def seeds(self, count: int) -> list[int]:
        """Return seeds that no training draws, and no other table uses."""
        return [self.first_seed + i for i in range(count)]


def check_frozen() -> None:
    """Raise if the preset is not the one that was frozen."""
    settings = json.dumps(rename_settings(read(path_of("router"))), sort_keys=True)
    digest = hashlib.sha256(settings.encode()).hexdigest()
    if digest != FROZEN_SETTINGS:
        raise SystemExit(
            f"the settings of router.yaml have the hash {digest[:12]}, frozen was "
            f"{FROZEN_SETTINGS[:12]} ({FROZEN}): these traces are new to that preset only"
        )


def families(requests: int) -> dict[str, Family]:
    """Return the three families, their numbers drawn by the hash of the frozen preset.

    Args:
        requests: Of a trace.
    """
    makers = {"daily": _daily, "long prompts": _long_prompts, "failures": _failures}
    return {
        name: make(
            np.random.default_rng([int(FROZEN_HASH[:15], 16), i]), requests, FIRST_SEED + 1_000 * i
        )
        for i, (name, make) in enumerate(makers.items())
    }


def _span(rng: np.random.Generator, low: float, high: float) -> Span:
    a, b = sorted(rng.uniform(low, high, size=2))
    return float(a), float(b)


def _common(rng: np.random.Generator, requests: int) -> dict[str, Any]:
    return {
        "requests": requests,
        "replicas": int(rng.integers(3, 9)),
        "load": _span(rng, 0.5, 1.5),
        "cache": _span(rng, 200.0, 3_000.0),
        "interval": _span(rng, 0.0, 8.0),
        "dropped": float(rng.uniform(0.0, 0.2)),
    }


def _daily(rng: np.random.Generator, requests: int, first_seed: int) -> Family:
    """Long conversations, a rate that swings as over a day, and bursts on top."""
    setting = Setting(
        **_common(rng, requests),
        speed=_span(rng, 0.4, 2.0),
        burst=_span(rng, 0.2, 1.2),
        sessions=_span(rng, 0.3, 0.9),
        shared=int(rng.integers(2, 17)),
        lengths=str(rng.choice(["conversation", "chat"])),  # type: ignore[arg-type]
    )
    swing, days = _span(rng, 0.3, 0.9), int(rng.integers(1, 4))

    def change(scene: Scenario, chance: np.random.Generator) -> Scenario:
        arrival = day_and_night(scene.workload.arrival, float(chance.uniform(*swing)), days)
        return replace(scene, workload=replace(scene.workload, arrival=arrival))

    return Family("a daily swing, bursts, long conversations", setting, change, first_seed)


def _long_prompts(rng: np.random.Generator, requests: int, first_seed: int) -> Family:
    """Prompts with a heavy tail, behind many system prompts."""
    setting = Setting(
        **_common(rng, requests),
        speed=_span(rng, 0.4, 2.0),
        burst=_span(rng, 0.0, 0.5),
        sessions=_span(rng, 0.0, 0.3),
        shared=int(rng.integers(16, 65)),
        lengths=str(rng.choice(["arxiv", "code"])),  # type: ignore[arg-type]
    )
    share, exponent = _span(rng, 0.03, 0.2), float(rng.uniform(1.1, 2.0))

    def change(scene: Scenario, chance: np.random.Generator) -> Scenario:
        longer = with_tails(scene.workload, float(chance.uniform(*share)), exponent, chance)
        return replace(scene, workload=longer)

    return Family("prompts of up to 15,600 tokens, many prefixes", setting, change, first_seed)


def _failures(rng: np.random.Generator, requests: int, first_seed: int) -> Family:
    """Speeds farther apart than in training, and a replica that is gone for long."""
    setting = Setting(
        **_common(rng, requests),
        speed=_span(rng, 0.25, 3.0),
        burst=_span(rng, 0.0, 1.0),
        sessions=_span(rng, 0.0, 0.6),
        shared=int(rng.integers(1, 9)),
        failing=1.0,
    )
    away = _span(rng, 0.1, 0.4)

    def change(scene: Scenario, chance: np.random.Generator) -> Scenario:
        (when, which, _), _ = scene.conditions.failures
        back = when + float(chance.uniform(*away)) * float(scene.workload.arrival[-1])
        failures = ((when, which, False), (back, which, True))
        return replace(scene, conditions=replace(scene.conditions, failures=failures))

    return Family("mixed speeds, a replica fails in every trace", setting, change, first_seed)


def day_and_night(arrival: np.ndarray, swing: float, days: int) -> np.ndarray:
    """Return arrivals at a rate that swings by ±`swing` over the trace; first and last stay.

    The rate is multiplied by 1 + swing · sin(2π · days · t / span).

    Args:
        arrival: Seconds, ascending, `[N]`.
        swing: Between 0 and 1.
        days: Periods of the swing.
    """
    begin, span = arrival[0], arrival[-1] - arrival[0]
    clock = np.linspace(0.0, 1.0, 20_001)
    phase = 2.0 * np.pi * days
    passed = clock + swing * (1.0 - np.cos(phase * clock)) / phase
    warped: np.ndarray = begin + span * np.interp((arrival - begin) / span, passed, clock)
    return warped


def with_tails(
    workload: Workload, share: float, exponent: float, chance: np.random.Generator
) -> Workload:
    """Return the requests with Pareto-distributed tails on a share of the prompts.

    A tail is nobody's prefix. Arrivals are as much farther apart as there are more tokens.

    Args:
        workload: What is changed.
        share: Of prompts that get a tail.
        exponent: Of the Pareto distribution, whose least tail has 1,000 tokens.
        chance: Draws them.
    """
    count = len(workload)
    tails = np.minimum(1_000.0 * (1.0 + chance.pareto(exponent, count)), LONGEST)
    prompt = workload.prompt + np.where(chance.random(count) < share, tails, 0.0).astype(np.int64)
    before = float((workload.prompt + workload.output).sum())
    longer = replace(workload, prompt=prompt)
    return longer.slower(float((prompt + workload.output).sum()) / before)


def fresh_table(entries: Mapping[str, Any]) -> list[str]:
    """Return the table of all families: room, best heuristic, and every trained seed."""
    first = next(iter(entries.values()))
    seeds = list(first["policies"])
    lines = [
        f"| traces | measure | best heuristic | the clairvoyant saves | {' | '.join(seeds)} |",
        "|---|---|---|---:|" + "---:|" * len(seeds),
    ]
    for entry in entries.values():
        for measure, label in (("end_to_end", "mean end to end"), ("ttft_p99", "p99, first token")):
            room = entry["headroom"][measure]
            cells = [saved(entry["policies"][seed]["gains"][measure]) for seed in seeds]
            lines.append(
                f"| {entry['what']} | {label} | {room['best']}, {room['best_value']:.3f} s "
                f"| {room['room']:+.1%} ({room['low']:+.1%} to {room['high']:+.1%}) "
                f"| {' | '.join(cells)} |"
            )
    for entry in entries.values():
        lost = {name: x["dropped"] for name, x in (entry["routers"] | entry["policies"]).items()}
        if any(lost.values()):
            best = entry["headroom"]["end_to_end"]["best"]
            told = ", ".join(f"{name} {lost[name]:.0f}" for name in (best, "clairvoyant", *seeds))
            lines += [
                "",
                f"Lost with the replica that failed ({entry['what']}), of all traces: {told}.",
            ]
    return [*lines, "", f"Preset of commit `{FROZEN}`, SHA-256 `{FROZEN_HASH[:12]}…`."]


def saved(x: Mapping[str, float]) -> str:
    """Return a gain with its interval."""
    return f"{x['gain']:+.1%} ({x['low']:+.1%} to {x['high']:+.1%})"
