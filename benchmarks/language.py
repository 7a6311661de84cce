"""Token-level RL: train what the page on language models shows, and write its tables and pictures.

    python -m benchmarks.language train --runs RUNS [--only lookup addition] [--seeds 100 101 102]
    python -m benchmarks.language gather --runs RUNS    into docs/data/language.json
    python -m benchmarks.language page                  tables and pictures from that

Training may be interrupted: finished seeds are never trained twice, begun ones go on. Settings were
chosen on seeds below 100: once there are five others, only those are reported.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.seeds import train_seed
from keel.functional import t_interval, trimmed_mean, wilson_interval
from keel.look import BLUE, GREY, ORANGE, new_figure, tidy
from keel.tracking.drawing import write_png
from keel.tracking.reader import read_metrics

ROOT = Path(__file__).resolve().parents[1]
DATA, FOLDER = ROOT / "docs" / "data" / "language.json", ROOT / "docs" / "data" / "language"
IMAGES = ROOT / "docs" / "images"

ADAPTIVE = (
    *("--kl.place", "loss", "--kl.loss", "full", "--kl.controller", "adaptive"),
    *("--kl.coef", "0.3", "--kl.horizon", "256"),
    *("--region.learning-rate", "2e-4", "--region.schedule", "constant"),
)
EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "lookup": ("--task", "lookup"),
    "lookup-unmasked": ("--task", "lookup", "--no-state-masking", "--no-control"),
    "addition": ("--task", "addition"),
    "countdown": ("--task", "countdown"),
    "lookup-adaptive": ("--task", "lookup", *ADAPTIVE, "--kl.target", "0.1", "--no-control"),
    "sort-adaptive": (
        *("--task", "sort", "--total-steps", "76800", "--sample.prompts", "16"),
        *("--region.minibatch", "128", "--warmup.until", "0.3", "--warmup.every", "1"),
        *ADAPTIVE,
        *("--kl.target", "0.05", "--region.learning-rate", "3e-5", "--no-control"),
        *("--kl.horizon", "1024", "--kl.low", "0.03"),
    ),
    "hacked": ("--task", "sort-flawed", "--no-control"),
    "held": ("--task", "sort-flawed", *ADAPTIVE, "--kl.target", "0.05", "--no-control"),
}
"""Words of `keel train language`."""
FRESH = 100
"""Seeds from here on were used for nothing before."""
ENOUGH = 5
"""Fresh seeds from which on they alone are reported; until then they are kept beside the others."""
CURVES = {
    "success": "rollout/success",
    "reward": "rollout/return_mean",
    "kl_reference": "kl/reference_token",
    "kl_coef": "train/kl_coef",
    "kl_exact": "train/kl_exact",
}


def gather(runs: Path) -> None:
    """What every finished seed came to, and its curves."""
    results: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    for name in EXPERIMENTS:
        for folder in sorted((runs / name).glob("seed-*")):
            if not (folder / "language.json").is_file():
                continue
            table = read_metrics(folder)
            some = np.unique(np.linspace(0, len(table) - 1, 100).astype(int))
            curves = {
                key: [_plain(float(table.columns[column][i])) for i in some]
                for key, column in CURVES.items()
                if column in table.columns
            }
            results.setdefault(name, {})[folder.name] = {
                **json.loads((folder / "language.json").read_text()),
                "seconds": float(table["time/seconds"][-1]),
                "updates": len(table),
                "kl_exact_max": float(np.nanmax(table["train/kl_exact"])),
                "max_kl": float(table["train/max_kl"][-1]),
                "half": _second_half(table),
                "steps": [int(table.step[i]) for i in some],
                "curves": curves,
            }
            print(f"{name} {folder.name}")
    DATA.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def reported(results: dict[str, Any]) -> dict[str, Any]:
    """Return the fresh seeds of each experiment once there are `ENOUGH`, until then the others."""
    reported = {}
    for name, runs in results.items():
        fresh = {seed: run for seed, run in runs.items() if _number(seed) >= FRESH}
        others = {seed: run for seed, run in runs.items() if seed not in fresh}
        reported[name] = fresh if len(fresh) >= ENOUGH or not others else others
    return reported


def _number(seed: str) -> int:
    return int(seed.removeprefix("seed-"))


def _seeds(runs: dict[str, Any]) -> str:
    """Write the seeds of an experiment: 100–104."""
    numbers = sorted(map(_number, runs))
    listed = ", ".join(map(str, numbers))
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}–{numbers[-1]}" if whole and len(numbers) > 2 else listed


def _second_half(table: Any) -> dict[str, float | None]:
    """Means over the second half of a run."""
    half = slice(len(table) // 2, None)
    return {
        key: _plain(float(np.nanmean(table.columns[column][half])))
        for key, column in CURVES.items()
        if column in table.columns
    }


def _plain(x: float) -> float | None:
    return x if math.isfinite(x) else None


def interval(values: list[float]) -> str:
    """Write the mean, and the 95 % interval of Student's t over seeds."""
    result = t_interval((1.0, trimmed_mean(torch.tensor(values), 0.0)))
    mean, low, high = (float(x) for x in result)
    return f"{mean:.3f} ({low:.3f} to {high:.3f})" if len(values) > 1 else f"{mean:.3f}"


