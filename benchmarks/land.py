"""LandDev-v0: train five seeds of both variants, judge them on held-out maps, write the tables.

    python -m benchmarks.land train --runs RUNS [--only small] [--seeds 100 … 104]
    python -m benchmarks.land judge --runs RUNS [--maps 50]   into docs/data/land.json
    python -m benchmarks.land page                            tables and pictures from that
    python -m benchmarks.land causes --runs RUNS              picture of the ablation land-causes
    python -m benchmarks.land scales --runs RUNS              of land-causes-large-returns
    python -m benchmarks.land speed                           steps of agents a second

Training may be interrupted: finished seeds are never trained twice, begun ones go on.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from benchmarks.land_scale import scales
from benchmarks.seeds import train_seed
from keel.apps.land import (
    BASELINES,
    FULL,
    SMALL,
    Games,
    find_optimum,
    held_out,
    play,
    record_game,
    write_city,
    write_gif,
)
from keel.apps.land.trained_policy import rules_of, trained_player
from keel.apps.land.vector import vector_env
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, new_figure, tidy
from keel.tracking.drawing import write_png
from keel.tracking.reader import read_metrics
from keel.training.policy import open_policy

ROOT = Path(__file__).resolve().parents[1]
DATA, TABLE = ROOT / "docs" / "data" / "land.json", ROOT / "docs" / "data" / "land.md"
IMAGES = ROOT / "docs" / "images"
VARIANTS = {"full": "", "small": "variant=small"}
RULES = {"full": FULL, "small": SMALL}


def judge(runs: Path, maps: int) -> None:
    """Everybody on the same held-out maps."""
    told: dict[str, Any] = {}
    before = json.loads(DATA.read_text()) if DATA.exists() else {}
    for variant, rules in RULES.items():
        seeds, known = held_out(maps), before.get(variant, {})
        if (known.get("maps"), known.get("rules")) != (maps, rules.digest()):
            known = {}  # of another game, or of other maps
        reports = known.get("reports") or {
            name: play(player, rules, seeds, name=name).to_dict()
            for name, player in BASELINES.items()
        }
        for folder in sorted((runs / f"land-{variant}").glob("seed-*")):
            policy = open_policy(folder, "last")
            report = play(trained_player(policy), rules_of(policy), seeds, name=folder.name)
            reports[folder.name] = report.to_dict()
            print(f"{variant} {folder.name}: {report.total:,.0f}")
        told[variant] = known | {"maps": maps, "rules": rules.digest(), "reports": reports}
    if "optimum" not in told["small"]:
        small = [find_optimum(int(seed), SMALL) for seed in held_out(maps)]
        told["small"]["optimum"] = [found.npv for found in small]
        told["small"]["gap"] = max(found.gap for found in small)
    DATA.write_text(json.dumps(told, indent=1) + "\n")
    _draw(runs)


def _draw(runs: Path) -> None:
    """One city of ours, and its months."""
    folder = sorted((runs / "land-full").glob("seed-*"))[0]
    policy = open_policy(folder, "last")
    record = record_game(trained_player(policy), rules_of(policy), int(held_out(1)[0]))
    write_city(record, IMAGES / "land.png")
    write_gif(record, IMAGES / "land.gif")


def paired(ours: list[list[float]], other: list[float]) -> tuple[float, float, float]:
    """The mean over seeds of the change against `other` over the same maps, as a share of it, with
    the 95 % interval of Student's t over seeds."""
    level = statistics.fmean(other)
    gains = [statistics.fmean(a - b for a, b in zip(x, other, strict=True)) / level for x in ours]
    mean = statistics.fmean(gains)
    if len(gains) < 2:
        return mean, math.nan, math.nan
    half = student.ppf(0.975, len(gains) - 1) * statistics.stdev(gains) / math.sqrt(len(gains))
    return mean, mean - half, mean + half


def page() -> None:
    """Tables from what was judged."""
    told = json.loads(DATA.read_text())
    for variant in told.values():  # seeds were judged when they were ready
        variant["reports"] = dict(sorted(variant["reports"].items(), key=_place))
    TABLE.write_text("\n".join([*_full(told["full"]), "", *_small(told["small"])]) + "\n")
    print(TABLE.read_text())


def _place(item: tuple[str, Any]) -> tuple[int, str]:
    """Baselines as they are, then seeds in order."""
    names = list(BASELINES)
    return (names.index(item[0]), "") if item[0] in names else (len(names), item[0])


