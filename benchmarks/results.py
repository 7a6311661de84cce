"""`make results`: measure the figures of docs/results.md again, or only write the page.

    python -m benchmarks.results speed        the speed tables (half an hour on a quiet machine)
    python -m benchmarks.results learning     train every preset of the table (hours)
    python -m benchmarks.results learning --from RUNS    read runs that are there already
    python -m benchmarks.results beside       SB3 with the RL Zoo's settings (hours)
    python -m benchmarks.results beside --from FOLDER    its answers, FOLDER/zoo-ALGO-ENV-SEED.json
    python -m benchmarks.results page         write docs/results.md from docs/data/results.json

What was measured is kept in docs/data/results.json; a part that is measured again replaces itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.functional import fisher_on_cnn
from benchmarks.results_page import write_page
from keel.compare.intervals import score_interval
from keel.resources import cores

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "results.json"
KEEL = [str(Path(sys.executable).with_name("keel"))]
SPEED = (
    ("ppo", "CartPole-v1", "sb3", ["--repeats", "5"]),
    ("ppo", "CartPole-v1", "sb3", ["--whole", "500000", "--repeats", "2"]),
    ("ppo", "CartPole-v1", "sbx", []),
    ("ppo", "HalfCheetah-v5", "sb3", ["--repeats", "5"]),
    ("ppo", "HalfCheetah-v5", "sbx", []),
    ("ppo", "Breakout", "sb3", ["--repeats", "5"]),
    ("trpo", "HalfCheetah-v5", "sb3-contrib", ["--repeats", "5"]),
    ("trpo", "Breakout", "sb3-contrib", ["--repeats", "2"]),
    ("ppo", "CartPole-v1", "sb3", ["--backend", "sync", "--repeats", "5"]),
    ("ppo", "HalfCheetah-v5", "sb3", ["--backend", "sync", "--repeats", "5"]),
    ("ppo", "Breakout", "sb3", ["--backend", "sync", "--repeats", "3"]),
    ("trpo", "HalfCheetah-v5", "sb3-contrib", ["--backend", "sync", "--repeats", "3"]),
    ("ppo", "HalfCheetah-v5", "sb3", ["--backend", "envpool", "--repeats", "5"]),
    ("trpo", "HalfCheetah-v5", "sb3-contrib", ["--backend", "envpool", "--repeats", "3"]),
)
SEEDS = (100, 101, 102, 103, 104)
"""No setting was ever chosen on these."""
LATER_SEEDS = (105, 106, 107, 108, 109)
"""For presets that were changed after `SEEDS` of theirs had been reported."""
MUJOCO = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")
LARGE = ("Ant-v5", "Humanoid-v5")
SMALL = ("Acrobot-v1", "LunarLander-v3", "MountainCar-v0", "MountainCarContinuous-v0")
LEARNING = (
    *(("ppo", env) for env in ("CartPole-v1", *MUJOCO, *LARGE, *SMALL, "Pendulum-v1")),
    *(("trpo", env) for env in MUJOCO),
)
CHANGED = (("trpo", "Hopper-v5"), ("trpo", "Walker2d-v5"))
"""Presets that are reported on `LATER_SEEDS`."""
ZOO = {
    ("ppo", "HalfCheetah-v5"): (0, 1),
    ("trpo", "Hopper-v5"): LATER_SEEDS,
    ("trpo", "Walker2d-v5"): LATER_SEEDS,
}
"""Seeds of the runs with the RL Zoo's settings, by algorithm and environment."""


def measure_speed(only: str | None) -> None:
    """Every line of the speed tables, one after the other, each kept as soon as it is there."""
    for algo, env, peer, more in SPEED:
        key = f"{env} {peer}{' whole' if '--whole' in more else ''}"
        key += "".join(f" {name}" for name in ("sync", "envpool") if name in more)
        if only and only not in key:
            continue
        print(key, flush=True)
        command = [*KEEL, "bench", algo, "--env", env, "--peer", peer, "--json", *more]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        keep("speed", key, json.loads(done.stdout.splitlines()[-1]))


def measure_start() -> None:
    """Seconds from entering `keel train CartPole-v1` to its first update, three times."""
    print("first update", flush=True)
    keep("speed", "first update", {"seconds": [_first_update() for _ in range(4)][1:]})


def _first_update() -> float:
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        command = [*KEEL, "train", "CartPole-v1", "--runs", folder]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not any(path.stat().st_size for path in Path(folder).rglob("metrics.jsonl")):
            if run.poll() is not None:
                raise RuntimeError(f"keel train ended with status {run.returncode}")
            time.sleep(0.01)
        seconds = time.perf_counter() - began
        run.send_signal(signal.SIGTERM)
        run.wait()
    return seconds


def measure_fisher() -> None:
    """A CNN's Fisher-vector product beside the double backward that others take."""
    print("Fisher-vector product", flush=True)
    torch.set_num_threads(cores())
    found = {}
    for cnn in ("nature", "small"):
        result, error = fisher_on_cnn(cnn)
        found[cnn] = {
            "ours": result.ours,
            "peer": result.peer,
            "ratio": result.ratio,
            "repeats": result.repeats,
            "error": error,
        }
    keep("speed", "Fisher-vector product", found)