def share(values: list[float], prompts: float) -> tuple[float, float, float]:
    """Return the mean of success rates, and a 95 % interval over prompts and seeds.

    Wilson's of one seed. Of several, Student's t of their rates, inside of [0, 1] and never
    narrower than Wilson's of one set of prompts, because all seeds are judged on the same ones.

    Args:
        values: The success rate of every seed.
        prompts: How many prompts each of them was judged on.
    """
    mean = statistics.fmean(values)
    _, low, high = (float(x) for x in wilson_interval(mean * prompts, prompts))
    if len(values) > 1:
        result = t_interval((1.0, trimmed_mean(torch.tensor(values), 0.0)))
        low, high = min(low, float(result.low)), max(high, float(result.high))
    return mean, max(0.0, low), min(1.0, high)


def rate(values: list[float], prompts: float, digits: int = 3) -> str:
    """Write a success rate with its interval."""
    mean, low, high = (f"{x:.{digits}f}" for x in share(values, prompts))
    return f"{mean} ({low} to {high})"


def page() -> None:
    """Tables and pictures."""
    every = json.loads(DATA.read_text())
    results = reported(every)
    FOLDER.mkdir(exist_ok=True)
    for name, lines in tables(every).items():
        _write(name, lines)
    if any(name in results for name in ("lookup", "addition", "countdown")):
        _draw_tasks(results, every)
    if "hacked" in results and "held" in results:
        _draw_hacking(results)


def tables(every: dict[str, Any]) -> dict[str, list[str]]:
    """Return the lines of every table, by the name of its file.

    Args:
        every: What `gather` wrote.
    """
    results = reported(every)
    return {
        "tasks.md": _tasks(results, every),
        "controller.md": _controller(results),
        "hacking.md": _hacking(results),
    }


def _write(name: str, lines: list[str]) -> None:
    (FOLDER / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines), end="\n\n")


