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
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from keel.compare import compare
from keel.compare.comparison import Comparison, as_json
from keel.compare.sources import load_runs
from keel.compare.verdict import percent
from keel.functional import t_interval, trimmed_mean
from keel.presets import preset_for
from keel.tracking import read_config
from keel.tracking.resume import flat

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
    "LunarLanderContinuous-v3",
    "BipedalWalker-v3",
    "FrozenLake-v1",
)
"""Environments chosen before anything was measured; none of them has a preset."""
SEEDS = range(30, 40)
"""Seeds of both sides. Candidates were compared on 100 to 105, and earlier measurements used 10 to
24: none of these is among them."""
EPISODES = 20
METRIC = "eval/return_mean"
SETTINGS = (
    "rollout_steps",
    "envs.num",
    "envs.normalize_obs",
    "envs.normalize_reward",
    "network.hidden",
    "network.log_std",
    "advantage.gamma",
    "advantage.lam",
    "advantage.recompute",
    "region.minibatch",
    "region.epochs",
    "region.learning_rate",
    "region.schedule",
    "region.max_grad_norm",
    "region.clip",
    "region.max_kl",
    "explore.entropy_coef",
)
"""Published part of the configuration that was measured; a test holds the preset to it."""
SIDES = ("sb3", "keel")
VERDICTS = ("keep", "not distinguishable", "slightly worse", "roll back")


def train(side: str, env: str, runs: Path) -> None:
    """Train the seeds of one side that are not finished yet."""
    seeds = missing(side, env, runs)
    if not seeds:
        return
    print(f"{side} {env} seeds {seeds}", flush=True)
    folder = runs / side / env
    for seed in seeds:  # what an interrupted run left behind
        shutil.rmtree(folder / f"seed-{seed}", ignore_errors=True)
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command(side, env, seeds, folder), check=True, env=alone)


def missing(side: str, env: str, runs: Path) -> list[int]:
    """Return the seeds of one side that are not finished."""
    folder = runs / side / env
    return [seed for seed in SEEDS if not is_finished(side, folder / f"seed-{seed}")]


def is_finished(side: str, folder: Path) -> bool:
    """Return whether a run has come to its end, the evaluation included."""
    record = folder / ("evaluation.json" if side == "sb3" else "run.json")
    if not record.exists():
        return False
    return side == "sb3" or json.loads(record.read_text())["status"] == "finished"


def command(side: str, env: str, seeds: Sequence[int], folder: Path) -> list[str]:
    """The command that trains seeds; everything but budget and evaluation is a default."""
    words = [str(seed) for seed in seeds]
    if side == "sb3":
        python = str(ROOT / ".venv-peers" / "bin" / "python")
        worker = str(ROOT / "benchmarks" / "workers" / "defaults_sb3.py")
        return [python, "-W", "ignore", worker, env, str(STEPS), str(EPISODES), str(folder), *words]
    budget = ["--total-steps", str(STEPS), "--evaluation.episodes", str(EPISODES)]
    place = ["--runs", str(folder.parent), "--name", env, "--quiet"]
    return [sys.executable, "-m", "keel", "train", env, *budget, *place, "--seeds", *words]


def judge(env: str, runs: Path) -> dict[str, Any]:
    """Return what `keel compare` says about one environment, with the mean of each side."""
    words = [f"{side}={runs / side / env / f'seed-{seed}'}" for side in SIDES for seed in SEEDS]
    comparison = compare(load_runs(words, metric=METRIC), baseline="sb3", metric=METRIC)
    answer = as_json(comparison)
    return {
        "steps": answer["horizon"][env],
        **{side: side_of(comparison, side, env) for side in SIDES},
        **{name: answer[name] for name in ("verdict", "reasons", "iqm", "interval", "relative")},
    }


def side_of(comparison: Comparison, side: str, env: str) -> dict[str, Any]:
    """Scores of the seeds, their mean and the reach of its 95 % interval (Student)."""
    group = next(group for group in comparison.groups if group.name == side)
    scores = group.scores[env]
    interval = t_interval((1.0, trimmed_mean(scores, 0.0)))
    return {
        "scores": scores.tolist(),
        "mean": float(interval.estimate),
        "reach": float(interval.high - interval.estimate),
    }


def summary(cells: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Number of environments that were won, and each verdict."""
    verdicts = [cell["verdict"] for cell in cells.values()]
    return {
        "environments": len(cells),
        "higher_mean": sum(cell["keel"]["mean"] > cell["sb3"]["mean"] for cell in cells.values()),
        **{name: verdicts.count(name) for name in VERDICTS},
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
        f"{', '.join(f'{name} {total[name]}' for name in VERDICTS)}.",
    ]
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Three significant digits, whole numbers with thousands separated."""
    if value == 0.0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}".replace("-", "−")


def settings(runs: Path) -> dict[str, Any]:
    """The settings that all runs of Keel had in common, read from the runs themselves."""
    configs = [
        dict(flat(read_config(path.parent))) for path in (runs / "keel").rglob("config.yaml")
    ]
    picked = [{name: config[name] for name in SETTINGS} for config in configs]
    if any(other != picked[0] for other in picked):
        raise SystemExit(f"{runs}: the runs of Keel differ in their settings; remove the old ones")
    return picked[0]


def versions(runs: Path) -> dict[str, dict[str, str]]:
    """Settings that each side was measured with."""
    record = next((runs / "sb3").rglob("evaluation.json"))
    ours = {name: version(name) for name in ("torch", "gymnasium", "mujoco")}
    return {"sb3": json.loads(record.read_text())["versions"], "keel": ours}


def write(runs: Path) -> None:
    """Compare, and write data and table."""
    complete = [env for env in ENVIRONMENTS if not any(missing(s, env, runs) for s in SIDES)]
    if len(complete) < len(ENVIRONMENTS):
        left = ", ".join(env for env in ENVIRONMENTS if env not in complete)
        raise SystemExit(f"not all seeds are trained; first `run`: {left}")
    cells = {env: judge(env, runs) for env in ENVIRONMENTS}
    data = {
        "metric": METRIC,
        "episodes": EPISODES,
        "seeds": list(SEEDS),
        "settings": settings(runs),
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
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=SIDES)
    parser.add_argument("--only", choices=ENVIRONMENTS, nargs="+", help="train only these")
    options = parser.parse_args()
    for env in ENVIRONMENTS:
        if preset_for(env)[0] != "default":
            raise SystemExit(f"{env} has a preset by now: it cannot stand in this table")
    if options.part in ("run", "all"):
        for env in options.only or ENVIRONMENTS:
            for side in options.sides:
                train(side, env, options.runs)
    if options.part in ("table", "all"):
        write(options.runs)


if __name__ == "__main__":
    main()
