"""Three iterations of every kind of run, and what they must leave behind.

    python tests/golden/iterations.py             compare with iterations.json
    python tests/golden/iterations.py --record    write it again, all or the kinds that are named
    python tests/golden/iterations.py --add       add the digests of this machine, the rest stays

The runs are made by `keel train`, as a user makes them, with one thread and small networks. What is
compared comes from their folders: parameters, moments of the optimizer, random states, metrics.
Digests are kept for every machine that recorded them; elsewhere metrics are compared as numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from keel.cli import main as keel

HERE = Path(__file__).parent
RECORDED = HERE / "iterations.json"
ITERATIONS = 3
TOLERANCE = 1e-5
"""Relative to the larger of 1 and the number, on a processor that has no record."""
CHAOTIC = {
    "halfcheetah": 1e-4,
    "histogram": 1e-4,
    "demos": 1e-4,
    "trpo": 1e-3,
    "trpo-discrete": 1e-3,
}
"""The same for contact dynamics, conjugate gradients and quotients of small numbers, which enlarge
the last bit of a sum from iteration to iteration."""

SMALL = ("--network.hidden", "16", "16")
ENVS = ("--envs.num", "4", "--envs.backend", "sync", "--evaluation.episodes", "1")
UPDATE = ("--rollout-steps", "32", "--region.minibatch", "32", "--region.epochs", "2")
TOKENS = (
    *("--model.hidden", "16", "--model.layers", "2", "--model.heads", "2"),
    *("--sample.prompts", "4", "--sample.group", "4", "--region.minibatch", "8"),
    *("--warmup.examples", "32", "--warmup.epochs", "2", "--evaluation.prompts", "8"),
    "--no-control",
)
DEMOS = "{demos}"
"""In place of the folder of demonstrations, which is recorded first."""
KINDS: dict[str, tuple[str, ...]] = {
    "cartpole": ("CartPole-v1", *ENVS, *UPDATE, *SMALL),
    "halfcheetah": ("HalfCheetah-v5", *ENVS, *UPDATE, *SMALL),
    "breakout": (
        *("Breakout", "--envs.num", "2", "--rollout-steps", "16", "--region.minibatch", "16"),
        *("--region.epochs", "1", "--network.cnn", "small", "--network.features", "16"),
        *("--evaluation.episodes", "1", "--evaluation.max-episode-steps", "64"),
    ),
    "gru": (
        *("CartPole-v1", *ENVS, *SMALL, "--rollout-steps", "32", "--region.minibatch", "2"),
        *("--region.epochs", "2", "--network.recurrent", "both", "--network.recurrent-size", "8"),
    ),
    "trpo": ("HalfCheetah-v5", "--algo", "trpo", *ENVS, *UPDATE, *SMALL),
    "trpo-discrete": ("CartPole-v1", "--algo", "trpo", *ENVS, *UPDATE, *SMALL),
    "land": (
        *("land", "--envs.num", "4", "--region.minibatch", "60", "--network.hidden", "8", "8"),
        *("--evaluation.episodes", "1"),
    ),
    "happo": (
        *("simple_spread", *ENVS, *UPDATE, *SMALL),
        *("--agents.sharing", "none", "--agents.order", "sequential"),
    ),
    "mappo": ("simple_spread", *ENVS, *UPDATE, *SMALL),
    "demos": ("MountainCar-v0", *ENVS, *UPDATE, *SMALL, "--demos.path", DEMOS),
    "quantile": ("CartPole-v1", *ENVS, *UPDATE, *SMALL, "--critic.kind", "quantile"),
    "histogram": ("HalfCheetah-v5", *ENVS, *UPDATE, *SMALL, "--critic.kind", "hl_gauss"),
    "penalty": (
        *("CartPole-v1", *ENVS, *UPDATE, *SMALL, "--region.kl-coef", "0.1"),
        *("--region.adaptive-kl", "--region.target-kl", "0.01"),
        *("--region.early-stop", "epoch"),
    ),
    "walked-back": (
        *("Pendulum-v1", *ENVS, *UPDATE, *SMALL, "--region.learning-rate", "0.05"),
        *("--region.max-kl", "0.01", "--network.squash"),
    ),
    "serving": (
        *("serving", "--envs.num", "8", "--rollout-steps", "32", "--region.minibatch", "64"),
        *("--network.hidden", "8", "8", "--evaluation.episodes", "1"),
    ),
    "lookup-grpo": ("language", "--task", "lookup", "--algo", "grpo", *TOKENS),
    "addition-ppo": (
        *("language", "--task", "addition", "--algo", "ppo", *TOKENS),
        *("--kl.place", "loss", "--kl.controller", "adaptive", "--region.epochs", "2"),
    ),
}
"""What `keel train` is called with, beside the length of the run, by the kind's name."""
BATCHES = {"breakout": 32, "land": 120, "serving": 256, "lookup-grpo": 16, "addition-ppo": 16}
"""Steps of an iteration where they are not 128."""
TENSORS = {
    "params": ("opt_state/params",),
    "moments": ("opt_state/first", "opt_state/second", "opt_state/steps"),
    "random": ("shuffle", "draws"),
}
"""Names in a checkpoint's state, by what they are."""
STREAMS = ("actions", "examples")
"""Random states among a checkpoint's plain data."""


