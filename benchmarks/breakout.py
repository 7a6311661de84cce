"""Breakout by TRPO, two original versions and ours: train, gather, write docs/guide/breakout.md.

    python -m benchmarks.breakout train --runs RUNS [--only ours] [--steps 1e6] [--seed 0]
    python -m benchmarks.breakout gather --runs RUNS     thin their metrics into docs/data/breakout
    python -m benchmarks.breakout judge --runs RUNS      more games with our last checkpoint
    python -m benchmarks.breakout page                   pictures and page from what is gathered

Training takes hours and may be interrupted: calling it again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keel.apps.atari import MILESTONES, milestones
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, new_figure, tidy

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "breakout"
PAGE, PICTURE = ROOT / "docs" / "guide" / "breakout.md", ROOT / "docs" / "images" / "breakout.png"
KEEL = str(Path(sys.executable).with_name("keel"))
VERSIONS = {
    "V1": "breakout-trpo-one-env",
    "V2": "breakout-trpo-stabilized",
    "ours": "breakout-trpo",
}
COLOURS = {"V1": GREY, "V2": ORANGE, "ours": BLUE}
EXPECTED = {
    "V1": {"first point": 5e5, "mean 10": 3e6, "mean 50": math.nan, "mean 100": math.nan},
    "V2": {"first point": 1e5, "mean 10": 1e6, "mean 50": 5e6, "mean 100": 8e6},
}
"""Steps by which the original expected each milestone of its runs of 10 M; NaN for never."""
JUDGED_BY = {"V1": "V1", "V2": "V2", "ours": "V2"}
"""Whose expectation says whether a run was long enough for a milestone."""
PAPER = {"single path": 10.8, "vine": 34.2}
"""Schulman et al. 2015, table 1."""
WINDOW = 10_000
"""Steps that become one line of what is gathered."""


def train(runs: Path, version: str, seed: int, steps: int | None) -> None:
    """One run, or the rest of it."""
    name = VERSIONS[version]
    folder = runs / name / f"seed-{seed}"
    more = [] if steps is None else ["--total-steps", str(steps)]
    if (folder / "checkpoints").is_dir():
        command = [KEEL, "resume", str(folder), *more]
    else:
        command = [KEEL, "train", "Breakout", "--preset", name, "--seed", str(seed), *more]
        command += ["--runs", str(runs), "--name", name]
    subprocess.run(command, check=True)


def gather(runs: Path) -> None:
    """Thin every run that is there into one small file."""
    DATA.mkdir(parents=True, exist_ok=True)
    for version, name in VERSIONS.items():
        for folder in sorted((runs / name).glob("seed-*")):
            lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
            path = DATA / f"{version.lower()}-{folder.name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in thin(lines)))
            print(f"{path.relative_to(ROOT)}: {lines[-1]['step']:,} steps")


def judge(runs: Path, seed: int, games: int) -> None:
    """Play the last checkpoint of ours, sampled as in training and greedily; keep the scores."""
    folder = runs / VERSIONS["ours"] / f"seed-{seed}"
    scores = {how: _play(folder, games, f"--{how}") for how in ("stochastic", "deterministic")}
    path = DATA / f"ours-{folder.name}-judged.json"
    path.write_text(json.dumps({"games": games, **scores}, indent=1) + "\n")
    print(f"{path.relative_to(ROOT)}: {scores}")


def _play(folder: Path, games: int, how: str) -> dict[str, Any]:
    words = ["--checkpoint", "last", "--episodes", str(games), "--seed", "1", how, "--json"]
    done = subprocess.run(
        [KEEL, "evaluate", str(folder), *words], check=True, capture_output=True, text=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    return {key: told[key] for key in ("checkpoint", "return_mean", "return_std")}


def thin(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Means over windows; of the KL the largest, of rejections the number."""
    part: list[dict[str, Any]] = []
    for line in lines:
        part.append(line)
        last = line is lines[-1]
        if line["step"] - part[0]["step"] < WINDOW and "eval/return_mean" not in line and not last:
            continue
        yield {
            "step": line["step"],
            "return": line["rollout/return_mean"],
            "kl": max((x["train/kl_step"] or 0.0 for x in part), default=None),
            "max_kl": line["train/max_kl"],
            "damping": line["train/damping"],
            "updates": len(part),
            "rejected": sum(x["train/line_search_success"] == 0.0 for x in part),
            "over": sum((x["train/kl_step"] or 0.0) > x["train/max_kl"] for x in part),
            "step_fraction": _mean(part, "train/step_fraction"),
            "entropy": _mean(part, "train/entropy"),
            "entropy_coef": line["train/entropy_coef"],
            "explained_variance": _mean(part, "train/explained_variance"),
            "seconds": line["time/seconds"],
            **{
                key.replace("/", "_"): line[key]
                for key in ("eval/return_mean", "eval/return_std", "eval/episodes")
                if key in line
            },
        }
        part = []


