"""Read a large log of another library with this Keel and with an older one, side by side.

    python -m benchmarks.logs              100 MB of SB3's progress.csv, against version 0.1
    python -m benchmarks.logs --commit ID  against another commit of this repository

Every reading is a process of its own; the two take turns. Printed are processor time, wall time and
the largest memory of each, and the ratios of their medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION_0_1 = "dbabe13"
COLUMNS = (
    "time/total_timesteps",
    "time/fps",
    "time/time_elapsed",
    "rollout/ep_rew_mean",
    "rollout/ep_len_mean",
    "train/approx_kl",
    "train/clip_fraction",
    "train/entropy_loss",
    "train/explained_variance",
    "train/learning_rate",
    "train/loss",
    "train/policy_gradient_loss",
    "train/value_loss",
)
READ = """
import json, resource, sys, time
from pathlib import Path
import numpy
try:
    from keel.tracking.logs import read_log
except ImportError:  # version 0.1
    from keel.tracking.external_logs import read_log
wall, cpu = time.perf_counter(), time.process_time()
table = read_log(Path(sys.argv[1])).table
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"cpu": cpu, "wall": wall, "memory": memory, "rows": len(table)}))
"""


def write_log(path: Path, megabytes: int) -> None:
    """Write a `progress.csv` of about this size, as SB3 does."""
    draw = random.Random(0)
    size, step = 0, 0
    with path.open("w", encoding="utf-8") as file:
        file.write(",".join(COLUMNS) + "\n")
        while size < megabytes * 1_000_000:
            step += 2048
            line = f"{step}," + ",".join(repr(draw.gauss(0.0, 1.0)) for _ in COLUMNS[1:]) + "\n"
            file.write(line)
            size += len(line)


@contextmanager
def sources_of(commit: str) -> Iterator[Path]:
    """Check a commit out beside this one, and yield its `src`."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "keel"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(place), commit], check=True)
        try:
            yield place / "src"
        finally:
            subprocess.run([*git, "remove", "--force", str(place)], check=True)


def read(sources: Path, log: Path) -> dict[str, float]:
    """Read the log once with the code in `sources`; return seconds, megabytes and rows."""
    done = subprocess.run(
        [sys.executable, "-c", READ, str(log)],
        env={"PYTHONPATH": str(sources), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default=VERSION_0_1, help="what to compare with")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sources_of(args.commit) as older:
        log = Path(folder) / "progress.csv"
        write_log(log, args.megabytes)
        sides: dict[str, list[dict[str, float]]] = {args.commit: [], "this": []}
        for _ in range(args.repeats):
            sides[args.commit].append(read(older, log))
            sides["this"].append(read(ROOT / "src", log))
            for name, measured in sides.items():
                print(name, {key: round(value, 2) for key, value in measured[-1].items()})
    for key in ("cpu", "wall", "memory"):
        old, new = (statistics.median(x[key] for x in side) for side in sides.values())
        print(f"{key}: {old:.2f} / {new:.2f} = {old / new:.1f}×")


if __name__ == "__main__":
    main()