def train(kind: str, folder: Path) -> Path:
    """Train one kind of run and return its folder."""
    words = [str(folder / "demos") if word == DEMOS else word for word in KINDS[kind]]
    if DEMOS in KINDS[kind]:
        expert = "keel.apps.demonstrations.experts:swing"
        out = ["--out", str(folder / "demos"), "--episodes", "2", "--json"]
        _run("demos", "record", words[0], "--policy", expert, *out)
    steps = str(ITERATIONS * BATCHES.get(kind, 128))
    where = ["--runs", str(folder), "--name", kind, "--threads", "1", "--quiet"]
    _run("train", *words, "--total-steps", steps, *where)
    return folder / kind / "seed-0"


def _run(*words: str) -> None:
    status = keel([*words])
    if status:
        raise RuntimeError(f"keel {' '.join(words)}: status {status}")


def measure(run: Path) -> dict[str, Any]:
    """Return what a run left behind: digests of everything, and numbers to compare elsewhere."""
    steps = json.loads((run / "checkpoints" / "last.json").read_text())["step"]
    folder = run / "checkpoints" / f"{steps:08d}"
    tensors = load_file(folder / "state.safetensors")
    data = json.loads((folder / "state.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [_without_times(line) for line in lines]
    digests = {
        part: _digest(tensors[name].numpy().tobytes() for name in names if name in tensors)
        for part, names in TENSORS.items()
    }
    streams = {name: data[name] for name in STREAMS if name in data}
    digests["streams"] = _digest([json.dumps(streams, sort_keys=True).encode()])
    digests["metrics"] = digest_metrics(metrics)
    params = tensors["opt_state/params"].double()
    return {
        "sha256": digests,
        "steps": steps,
        "params": {"norm": params.norm().item(), "mean": params.mean().item()},
        "metrics": metrics[-1],
    }


def _without_times(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a line that do not depend on the clock."""
    return {
        name: value for name, value in line.items() if "/" in name and not name.startswith("time/")
    }


def digest_metrics(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return the digest of metrics by name; the order of their names does not matter."""
    return _digest(json.dumps(line, sort_keys=True).encode() for line in lines)


def _digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()


def machine() -> dict[str, str]:
    """Return what the last bits of a sum depend on: processor, torch and its BLAS, numpy."""
    lines: list[str] = []
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    seen = dict(line.split("\t: ", 1) for line in reversed(lines) if "\t: " in line)
    seen = {key.strip(): value for key, value in seen.items()}
    flags = _digest([" ".join(sorted(seen.get("flags", "").split())).encode()])[:16]
    parts = (seen.get(key, "?") for key in ("vendor_id", "cpu family", "model"))
    return {
        "processor": " ".join([platform.machine(), *parts, flags]),
        "torch": torch.__version__,
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "numpy": np.__version__,
    }


def machine_name() -> str:
    """Return the key of this machine's digests."""
    return ", ".join(machine().values())


def differences(kind: str, wanted: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    """Return in words how a run differs from its record: exactly where this machine recorded it."""
    digests = wanted["sha256"].get(machine_name())
    if digests is None:
        return metric_differences(kind, wanted, got, CHAOTIC.get(kind, TOLERANCE))
    parts = [part for part, x in digests.items() if got["sha256"][part] != x]
    words = [f"{kind}: {part} differ" for part in parts]
    return words and words + metric_differences(kind, wanted, got, 0.0)


def metric_differences(
    kind: str, wanted: Mapping[str, Any], got: Mapping[str, Any], tolerance: float
) -> list[str]:
    """Return in words which metrics of the last iteration, or norms, differ by more than that."""
    words = []
    for part in ("metrics", "params"):
        for name, x in wanted[part].items():
            y = got[part].get(name, "missing")
            if tolerance and name.startswith("eval/"):
                continue  # one likeliest action that is another one changes a whole episode
            if not _close(x, y, tolerance):
                words.append(f"{kind}: {name} was {x}, is {y}")
        words += [f"{kind}: {name} is new" for name in got[part] if name not in wanted[part]]
    return words


def _close(x: Any, y: Any, tolerance: float) -> bool:
    if not (isinstance(x, float) and isinstance(y, float)):
        return bool(x == y)
    return math.isclose(x, y, rel_tol=tolerance, abs_tol=tolerance)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=[], help="of runs; by default all")
    parser.add_argument("--record", action="store_true", help="write the record again")
    parser.add_argument("--add", action="store_true", help="add the digests of this machine")
    given = parser.parse_args()
    record = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    words = []
    for kind in given.kinds or list(KINDS):
        with tempfile.TemporaryDirectory() as folder:
            got = measure(train(kind, Path(folder)))
        if given.record:
            record[kind] = {**got, "sha256": {machine_name(): got["sha256"]}}
        elif given.add:
            record[kind]["sha256"][machine_name()] = got["sha256"]
        else:
            words += differences(kind, record[kind], got)
    if given.record or given.add:
        record = {kind: record[kind] for kind in KINDS if kind in record}
        RECORDED.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print("\n".join(words) or f"{len(given.kinds or KINDS)} kinds of runs: as recorded")
    sys.exit(1 if words else 0)


if __name__ == "__main__":
    main()
