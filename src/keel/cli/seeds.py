"""`keel train ENV --seeds 0 1 2`: one process a seed, as many at a time as there are cores for."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from keel.ablate.jobs import Job, at_once, run_jobs
from keel.cli.render import PipedConsole
from keel.runs.directory import run_name

if TYPE_CHECKING:
    from keel.cli.language import TrainLanguage
    from keel.cli.train import Train


def train_seeds(args: list[str], options: Train | TrainLanguage) -> int:
    """Train every seed; the status is that of the first seed that failed."""
    console = Console(stderr=True)
    name = options.name or run_name(options.config.env, options.config.algo, options.runs)
    results: dict[int, dict[str, Any]] = {}
    failed: list[int] = []

    def done(seed: int, job: Job) -> None:
        if job.status != 0:
            failed.append(job.status)
            console.print(f"seed {seed}: {job.reason}")
            return
        results[seed] = json.loads(job.out.splitlines()[-1])
        if not options.json and not options.quiet:
            score = results[seed]["return_mean"]
            console.print(f"seed {seed}: evaluation {score:,.1f}", highlight=False)

    seeds = list(dict.fromkeys(options.seeds))
    run_jobs(
        [(seed, partial(_command, args, name, seed)) for seed in seeds],
        at_once(options.config),
        done,
    )
    _report(results, options.json)
    return failed[0] if failed else 0


def _command(args: list[str], name: str, seed: int) -> list[str]:
    kept = _without(_without(args, "--seeds"), "--name")
    command = [sys.executable, "-m", "keel", "train", *kept, "--name", name, "--seed", str(seed)]
    return command if "--json" in command else [*command, "--json"]


def _without(args: list[str], flag: str) -> list[str]:
    """The arguments without a flag and the values that follow it."""
    if flag not in args:
        return args
    start = args.index(flag)
    end = start + 1
    while end < len(args) and not args[end].startswith("--"):
        end += 1
    return args[:start] + args[end:]


def _report(results: dict[int, dict[str, Any]], as_json: bool) -> None:
    if not results:
        return
    scores = sorted(r["return_mean"] for r in results.values())
    cut = len(scores) // 4
    middle = scores[cut : len(scores) - cut]
    whole = {
        "seeds": {str(seed): result for seed, result in sorted(results.items())},
        "iqm": sum(middle) / len(middle),
        "kl_exact_max": _largest([r["kl_exact_max"] for r in results.values()]),
        "max_kl": max(r["max_kl"] for r in results.values()),
        "rollbacks": sum(r["rollbacks"] for r in results.values()),
    }
    if as_json:
        print(json.dumps(whole, allow_nan=False))  # noqa: T201
        return
    PipedConsole().print(
        f"{len(scores)} seeds: IQM {whole['iqm']:,.1f} ({scores[0]:,.1f} to {scores[-1]:,.1f}); "
        f"largest exact KL {_kl(whole['kl_exact_max'])} of {whole['max_kl']:g}",
        highlight=False,
    )


def _largest(found: list[float | None]) -> float | None:
    """None, which stands for infinite, is the largest."""
    known = [kl for kl in found if kl is not None]
    return max(known) if len(known) == len(found) else None


def _kl(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.4f}"