def measure_beside(only: str | None, source: Path | None) -> None:
    """The peer's own best settings on the same environment, one process a seed."""
    for (algo, env), seeds in ZOO.items():
        key = _key(algo, env)
        if only and only not in key:
            continue
        if source is None:
            answers = [_train_zoo(algo, env, seed) for seed in seeds]
        else:
            answers = [path.read_text() for path in sorted(source.glob(f"zoo-{algo}-{env}-*.json"))]
        runs = [json.loads(text.splitlines()[-1]) for text in answers if text.strip()]
        if runs:
            keep("beside", key, {"runs": runs})


def _train_zoo(algo: str, env: str, seed: int) -> str:
    print(f"{_key(algo, env)}, the RL Zoo's settings: seed {seed}", flush=True)
    python = ROOT / ".venv-peers" / "bin" / "python"
    script = ROOT / "benchmarks" / "workers" / "zoo_sb3.py"
    command = [str(python), "-W", "ignore", str(script), algo, env, str(seed)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _key(algo: str, env: str) -> str:
    return env if algo == "ppo" else f"{env} {algo}"


def measure_learning(only: str | None, source: Path | None) -> None:
    """Train the presets on their seeds, or read such runs from a folder."""
    for algo, env in LEARNING:
        key = _key(algo, env)
        if only and only not in key:
            continue
        root = source or ROOT / "build" / "results"
        seeds = LATER_SEEDS if (algo, env) in CHANGED else SEEDS
        if source is None:
            print(f"{key}: training", flush=True)
            command = [*KEEL, "train", env, "--algo", algo, "--seeds", *map(str, seeds)]
            subprocess.run([*command, "--runs", str(root), "--quiet"], check=True)
        rows = [read_run(path) for path in root.rglob("run.json")]
        rows = [row for row in rows if (row["algo"], row["env"]) == (algo, env)]
        rows = [row for row in rows if row["finished"]]
        rows.sort(key=lambda row: row["created"])
        newest = {row["seed"]: row for row in rows if row["seed"] in seeds}
        if newest:
            keep("learning", key, summarise([newest[seed] for seed in sorted(newest)]))


def read_run(record: Path) -> dict[str, Any]:
    """The end of one run, from its metrics."""
    folder = record.parent
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    last = lines[-1]
    return {
        "created": json.loads(record.read_text())["created"],
        "env": config["env"],
        "algo": config["algo"],
        "seed": config["seed"],
        "finished": last["step"] >= config["total_steps"] and "eval/return_mean" in last,
        "steps": last["step"],
        "return": last.get("eval/return_mean"),
        "training_return": last["rollout/return_mean"],
        "kl_max": max(line["train/kl_exact"] for line in lines),
        "over": sum(line["train/kl_exact"] > line["train/max_kl"] for line in lines),
        "max_kl": config["region"]["max_kl"],
        "updates": len(lines),
        "walked_back": sum(line["train/verdict"] != "accepted" for line in lines),
        "seconds": last["time/seconds"],
    }


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """IQM with Student's interval over seeds, and the trust region over all updates."""
    scores = torch.tensor([run["return"] for run in runs], dtype=torch.float64)
    interval = score_interval([scores])
    return {
        "iqm": interval.estimate.item(),
        "mean": scores.mean().item(),
        "interval": [interval.low.item(), interval.high.item()],
        "runs": runs,
        "updates": sum(run["updates"] for run in runs),
        "walked_back": sum(run["walked_back"] for run in runs),
        "kl_max": max(run["kl_max"] for run in runs),
        "max_kl": runs[0]["max_kl"],
        "steps": runs[0]["steps"],
    }


def summarise_again() -> None:
    """Compute what is said about the runs from their kept scores, so that it is never older."""
    data = json.loads(DATA.read_text())
    for key, told in data.get("learning", {}).items():
        data["learning"][key] = summarise(told["runs"])
    DATA.write_text(json.dumps(data, indent=1) + "\n")


def keep(part: str, key: str, value: Any) -> None:
    """Replace one entry of the file, with the day and the machine."""
    data = json.loads(DATA.read_text()) if DATA.exists() else {}
    day = time.strftime("%Y-%m-%d")
    data.setdefault(part, {})[key] = {**value, "day": day} if part == "speed" else value
    data["measured"] = {
        "day": day,
        "cores": cores(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(json.dumps(data, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("speed", "learning", "beside", "page", "all"))
    parser.add_argument("--only", help="entries whose name contains this")
    parser.add_argument("--from", dest="source", type=Path, help="a folder of finished runs")
    options = parser.parse_args()
    if options.part in ("speed", "all"):
        measure_speed(options.only)
        if options.only is None or options.only in "first update":
            measure_start()
        if options.only is None or options.only in "Fisher-vector product":
            measure_fisher()
    if options.part in ("learning", "all"):
        measure_learning(options.only, options.source)
    if options.part in ("beside", "all"):
        measure_beside(options.only, options.source)
    summarise_again()
    write_page(json.loads(DATA.read_text()), ROOT / "docs" / "results.md")


if __name__ == "__main__":
    main()
