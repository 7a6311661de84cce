"""Speed of this checkout beside an earlier revision of Keel: the same jobs, in turns.

    python -m benchmarks.revisions REVISION [--repeats 5] [--only ppo:CartPole-v1 …]

The revision is checked out into a temporary folder, whose own worker runs there; other load on the
machine slows both sides alike. Ratios above 1: this checkout is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from keel.bench.settings import SETTINGS
from keel.bench.workers import Workers

ROOT = Path(__file__).resolve().parents[1]
JOBS = tuple(f"{algo}:{env}" for algo in ("ppo", "trpo") for env in SETTINGS[algo])


def check_out(revision: str, folder: Path) -> None:
    """Put the files of a revision into a folder."""
    command = ["git", "worktree", "add", "--detach", str(folder), revision]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def settings_of(checkout: Path, job: str) -> dict[str, Any]:
    """Return the settings that a checkout has for a job, as plain data."""
    algo, _, env = job.partition(":")
    code = (
        "import dataclasses, json; from keel.bench.settings import settings_for; "
        f"print(json.dumps(dataclasses.asdict(settings_for({env!r}, None, {algo!r}))))"
    )
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout
    data: dict[str, Any] = json.loads(output)
    return data


def measure(job: str, before: Path, repeats: int) -> str:
    """Return one row of the table: medians of both, and the median of the pairs' ratios."""
    sides = [
        (Workers(root=root), "keel", settings_of(root, job), {"PYTHONPATH": str(root / "src")})
        for root in (ROOT, before)
    ]
    pairs = []
    for repeat in range(1, repeats + 1):
        now, then = (reading.rate for reading in Workers.race_sides(*sides))
        pairs.append((now, then))
        line = f"{job} {repeat}/{repeats}: {now:,.0f}, before {then:,.0f}, {now / then:.3f}"
        print(line, file=sys.stderr)
    ratios = [now / then for now, then in pairs]
    now, then = (statistics.median(side) for side in zip(*pairs, strict=True))
    middle, spread = statistics.median(ratios), f"{min(ratios):.3f} to {max(ratios):.3f}"
    return f"| {job} | {now:,.0f} | {then:,.0f} | **{middle:.3f}** | {spread} |"


def main() -> None:
    """Measure the jobs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("revision")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        check_out(args.revision, before)
        try:
            rows = [measure(job, before, args.repeats) for job in args.only]
        finally:
            remove = ["git", "worktree", "remove", "--force", str(before)]
            subprocess.run(remove, cwd=ROOT, check=True)
    print("| job | steps/s | before | ratio, median of pairs | all pairs |")
    print("|---|---:|---:|---:|---:|", *rows, sep="\n")


if __name__ == "__main__":
    main()
