"""`keel compare` on 30 runs of 5,000 iterations: how long does a reader wait?

    python -m benchmarks.comparing [--keep FOLDER]

The runs are synthetic curves in whole lines: every metric that a PPO run on HalfCheetah writes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

GROUPS, SEEDS, ITERATIONS, BATCH = ("scalar", "quantile", "hl-gauss"), 10, 5_000, 2_048
KEEL = str(Path(sys.executable).with_name("keel"))


def write_runs(folder: Path, line: dict[str, object], rng: np.random.Generator) -> int:
    """30 runs below `folder`; returns their bytes."""
    kept = {k: v for k, v in line.items() if k not in ("step", "rollout/return_mean")}
    rest = json.dumps({k: v for k, v in kept.items() if not k.startswith("eval/")})
    total = 0
    for group in GROUPS:
        for seed in range(SEEDS):
            run = folder / group / f"seed-{seed}"
            run.mkdir(parents=True)
            (run / "config.yaml").write_text(f"env: HalfCheetah-v5\nseed: {seed}\n")
            record = {"name": group, "seed": seed, "tag": group, "status": "finished"}
            (run / "run.json").write_text(json.dumps(record))
            height = 5_000 + 400 * rng.standard_normal()
            noise = 100 * rng.standard_normal(ITERATIONS)
            curve = height * (1 - np.exp(-np.arange(ITERATIONS) / 1_000)) + noise
            text = "".join(
                f'{{"step":{(i + 1) * BATCH},"rollout/return_mean":{value:.6f},{rest[1:]}\n'
                for i, value in enumerate(curve)
            )
            (run / "metrics.jsonl").write_text(text)
            total += len(text)
    return total


def one_line() -> dict[str, object]:
    """A real line of metrics."""
    with tempfile.TemporaryDirectory() as folder:
        command = [KEEL, "train", "Pendulum-v1", "--total-steps", "20000", "--runs", folder]
        subprocess.run([*command, "--quiet"], check=True, capture_output=True)
        (path,) = Path(folder).glob("*/*/metrics.jsonl")
        line: dict[str, object] = json.loads(path.read_text().splitlines()[-1])
        return line


def main() -> None:
    """Write the runs, compare them three times, print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="keel-comparing-"))
    try:
        size = write_runs(folder, one_line(), np.random.default_rng(0))
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run(
                [KEEL, "compare", str(folder), "--json"], check=True, capture_output=True
            )
            taken.append(time.perf_counter() - start)
        print(f"{size / 1e6:,.0f} MB of metrics, 30 runs × {ITERATIONS:,} iterations")
        print(
            f"keel compare: {statistics.median(taken):.2f} s ({min(taken):.2f} … {max(taken):.2f})"
        )
    finally:
        if options.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
