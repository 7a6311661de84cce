"""A router that collapses: what makes a largest share of 73 to 77 %, and what exploration does.

`python -m benchmarks.serving collapse` and `explore` call it. One factor is changed at a time, from
the preset `router-collapse`, and measured as the original log has it: how often the commonest
replica was chosen in a rollout. Runs are kept in memory only; finished seeds are never run twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student

from keel.config import Config
from keel.presets import preset
from keel.training.session import train

BEFORE, AFTER = "router-collapse", "router-rebalanced"
COLLAPSED_SHARE = (0.73, 0.77)
"""Range of the largest share in the original log."""
METRICS = {
    "reward": "env/total_reward",
    "delta": "env/delta_score",
    "entropy": "train/entropy",
    "clip": "train/clip_fraction",
    "latency": "env/latency",
    "kl": "train/kl_exact",
    "return": "rollout/return_mean",
    "first_token": "env/ttft_p99",
    "temperature": "train/temperature",
} | {f"replica_{r}": f"env/action_replica_{r}" for r in range(4)}
"""Means of the last quarter of a run."""


@dataclass(frozen=True)
class Variant:
    """A preset with changes."""

    what: str
    """the factor that is changed"""
    start: str = BEFORE
    """the preset"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """of the environment"""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """section to settings"""
    config: Mapping[str, Any] = field(default_factory=dict)
    """settings outside of any section"""


def _bonus(coef: float) -> dict[str, dict[str, float]]:
    return {"explore": {"entropy_coef": coef}}


VARIANTS = {
    "the preset": Variant("nothing: the original values"),
    "bonus 0.002": Variant("the entropy bonus: 0.002, the program's flag", settings=_bonus(0.002)),
    "bonus 0": Variant("the entropy bonus: none, or one without gradient", settings=_bonus(0.0)),
    "measured": Variant(
        "the reward: of what the simulator measures, always fresh", options={"cold_start": False}
    ),
    "unpaid": Variant("the reward: 0 for the last decision of a rollout", options={"unpaid": 64}),
    "raw advantages": Variant(
        "advantages: not normalized", settings={"advantage": {"normalize": "none"}}
    ),
    "scripts": Variant(
        "all of the program's scripts: bonus 0.002, learning rate 3e-4, γ 0.95, rollouts of 128, "
        "one episode, last reward unpaid",
        options={"requests": 5_120, "unpaid": 128},
        settings=_bonus(0.002) | {"advantage": {"gamma": 0.95}, "region": {"learning_rate": 3e-4}},
        config={"rollout_steps": 128},
    ),
    "one episode": Variant("the episode: it never ends", options={"requests": 5_120}),
    "rate 3e-4": Variant(
        "the learning rate: 3e-4, the program's flag", settings={"region": {"learning_rate": 3e-4}}
    ),
    "discount 0.2": Variant(
        "the discount: 0.2, by which the program overwrites its own",
        settings={"advantage": {"gamma": 0.2}},
    ),
}
"""What could make the largest share."""
EVEN = Variant("the proposed cure", start=AFTER)


EXPLORATION = {
    way: Variant(way, AFTER, settings={"explore": explore})
    for way, explore in {
        "neither": {"pulses": False},
        "pulses": {"pulses": True},
        "hierarchical": {"pulses": False, "hierarchical": True},
    }.items()
}
"""Temperature pulses, a bandit over temperatures, and neither."""


def configure(variant: Variant, seed: int) -> Config:
    """Return the settings of one run."""
    config = preset(variant.start)
    options = config.envs.options | dict(variant.options)
    changes: dict[str, Any] = {
        section: replace(getattr(config, section), **values)
        for section, values in variant.settings.items()
    }
    envs = replace(config.envs, options=options)
    return replace(config, seed=seed, envs=envs, **changes, **variant.config)


def run_variant(variant: Variant, seed: int) -> dict[str, float]:
    """Train one seed, and return what its last quarter was like.

    Args:
        variant: What is changed.
        seed: Of everything.
    """
    torch.set_num_threads(1)
    rows = [step.metrics for step in train(configure(variant, seed))]
    shares = np.array([row["rollout/action_share_max"] for row in rows])
    late = rows[3 * len(rows) // 4 :]
    inside = (shares >= COLLAPSED_SHARE[0]) & (shares <= COLLAPSED_SHARE[1])
    summary = {
        "share": float(shares[3 * len(rows) // 4 :].mean()),
        "largest": float(shares.max()),
        "inside": float(inside.mean()),
        "bound": max(row.get("train/kl_exact", math.nan) for row in rows),
        "pulses": float(sum(row["train/temperature"] > 1.0 for row in rows)),
    }
    return summary | {name: _mean(late, key) for name, key in METRICS.items()}


def _mean(rows: Sequence[Mapping[str, float]], key: str) -> float:
    values = [row[key] for row in rows if not math.isnan(row.get(key, math.nan))]
    return float(np.mean(values)) if values else math.nan


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval over seeds (Student's t)."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan, math.nan
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = float(student.ppf(0.975, len(values) - 1)) * spread
    return mean, mean - half, mean + half


def collapse_table(told: Mapping[str, Any]) -> list[str]:
    """Return the table of the router before and after, a row for each seed, beside round robin."""
    lines = [
        "| run | shares of the replicas | total reward | delta | entropy | clipped | pulses "
        "| mean end to end |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, label in (("the preset", "before"), ("after", "after")):
        for seed, x in told["collapse"].get(name, {}).items():
            shares = " / ".join(f"{x[f'replica_{r}']:.0%}" for r in range(4))
            lines.append(
                f"| {label}, seed {seed} | {shares} | {x['reward']:+.3f} | {x['delta']:.4f} "
                f"| {x['entropy']:.2f} | {x['clip']:.3f} | {x['pulses']:.0f} "
                f"| {x['latency']:.2f} s |"
            )
    even, room = told["collapse_round_robin"], told["collapse_headroom"]
    lines.append(f"| round robin | 25% / 25% / 25% / 25% | | | | | | {even['end_to_end']:.2f} s |")
    return [
        *lines,
        "",
        f"The clairvoyant saves {room['room']:.1%} of the best heuristic's mean "
        f"({room['low']:.1%} to {room['high']:.1%}): {room['verdict']}.",
    ]


def explore_table(runs: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Return the table of ways to explore: means over seeds, and their 95 % intervals."""
    lines = [
        "| exploration | return | mean end to end | largest share of a rollout | entropy "
        "| temperature | largest KL of an update |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in EXPLORATION:
        seeds = list(runs.get(name, {}).values())
        if not seeds:
            continue
        value, low, high = interval([x["return"] for x in seeds])
        late, soon, most = interval([x["latency"] for x in seeds])
        lines.append(
            f"| {name} | {value:.1f} ({low:.1f} to {high:.1f}) "
            f"| {late:.2f} s ({soon:.2f} to {most:.2f}) "
            f"| {np.mean([x['share'] for x in seeds]):.0%} "
            f"| {np.mean([x['entropy'] for x in seeds]):.2f} "
            f"| {np.mean([x['temperature'] for x in seeds]):.2f} "
            f"| {max(x['bound'] for x in seeds):.4f} |"
        )
    return lines


def causes_table(runs: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Return the table of all variants that were run: a row each, over its seeds."""
    lines = [
        "| what is changed | largest share of a rollout | least and most of a seed "
        "| rollouts at 73 to 77 % | entropy | clipped |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, variant in VARIANTS.items():
        seeds = list(runs.get(name, {}).values())
        if not seeds:
            continue
        shares = [x["share"] for x in seeds]
        mean, low, high = interval(shares)
        lines.append(
            f"| {variant.what} | {mean:.0%} ({low:.0%} to {min(high, 1.0):.0%}) "
            f"| {min(shares):.0%}, {max(shares):.0%} | {np.mean([x['inside'] for x in seeds]):.0%} "
            f"| {np.mean([x['entropy'] for x in seeds]):.2f} "
            f"| {np.mean([x['clip'] for x in seeds]):.2f} |"
        )
    return lines