def _tasks(results: dict[str, Any], every: dict[str, Any]) -> list[str]:
    """Write the table of tasks.

    Args:
        results: What is reported.
        every: Everything there is; imitation is that of other seeds if those reported have none.
    """
    lines = [
        "| task | seeds | after the warm-up | after RL | more imitation, equal computing "
        "| RL beyond imitation, by seed | minutes | largest KL / bound |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in ("lookup", "lookup-unmasked", "addition", "countdown"):
        runs = list(results.get(name, {}).values())
        if not runs:
            continue
        prompts = runs[0]["rl"]["episodes"]
        minutes = statistics.fmean(run["seconds"] for run in runs) / 60
        worst = max(run["kl_exact_max"] for run in runs)
        lines.append(
            f"| {name} | {_seeds(results[name])} "
            f"| {rate([run['warm_up']['judged_success'] for run in runs], prompts)} "
            f"| **{rate([run['rl']['success'] for run in runs], prompts)}** "
            f"| {' | '.join(_beside_imitation(results[name], every[name], prompts))} "
            f"| {minutes:.1f} | {worst:.4f} / {runs[0]['max_kl']:g} |"
        )
    return lines


def _imitated(reported: dict[str, Any], every: dict[str, Any]) -> dict[str, Any]:
    """Return the runs that were imitated beside: those reported, or if there are none, others."""
    fresh, others = (
        {seed: run for seed, run in runs.items() if "control" in run} for runs in (reported, every)
    )
    return fresh or others


def _which(runs: dict[str, Any], reported: dict[str, Any]) -> str:
    """Name the seeds of runs where they are not those reported."""
    plural = "s" if len(runs) > 1 else ""
    return "" if runs.keys() == reported.keys() else f"; seed{plural} {_seeds(runs)}"


def _beside_imitation(
    reported: dict[str, Any], every: dict[str, Any], prompts: float
) -> tuple[str, str]:
    """Return what more imitation comes to, and how far RL goes beyond, with their seeds."""
    runs = _imitated(reported, every)
    if not runs:
        return "", ""
    which = _which(runs, reported)
    controls = [run["control"]["success"] for run in runs.values()]
    beyond = [run["rl"]["success"] - run["control"]["success"] for run in runs.values()]
    return rate(controls, prompts) + which, interval(beyond) + which


TARGETS = {
    name: float(words[words.index("--kl.target") + 1])
    for name, words in EXPERIMENTS.items()
    if "--kl.target" in words
}


def _controller(results: dict[str, Any]) -> list[str]:
    lines = [
        "| run | target, nats per token | measured, second half | off by | β at the end |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, target in TARGETS.items():
        for seed, run in results.get(name, {}).items():
            measured = run["half"]["kl_reference"]
            lines.append(
                f"| {name}, {seed} | {target:g} | {measured:.4f} | {measured / target - 1:+.0%} "
                f"| {run['curves']['kl_coef'][-1]:.3g} |"
            )
    return lines


def _hacking(results: dict[str, Any]) -> list[str]:
    lines = [
        "| run | flawed reward | really solved (95 %) | nats per token from the warm-up |",
        "|---|---:|---:|---:|",
    ]
    for name in ("hacked", "held"):
        for seed, run in results.get(name, {}).items():
            start, end = run["warm_up"], run["rl"]
            kl = run["half"].get("kl_reference")
            before = rate([start["judged_success"]], start["judged_episodes"], 2)
            after = rate([end["success"]], end["episodes"], 2)
            lines.append(
                f"| {name}, {seed} | {start['judged_return_mean']:.2f} → {end['return_mean']:.2f} "
                f"| {before} → {after} "
                f"| {'not measured: no reference' if kl is None else f'{kl:.3f}'} |"
            )
    return lines


def _draw_tasks(results: dict[str, Any], every: dict[str, Any]) -> None:
    names = [name for name in ("lookup", "addition", "countdown") if name in results]
    figure = new_figure(4.2 * len(names), 3.6)
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        tidy(axes, name, "completions", "share solved in training")
        axes.locator_params(axis="x", nbins=5)
        runs = list(results[name].values())
        for k, run in enumerate(runs):
            success = [math.nan if x is None else x for x in run["curves"]["success"]]
            label = None if k else f"RL, {len(runs)} seeds"
            axes.plot(run["steps"], success, lw=1.0, alpha=0.75, color=BLUE, label=label)
        level = statistics.fmean(run["warm_up"]["judged_success"] for run in runs)
        axes.axhline(level, ls="--", lw=1.2, color=GREY, label="warm-up")
        if imitated := _imitated(results[name], every[name]):
            level = statistics.fmean(run["control"]["success"] for run in imitated.values())
            label = f"more imitation{_which(imitated, results[name])}"
            axes.axhline(level, ls="--", lw=1.2, color=ORANGE, label=label)
        axes.set_ylim(-0.02, 1.02)
        axes.legend(fontsize=8, frameon=False)
    write_png(figure, IMAGES / "language-tasks.png")


def _draw_hacking(results: dict[str, Any]) -> None:
    figure = new_figure(9.6, 3.6)
    panels = figure.subplots(1, 2)
    for axes, key, title in zip(
        panels, ("reward", "success"), ("flawed reward", "really solved"), strict=True
    ):
        tidy(axes, title, "completions", "mean over completions")
        for name, colour in (("hacked", ORANGE), ("held", BLUE)):
            for k, run in enumerate(results[name].values()):
                label = {"hacked": "β = 0", "held": "β steered by the KL"}[name] if not k else ""
                values = [math.nan if x is None else x for x in run["curves"][key]]
                axes.plot(run["steps"], values, lw=1.2, color=colour, label=label or None)
        axes.set_ylim(-0.02, 1.02)
        axes.legend(fontsize=8, frameon=False)
    write_png(figure, IMAGES / "language-hacking.png")


def main() -> None:
    """What the first word says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("train", "gather", "page"))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--only", choices=EXPERIMENTS, nargs="+", default=list(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(FRESH, FRESH + 5)))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--no-control", action="store_true", help="without more imitation beside")
    args = parser.parse_args()
    if args.action == "train":
        threads = ("--threads", str(args.threads))
        control = ("--no-control",) if args.no_control else ()
        for seed in args.seeds:
            for name in args.only:
                words = (*EXPERIMENTS[name], *control, *threads)
                train_seed(args.runs / name, "language", seed, *words)
        return
    if args.action == "gather":
        gather(args.runs)
    page()


if __name__ == "__main__":
    main()