def _full(told: dict[str, Any]) -> list[str]:
    reports = told["reports"]
    seeds = [name for name in reports if name.startswith("seed-")]
    lines = [
        f"Full game, {told['maps']} held-out maps, net present value in thousands:",
        "",
        "| who | total | industry | education | council | S / M / L | Gini | conflicts |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, report in reports.items():
        own = " | ".join(f"{x:,.0f}" for x in report["npv"].values())
        sizes = " / ".join(f"{x:.0%}" for x in report["sizes"].values())
        lines.append(
            f"| {name} | {report['total']:,.0f} | {own} | {sizes} | {report['gini']:.2f} "
            f"| {report['conflicts']:.1f} |"
        )
    ours = [reports[name]["total_by_map"] for name in seeds]
    greedy = max(("greedy-npv", "greedy-roi"), key=lambda name: reports[name]["total"])
    lines += ["", "| against | change of the total, mean of seeds (95 %) |", "|---|---:|"]
    for name in (greedy, "beam"):
        mean, low, high = paired(ours, reports[name]["total_by_map"])
        lines.append(f"| {name} | {mean:+.1%} ({low:+.1%} to {high:+.1%}) |")
    lines += ["", "What stands on parcels of each level, mean of seeds:", ""]
    lines += ["| level | S | M | L |", "|---|---:|---:|---:|"]
    for level in reports[seeds[0]]["sizes_by_level"]:
        shares = [
            statistics.fmean(reports[name]["sizes_by_level"][level][size] for name in seeds)
            for size in ("S", "M", "L")
        ]
        lines.append(f"| {level} | " + " | ".join(f"{x:.0%}" for x in shares) + " |")
    return lines


def _small(told: dict[str, Any]) -> list[str]:
    best = sum(told["optimum"])
    lines = [
        f"Small game, {told['maps']} held-out maps; the optimum by MILP, largest gap "
        f"{told['gap']:.2%}:",
        "",
        "| who | total | of the optimum |",
        "|---|---:|---:|",
        f"| optimum | {best / told['maps']:,.0f} | 100% |",
    ]
    lines += [
        f"| {name} | {report['total']:,.0f} | {sum(report['total_by_map']) / best:.1%} |"
        for name, report in told["reports"].items()
    ]
    return lines


SUSPECTS = {
    "batch": ("normalized (the note's cure)", BLUE, "-"),
    "note": ("the note's settings before it", GREEN, "-"),
    "none": ("not normalized", GREY, "--"),
    "wrong-actor": ("wrong actor, normalized", ORANGE, "-"),
    "wrong-actor-none": ("wrong actor, not normalized", INK, "--"),
}


def causes(runs: Path) -> None:
    """KL and clipping of some suspects, the mean over seeds."""
    figure = new_figure(10.0, 4.0)
    panels = figure.subplots(1, 2)
    for axes, column, title in zip(
        panels,
        ("train/kl_exact", "train/ratio_outside"),
        ("exact KL(old‖new) of an update, nats", "share of ratios outside of the clip range"),
        strict=True,
    ):
        tidy(axes, title, "update", "")
        for name, (label, colour, dash) in SUSPECTS.items():
            folders = sorted((runs / "land-causes" / name).glob("seed-*"))
            mean = np.mean([read_metrics(folder)[column] for folder in folders], 0)
            updates = np.arange(1, len(mean) + 1)
            axes.plot(updates, mean, color=colour, ls=dash, lw=1.6, label=label)
    panels[0].set_yscale("log")
    panels[0].axhspan(4.93, 5.69, color=ORANGE, alpha=0.2, lw=0)
    panels[0].annotate("the note: 4.93 to 5.69", (25, 6.2), fontsize=8, color=ORANGE)
    panels[0].legend(fontsize=8, frameon=False, loc="center right")
    write_png(figure, IMAGES / "exploding-kl.png")


def speed() -> None:
    """The game alone, and training on it, by one thread and by two."""
    envs, rng = vector_env(64), np.random.default_rng(0)
    obs, spent = envs.reset(0), {"with what everybody sees": [], "alone": []}
    games = Games(envs.rules, 64)
    for step in range(900):
        if step % envs.rules.months == 0:
            games.begin(np.arange(64), held_out(64))
        mask = obs["action_mask"]
        actions = (rng.random(mask.shape) * mask).argmax(-1)
        begun = time.perf_counter()
        obs = envs.step(actions).obs
        seen = time.perf_counter()
        games.step(actions)
        spent["with what everybody sees"].append(seen - begun)
        spent["alone"].append(time.perf_counter() - seen)
    for name, seconds in spent.items():
        rate = actions.size / statistics.median(seconds)
        print(f"the game {name}: {rate:,.0f} steps of agents a second")
    for threads in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            train_seed(
                Path(folder) / "speed",
                "land",
                0,
                *("--total-steps", "57600", "--threads", str(threads), "--quiet"),
            )
            rate = read_metrics(Path(folder) / "speed" / "seed-0")["time/steps_per_second"]
        agents = 3 * float(np.median(rate[3:]))
        print(f"training, {threads} thread(s): {agents:,.0f} steps of agents a second")


def main() -> None:
    """What the first word says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("train", "judge", "page", "causes", "scales", "speed"))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--only", choices=VARIANTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102, 103, 104])
    parser.add_argument("--maps", type=int, default=50)
    args = parser.parse_args()
    if args.action == "train":
        for seed in args.seeds:
            for variant in (args.only,) if args.only else VARIANTS:
                options = ("--envs.options", VARIANTS[variant])
                train_seed(args.runs / f"land-{variant}", "land", seed, *options)
    elif args.action == "judge":
        judge(args.runs, args.maps)
        page()
    elif args.action == "causes":
        causes(args.runs)
    elif args.action == "scales":
        scales(args.runs)
    elif args.action == "speed":
        speed()
    else:
        page()


if __name__ == "__main__":
    main()