def _mean(lines: list[dict[str, Any]], key: str) -> float | None:
    known = [line[key] for line in lines if line.get(key) is not None]
    return statistics.fmean(known) if known else None


def load() -> dict[str, list[dict[str, Any]]]:
    """Everything gathered: `"ours seed-0"` to its lines."""
    found = {}
    for version in VERSIONS:
        for path in sorted(DATA.glob(f"{version.lower()}-seed-*.jsonl")):
            name = f"{version} {path.stem.split('-', 1)[1]}"
            found[name] = [json.loads(x) for x in path.read_text().splitlines()]
    return found


def draw(found: dict[str, list[dict[str, Any]]]) -> None:
    """The original plots, of all runs: return, KL under its bound, line search, entropy weight."""
    figure = new_figure(9.0, 10.5)
    ratios = {"height_ratios": (3.4, 2, 2, 1.4)}
    returns, kl, searches, weight = figure.subplots(4, sharex=True, gridspec_kw=ratios)
    for axes, label in zip(
        (returns, kl, searches, weight),
        ("return of a game", "KL(old‖new)", "LS_OK, StepFrac (dotted)", "entropy_coef"),
        strict=True,
    ):
        tidy(axes, "", "agent steps" if axes is weight else "", label)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g} M" if x else "0")
    drawn: set[str] = set()
    for name, lines in found.items():
        version = name.split()[0]
        colour = COLOURS[version]
        x = [line["step"] for line in lines]
        style = (0, (3, 1.5)) if version in drawn else "-"
        drawn.add(version)
        look: dict[str, Any] = {"color": colour, "linewidth": 1.4, "linestyle": style}
        returns.plot(x, [_number(line["return"]) for line in lines], label=name, **look)
        scored = [line for line in lines if "eval_return_mean" in line]
        returns.plot(
            [line["step"] for line in scored],
            [line["eval_return_mean"] for line in scored],
            "o",
            color=colour,
            markeredgecolor="white",
        )
        kl.plot(x, [line["kl"] or math.nan for line in lines], **look)
        kl.plot(x, [line["max_kl"] for line in lines], color=GREEN, linewidth=1.0)
        searches.plot(x, [1.0 - line["rejected"] / line["updates"] for line in lines], **look)
        fraction = [_number(line["step_fraction"]) for line in lines]
        searches.plot(x, fraction, color=colour, linewidth=1.0, linestyle=(0, (1, 1.5)))
        lost = [line for line in lines if line["rejected"] == line["updates"]]
        kl.plot(
            [line["step"] for line in lost],
            [line["max_kl"] for line in lost],
            "X",
            color=colour,
            markeredgecolor="white",
        )
        weight.plot(x, [line["entropy_coef"] for line in lines], **look)
    for label, score in PAPER.items():
        returns.axhline(score, color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
        returns.annotate(f"paper, {label}", (0.995, score), xycoords=("axes fraction", "data"),
                         va="bottom", ha="right", fontsize=8, color=INK)  # fmt: skip
    for axes in (kl, weight):
        axes.set_ylim(0.0, 1.15 * axes.get_ylim()[1])
    searches.set_ylim(-0.03, 1.05)
    returns.set_xlim(left=0.0)
    returns.legend(frameon=False, fontsize=9, loc="upper left")
    returns.set_title(
        "Breakout by TRPO: training return (lines), evaluations of 30 games (dots)",
        loc="left", fontsize=12, fontweight="bold", color=INK, pad=12,
    )  # fmt: skip
    figure.savefig(PICTURE, format="png")


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def render(found: dict[str, list[dict[str, Any]]]) -> str:
    """The page."""
    lines = [
        "# Breakout, version by version",
        "",
        "Written by `python -m benchmarks.breakout page` from `docs/data/breakout`; "
        "`python -m benchmarks.breakout train --runs RUNS` trains again (hours; it goes on where "
        "it was interrupted). Whole games, unclipped; an evaluation is the mean of 30, with "
        "actions sampled as in training. V1 and V2 are the two versions of a "
        "[working note](../origins/the-five-notes.md#002-a-trpo-that-forgets-breakout) "
        "(presets `breakout-trpo-one-env` and `breakout-trpo-stabilized`); it names no "
        "network, so all three have the same one.",
        "",
        "![Return, exact KL and its bound, line search, entropy weight](../images/breakout.png)",
        "",
        "| run | agent steps | best evaluation | last evaluation | last / best | rejected updates "
        "| accepted over max_kl | hours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in found.items():
        scores = [row["eval_return_mean"] for row in rows if "eval_return_mean" in row]
        best, last = (max(scores), scores[-1]) if scores else (math.nan, math.nan)
        kept = last / best if best else math.nan
        updates = sum(row["updates"] for row in rows)
        rejected = sum(row["rejected"] for row in rows)
        lines.append(
            f"| {name} | {rows[-1]['step']:,} | {best:.1f} | {last:.1f} | {kept:.0%} | "
            f"{rejected} of {updates:,} | {sum(row['over'] for row in rows)} | "
            f"{rows[-1]['seconds'] / 3600:.1f} |"
        )
    lines += [
        "",
        "The TRPO paper reports 10.8 (single path) and 34.2 (vine). Ours are two fresh seeds of "
        "the preset `breakout-trpo`, as it is, from the first step to the last: one thread each, "
        "both at a time on two cores that had other work beside them.",
        "",
        *_judged(),
        "## Milestones",
        "",
        "Steps until the training return (the last hundred games) got there; what the note "
        f"expected stands beside it. {_how_far(found)} *Not reached*: the run was as long as the "
        "note expected a milestone to take (ours: V2's expectation), and did not get there. *Not "
        "run*: the note expected it later than that, or never, and nothing is known.",
        "",
        "| run | " + " | ".join(MILESTONES) + " |",
        "|---|" + "---|" * len(MILESTONES),
    ]
    for version, expected in EXPECTED.items():
        told = " | ".join(_expectation(expected[name]) for name in MILESTONES)
        lines.append(f"| {version}, as the note expected | {told} |")
    for name, rows in found.items():
        lines.append(f"| {name}, measured | {' | '.join(measured(name, rows))} |")
    return "\n".join([*lines, ""])


def _how_far(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return a sentence on how much of the note's 10 M steps each of its versions ran."""
    ran = [
        f"{name.split()[0]} ran to {_steps(rows[-1]['step'])}"
        for name, rows in found.items()
        if name.split()[0] in EXPECTED
    ]
    return f"The note's runs have 10 M steps, which do not fit here: {', '.join(ran)}."


def measured(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return what became of each milestone: its steps, `not reached` or how far the run went.

    Args:
        name: Version and seed, as `load` names them.
        rows: What was gathered of the run.
    """
    expected = EXPECTED[JUDGED_BY[name.split()[0]]]
    ran = rows[-1]["step"]
    reached = milestones([row["step"] for row in rows], [_number(row["return"]) for row in rows])
    return [_outcome(found.steps, expected[found.name], ran) for found in reached]


def _outcome(steps: float, expected: float, ran: float) -> str:
    if not math.isnan(steps):
        return _steps(steps)
    return "not reached" if expected <= ran else f"not run past {_steps(ran)}"


def _expectation(steps: float) -> str:
    return "never" if math.isnan(steps) else _steps(steps)


def _judged() -> list[str]:
    files = sorted(DATA.glob("*-judged.json"))
    if not files:
        return []
    lines = [
        "More games with the last checkpoint (`python -m benchmarks.breakout judge`), actions "
        "sampled or the likeliest; mean ± standard error.",
        "",
        "| run | agent steps | games | sampled | greedy |",
        "|---|---|---|---|---|",
    ]
    for path in files:
        told = json.loads(path.read_text())
        games = told["games"]
        scores = [
            f"{told[how]['return_mean']:.1f} ± {told[how]['return_std'] / math.sqrt(games):.1f}"
            for how in ("stochastic", "deterministic")
        ]
        name = path.stem.removesuffix("-judged").replace("-", " ", 1)
        lines.append(
            f"| {name} | {told['stochastic']['checkpoint']:,} | {games} | {' | '.join(scores)} |"
        )
    return [*lines, ""]


def _steps(steps: float) -> str:
    return f"{steps / 1e6:.2f} M" if steps >= 1e6 else f"{steps / 1e3:.0f} k"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("train", "gather", "judge", "page"))
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "breakout")
    parser.add_argument("--only", choices=tuple(VERSIONS), help="one version")
    parser.add_argument("--games", type=int, default=100, help="to judge by")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=float, help="in place of the preset's")
    options = parser.parse_args()
    if options.part == "train":
        steps = None if options.steps is None else int(options.steps)
        for version in [options.only] if options.only else VERSIONS:
            train(options.runs, version, options.seed, steps)
    if options.part == "gather":
        gather(options.runs)
    if options.part == "judge":
        judge(options.runs, options.seed, options.games)
    if options.part != "train":
        found = load()
        draw(found)
        PAGE.write_text(render(found), encoding="utf-8")


if __name__ == "__main__":
    main()
