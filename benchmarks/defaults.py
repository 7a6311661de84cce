"""Keel's defaults beside Stable-Baselines3's, where Keel has no preset.

    python -m benchmarks.defaults run      train what is missing, one run after the other
    python -m benchmarks.defaults table    compare, and write docs/data/defaults.json and .md

Runs are kept in build/defaults (--runs FOLDER); a run that is finished is not repeated. The table
asks `keel compare` about one environment after the other, with SB3 as the baseline. SB3 lives in
the environment of the peers (`make peers`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from keel.compare import compare
from keel.compare.comparison import Comparison, as_json
from keel.compare.sources import load_runs
from keel.compare.verdict import percent
from keel.functional import t_interval, trimmed_mean
from keel.presets import preset_for

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "defaults.json"
TABLE = DATA.with_suffix(".md")
STEPS = 51_200
"""25 rollouts of 2,048 steps: SB3 rounds 50,000 up to it."""
ENVIRONMENTS = (
    "InvertedPendulum-v5",
    "InvertedDoublePendulum-v5",
    "Reacher-v5",
    "Pusher-v5",
    "Swimmer-v5",
    "HumanoidStandup-v5",
    "LunarLanderContinuous-v3",
    "BipedalWalker-v3",
    "FrozenLake-v1",
)
"""Written down before anything was measured; none of them has a preset."""
SEEDS = (10, 11, 12, 13, 14)
"""None of them was used to choose the defaults."""
EPISODES = 20
METRIC = "eval/return_mean"
SIDES = ("sb3", "keel")


def train(side: str, env: str, seed: int, runs: Path) -> None:
    """Train one seed of one side, unless it is there."""
    folder = runs / side / env / f"seed-{seed}"
    if is_finished(side, folder):
        return
    print(f"{side} {env} seed {seed}", flush=True)
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command(side, env, seed, folder), check=True, env=alone)


def is_finished(side: str, folder: Path) -> bool:
    """Whether a run has come to its end, the evaluation included."""
    record = folder / ("evaluation.json" if side == "sb3" else "run.json")
    if not record.exists():
        return False
    return side == "sb3" or json.loads(record.read_text())["status"] == "finished"


def command(side: str, env: str, seed: int, folder: Path) -> list[str]:
    """The command that trains one seed; everything but budget and evaluation is a default."""
    numbers = [str(seed), str(STEPS), str(EPISODES)]
    if side == "sb3":
        python = ROOT / ".venv-peers" / "bin" / "python"
        worker = ROOT / "benchmarks" / "workers" / "defaults_sb3.py"
        return [str(python), "-W", "ignore", str(worker), env, *numbers, str(folder)]
    options = ["--seed", "--total-steps", "--evaluation.episodes"]
    words = [word for pair in zip(options, numbers, strict=True) for word in pair]
    place = ["--runs", str(folder.parents[1]), "--name", env]
    return [sys.executable, "-m", "keel", "train", env, *words, *place, "--quiet"]


def judge(env: str, runs: Path) -> dict[str, Any]:
    """What `keel compare` says about one environment, with the mean of each side."""
    words = [f"{side}={runs / side / env}" for side in SIDES]
    comparison = compare(load_runs(words, metric=METRIC), baseline="sb3", metric=METRIC)
    answer = as_json(comparison)
    return {
        "steps": answer["horizon"][env],
        **{side: side_of(comparison, side, env) for side in SIDES},
        **{name: answer[name] for name in ("verdict", "reasons", "iqm", "interval", "relative")},
    }


def side_of(comparison: Comparison, side: str, env: str) -> dict[str, Any]:
    """Scores of the seeds, their mean and Student's 95 % interval, and the speed."""
    group = next(group for group in comparison.groups if group.name == side)
    scores = group.scores[env]
    interval = t_interval((1.0, trimmed_mean(scores, 0.0)))
    return {
        "scores": scores.tolist(),
        "mean": float(interval.estimate),
        "reach": float(interval.high - interval.estimate),
        "seconds_per_step": group.seconds_per_step,
    }


def summary(cells: dict[str, dict[str, Any]]) -> dict[str, int]:
    """How many environments were won, and each verdict."""
    verdicts = [cell["verdict"] for cell in cells.values()]
    return {
        "environments": len(cells),
        "higher_mean": sum(cell["keel"]["mean"] > cell["sb3"]["mean"] for cell in cells.values()),
        **{name: verdicts.count(name) for name in ("keep", "not distinguishable", "roll back")},
    }


def table(data: dict[str, Any]) -> str:
    """The page's table."""
    lines = [
        "| environment | steps | Keel | SB3 | difference | `keel compare` |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for env, cell in data["cells"].items():
        sides = [f"{number(cell[s]['mean'])} ± {number(cell[s]['reach'])}" for s in SIDES[::-1]]
        relative = percent(cell["relative"])
        lines.append(
            f"| {env} | {cell['steps']:,} | {sides[0]} | {sides[1]} | {relative} "
            f"| {cell['verdict']} |"
        )
    total = data["summary"]
    lines += [
        "",
        f"Higher mean in {total['higher_mean']} of {total['environments']} environments; "
        f"keep {total['keep']}, not distinguishable {total['not distinguishable']}, "
        f"roll back {total['roll back']}.",
    ]
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Three significant digits, whole numbers with thousands separated."""
    if value == 0.0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}".replace("-", "−")


def versions(runs: Path) -> dict[str, dict[str, str]]:
    """What each side was measured with."""
    record = next((runs / "sb3").rglob("evaluation.json"))
    ours = {name: version(name) for name in ("torch", "gymnasium", "mujoco")}
    return {"sb3": json.loads(record.read_text())["versions"], "keel": ours}


def write(runs: Path) -> None:
    """Compare what is there and write data and table."""
    torch.manual_seed(0)
    cells = {env: judge(env, runs) for env in ENVIRONMENTS}
    data = {
        "metric": METRIC,
        "episodes": EPISODES,
        "seeds": SEEDS,
        "versions": versions(runs),
        "summary": summary(cells),
        "cells": cells,
    }
    DATA.write_text(json.dumps(data, indent=1) + "\n")
    TABLE.write_text(table(data))
    print(table(data))


def main() -> None:
    """Run or tabulate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("run", "table", "all"))
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "defaults")
    parser.add_argument("--side", choices=SIDES, help="train only this side")
    options = parser.parse_args()
    for env in ENVIRONMENTS:
        if preset_for(env)[0] != "default":
            raise SystemExit(f"{env} has a preset by now: it cannot stand in this table")
    if options.part in ("run", "all"):
        for seed in SEEDS:
            for env in ENVIRONMENTS:
                for side in SIDES if options.side is None else (options.side,):
                    train(side, env, seed, options.runs)
    if options.part in ("table", "all"):
        write(options.runs)


if __name__ == "__main__":
    main()
