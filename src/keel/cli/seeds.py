"""`keel train ENV --seeds 0 1 2`: one process a seed, as many at a time as there are cores for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from keel.runs.directory import run_name

if TYPE_CHECKING:
    from keel.cli.train import Train


def train_seeds(args: list[str], options: Train) -> int:
    """Train every seed; the status is that of the first seed that failed."""
    console = Console(stderr=True)
    name = options.name or run_name(options.config.env, options.config.algo, options.runs)
    waiting = list(dict.fromkeys(options.seeds))
    running: dict[int, subprocess.Popen[str]] = {}
    results: dict[int, dict[str, Any]] = {}
    status = 0
    try:
        while waiting or running:
            while waiting and len(running) < _at_once(options):
                seed = waiting.pop(0)
                running[seed] = _launch(args, name, seed)
            seed, process = _first_finished(running)
            out, err = process.communicate()
            del running[seed]
            if process.returncode != 0:
                status = status or process.returncode
                console.print(f"seed {seed}: {err.strip().splitlines()[-1] if err else 'failed'}")
                continue
            results[seed] = json.loads(out.splitlines()[-1])
            if not options.json and not options.quiet:
                score = results[seed]["return_mean"]
                console.print(f"seed {seed}: evaluation {score:,.1f}", highlight=False)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    _report(results, options.json)
    return status


def _launch(args: list[str], name: str, seed: int) -> subprocess.Popen[str]:
    kept = _without(_without(args, "--seeds"), "--name")
    command = [sys.executable, "-m", "keel", "train", *kept, "--name", name, "--seed", str(seed)]
    if "--json" not in command:
        command.append("--json")
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _without(args: list[str], flag: str) -> list[str]:
    """The arguments without a flag and the values that follow it."""
    if flag not in args:
        return args
    start = args.index(flag)
    end = start + 1
    while end < len(args) and not args[end].startswith("--"):
        end += 1
    return args[:start] + args[end:]


def _first_finished(running: dict[int, subprocess.Popen[str]]) -> tuple[int, subprocess.Popen[str]]:
    while True:
        for seed, process in running.items():
            try:
                process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            return seed, process


def _at_once(options: Train) -> int:
    """A network small enough for one thread leaves the other cores to other seeds."""
    pixels = options.config.network.kind == "cnn" or "NoFrameskip" in options.env
    return 1 if pixels else max(1, (os.cpu_count() or 1) // max(1, options.config.threads))


def _report(results: dict[int, dict[str, Any]], as_json: bool) -> None:
    if not results:
        return
    scores = sorted(r["return_mean"] for r in results.values())
    cut = len(scores) // 4
    middle = scores[cut : len(scores) - cut]
    whole = {
        "seeds": {str(seed): result for seed, result in sorted(results.items())},
        "iqm": sum(middle) / len(middle),
        "kl_exact_max": max(r["kl_exact_max"] for r in results.values()),
        "max_kl": max(r["max_kl"] for r in results.values()),
        "rollbacks": sum(r["rollbacks"] for r in results.values()),
    }
    if as_json:
        print(json.dumps(whole, allow_nan=False))  # noqa: T201
        return
    Console().print(
        f"{len(scores)} seeds: IQM {whole['iqm']:,.1f} ({scores[0]:,.1f} to {scores[-1]:,.1f}); "
        f"largest exact KL {whole['kl_exact_max']:.4f} of {whole['max_kl']:g}",
        highlight=False,
    )
