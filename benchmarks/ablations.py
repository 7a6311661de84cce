"""The ablations that come with Keel: train them, and write what the pages say about them.

    python -m benchmarks.ablations train --runs RUNS [--only log-ratio-clamp]
    python -m benchmarks.ablations gather --runs RUNS   tables and pictures into docs
    python -m benchmarks.ablations page                 judge kept scores again, write tables

Training takes hours and may be interrupted: finished runs are never trained twice.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from keel.ablate.plan import names
from keel.compare.intervals import improvement_interval, score_interval
from keel.compare.verdict import Problems, correct, decide, difference, effect_of

ROOT = Path(__file__).resolve().parents[1]
DATA, IMAGES = ROOT / "docs" / "data" / "ablations", ROOT / "docs" / "images"
KEEL = str(Path(sys.executable).with_name("keel"))


def gather(runs: Path) -> None:
    """Of every plan whose comparison is there: its numbers, a table of them, and its picture."""
    DATA.mkdir(parents=True, exist_ok=True)
    for name in names():
        found = runs / name / "compare.json"
        if not found.exists():
            continue
        told = json.loads(found.read_text())
        for group in told["groups"].values():
            group["runs"] = len(group["runs"])
        for pair in (told, *told["pairs"]):
            pair.pop("changes", None)  # the plan says it, without the places of this machine
        write(name, told)
        shutil.copy(runs / name / "compare.png", IMAGES / f"{name}.png")
        print(f"{name}: {len(told['groups'])} variants")


def write(name: str, told: dict[str, Any]) -> None:
    """Write the numbers of a plan and the tables of them."""
    (DATA / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n")
    (DATA / f"{name}.md").write_text(table(name, told) + "\n", encoding="utf-8")
    if "watched" in told:
        (DATA / f"{name}-watched.md").write_text(watched(told) + "\n", encoding="utf-8")


def page() -> None:
    """Judge the scores that were kept by today's rules, without any run."""
    for path in sorted(DATA.glob("*.json")):
        told = json.loads(path.read_text())
        judge_again(told)
        write(path.stem, told)


def judge_again(told: dict[str, Any]) -> None:
    """Replace intervals, p-values and verdicts by those that follow from the scores."""
    (task,) = told["tasks"]
    groups = told["groups"]
    scores = {
        name: [torch.tensor(group["scores"][task], dtype=torch.float64)]
        for name, group in groups.items()
    }
    for name, group in groups.items():
        interval = score_interval(scores[name])
        group["iqm"], *group["interval"] = (_finite(x) for x in interval)
    problems = {
        name: Problems(group["stability"]["non_finite"], group["seconds_per_step"])
        for name, group in groups.items()
    }
    first = told["pairs"][0]["baseline"]
    old = scores[first]
    variants = [pair["variant"] for pair in told["pairs"]]
    effects = correct([effect_of(old, scores[name]) for name in variants])
    for pair, name, effect in zip(told["pairs"], variants, effects, strict=True):
        verdict = decide(effect, problems[first], problems[name])
        change = difference(old, scores[name])
        better = improvement_interval(old, scores[name])
        needed = pair.pop("seeds_needed")
        pair |= {
            "verdict": verdict.decision,
            "reasons": list(verdict.reasons),
            "iqm": {side: groups[side]["iqm"] for side in (first, name)},
            "interval": [_finite(change.low), _finite(change.high)],
            "probability_interval": [_finite(better.low), _finite(better.high)],
            "p": effect.p,
            "p_holm": effect.p_holm,
            "variants_tested": effect.variants,
            "seeds_needed": effect.seeds_needed,
        }
        if effect.variants == 1 and effect.seeds_needed != needed:
            raise SystemExit(f"{name}: the kept scores are not those that were judged")
    if len(told["pairs"]) == 1:
        told |= told["pairs"][0]


def _finite(x: torch.Tensor) -> float | None:
    return float(x) if math.isfinite(x) else None


def table(name: str, told: dict[str, Any]) -> str:
    """A row a variant; the first is what the others are compared with."""
    pairs = {pair["variant"]: pair for pair in told["pairs"]}
    (task,) = told["tasks"]
    tested = max((pair["variants_tested"] for pair in told["pairs"]), default=1)
    title = f"`keel ablate {name}`, up to step {told['horizon'][task]:,}"
    if tested > 1:
        title += f"; verdicts after Holm's correction for {tested} variants, intervals without it"
    lines = [
        f"*{title}*",
        "",
        "| variant | return, IQM (95 %) | every seed | change (95 %) | verdict | steps/s "
        "| loss variance | non-finite | walked back | worst KL |",
        "|---|---:|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for variant, group in told["groups"].items():
        calm, pair = group["stability"], pairs.get(variant)
        change, verdict = "", "the baseline"
        if pair is not None:
            low, high = (_percent(x) for x in pair["relative_interval"])
            change = f"{_percent(pair['relative'])} ({low} to {high})"
            verdict = f"**{pair['verdict']}**"
            if pair["seeds_needed"] and pair["verdict"] == "not distinguishable":
                verdict += f"; {pair['seeds_needed']} seeds would tell"
        low, high = (_score(x) for x in group["interval"])
        scores = " ".join(_score(x) for x in group["scores"][task])
        lines.append(
            f"| {variant} | {_score(group['iqm'])} ({low} to {high}) | {scores} | {change} "
            f"| {verdict} | {_score(1.0 / group['seconds_per_step'])} "
            f"| {_small(calm['loss_variance'])} | {_score(calm['non_finite'])} "
            f"| {_score(calm['rollbacks'])} | {_small(calm['worst_kl'])} |"
        )
    return "\n".join(lines)


def watched(told: dict[str, Any]) -> str:
    """What a plan has watched, a table for each update, and what stopped the cells that must be."""
    lines = []
    for found in told["watched"]:
        which = "the last update" if found["update"] < 0 else f"update {found['update']}"
        lines += [f"After {which}:", "", f"| variant | {' | '.join(found['titles'])} |"]
        lines.append("|---" + "|---:" * len(found["titles"]) + "|")
        if found["expected"]:
            lines.append(f"| *what the note expects* | {' | '.join(found['expected'])} |")
        for variant, values in found["rows"].items():
            lines.append(f"| {variant} | {' | '.join(map(_small_or_score, values))} |")
        lines.append("")
    if told["stopped"]:
        lines += ["| with the gate | what the run says |", "|---|---|"]
        stopped = told["stopped"].items()
        lines += [f"| {name} | {_cell(reason)} |" for name, reason in stopped]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text that may stand in a table."""
    return text.replace("|", r"\|")


def _small_or_score(x: float | str | None) -> str:
    if x is None or isinstance(x, str):
        return "–" if x is None else x
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def _score(x: float | None) -> str:
    if x is None:
        return "–"
    return f"{x:,.0f}" if abs(x) >= 100 or x == int(x) else f"{x:,.1f}"


def _small(x: float | None) -> str:
    return "–" if x is None or math.isnan(x) else f"{x:.3g}"


def _percent(x: float | None) -> str:
    return "–" if x is None else f"{x:+.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("train", "gather", "page"))
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "ablations")
    parser.add_argument("--only", choices=tuple(names()))
    options = parser.parse_args()
    if options.part == "train":
        for name in [options.only] if options.only else names():
            subprocess.run([KEEL, "ablate", name, "--runs", str(options.runs)], check=True)
    if options.part == "page":
        page()
        return
    gather(options.runs)


if __name__ == "__main__":
    main()
