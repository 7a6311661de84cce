"""`keel train ENV --seeds 0 1 2`: one process a seed, as many at a time as there are cores for."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.ablate.jobs import Job, at_once, failure_lines, run_jobs
from keel.cli.arguments import take_list
from keel.cli.strict_json import print_json
from keel.errors import KeelError
from keel.tracking.directory import run_name
from keel.tracking.progress import PipedConsole

if TYPE_CHECKING:
    from keel.cli.settings import TrainOptions

PICTURE = "seeds.png"
"""Name of the picture of all seeds, in the folder that holds them."""


def train_seeds(args: list[str], options: TrainOptions) -> int:
    """Train every seed; the status is that of the first seed that failed.

    Args:
        args: words of the command line, translated: `--seeds=0` would start itself over and over.
        options: what they come to.
    """
    console = PipedConsole(stderr=True)
    name = options.name or run_name(options.config.env, options.config.algo, options.runs)
    results: dict[int, dict[str, Any]] = {}
    failed: dict[int, Job] = {}

    def done(seed: int, job: Job) -> None:
        if (result := job.result) is None:
            failed[seed] = job
            return
        results[seed] = result
        if not options.json and not options.quiet:
            score = result["return_mean"]
            outcome = "done" if score is None else f"evaluation {score:,.1f}"
            console.print(f"seed {seed}: {outcome}", highlight=False)

    seeds = list(dict.fromkeys(options.seeds))
    run_jobs(
        [(seed, partial(_command, args, name, seed)) for seed in seeds],
        at_once(options.config),
        done,
    )
    reasons = [(f"seed {seed}", job.reason) for seed, job in failed.items()]
    for line in failure_lines(reasons, len(seeds)):
        console.print(f"keel: {line}", highlight=False)
    if results:
        _report(results, options.runs / name, options)
    return next((job.status or 1 for job in failed.values()), 0)


def _command(args: list[str], name: str, seed: int) -> list[str]:
    _, others = take_list(args, "--seeds")
    _, options = take_list(others, "--name")
    command = [sys.executable, "-m", "keel", "train", *options, "--name", name, "--seed", str(seed)]
    return command if "--json" in command else [*command, "--json"]


def _report(results: dict[int, dict[str, Any]], folder: Path, options: TrainOptions) -> None:
    """Sum up all seeds: their scores, where they are, a picture of them, and what to do next."""
    scores = sorted(r["return_mean"] for r in results.values() if r["return_mean"] is not None)
    picture, problem = _draw(folder)
    summary: dict[str, Any] = {
        "seeds": {str(seed): result for seed, result in sorted(results.items())},
        "runs": str(folder),
        "picture": None if picture is None else str(picture),
        "iqm": _interquartile_mean(scores),
        "kl_exact_max": _largest([r["kl_exact_max"] for r in results.values()]),
        "max_kl": max(r["max_kl"] for r in results.values()),
        "rollbacks": sum(r["rollbacks"] for r in results.values()),
    }
    if options.json:
        print_json(summary)
        return
    if options.quiet:
        return
    console = PipedConsole(highlight=False, soft_wrap=True)
    if scores:
        iqm, low, high = summary["iqm"], scores[0], scores[-1]
        console.print(f"{len(scores)} seeds: IQM {iqm:,.1f} ({low:,.1f} to {high:,.1f})")
    console.print(f"largest exact KL {_kl(summary['kl_exact_max'])} of {summary['max_kl']:g}")
    console.print(f"runs: {folder}")
    console.print(f"picture: {picture}" if picture is not None else f"no picture: {problem}")
    console.print(f"compare with others: keel compare {folder} {folder.parent / 'OTHER'}")


def _draw(folder: Path) -> tuple[Path | None, str]:
    """Draw the learning curves of all seeds; return the file, or why it could not be drawn."""
    from keel.compare import compare, load_runs
    from keel.compare.picture import write_picture

    try:
        write_picture(compare(load_runs([str(folder)])), folder / PICTURE)
    except KeelError as error:
        return None, str(error)
    return folder / PICTURE, ""


def _interquartile_mean(scores: list[float]) -> float | None:
    """Return the mean of the middle half of sorted scores; None if there are none."""
    cut = len(scores) // 4
    middle = scores[cut : len(scores) - cut]
    return sum(middle) / len(middle) if middle else None


def _largest(values: list[float | None]) -> float | None:
    """Return the largest value; None, which stands for infinite, is larger than all."""
    finite = [kl for kl in values if kl is not None]
    return max(finite) if len(finite) == len(values) else None


def _kl(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.4f}"
