"""kill −9 at random moments of whole runs: resumed, each ends as if nothing had happened.

`KEEL_KILLS` sets how many kills there are (default 100, over all kinds of runs), `KEEL_SEED` which.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_commands import Commands

from keel.tracking.reader import read_metrics
from keel.tracking.record import RECORD
from keel.training.checkpoint import load

KILLS = int(os.environ.get("KEEL_KILLS", "100"))
SEED = int(os.environ.get("KEEL_SEED", "0"))
SMALL = ["--envs.num", "2", "--rollout-steps", "32", "--region.minibatch", "32"]
OFTEN = ["--checkpoints.every", "1", "--evaluation.episodes", "2"]
LANGUAGE = [
    *("language", "--task", "lookup", "--task-options", "letters=1,facts=4", "--threads", "1"),
    *("--model.hidden", "16", "--model.layers", "1", "--model.heads", "2", "--no-control"),
    *("--sample.prompts", "2", "--sample.group", "4", "--region.minibatch", "4"),
    *("--region.epochs", "2", "--warmup.examples", "8", "--warmup.epochs", "2"),
    *("--evaluation.prompts", "8", "--checkpoints.every", "1", "--total-steps", "96"),
]
KINDS: dict[str, list[str]] = {
    "ppo": ["CartPole-v1", *SMALL, *OFTEN, "--total-steps", "1280"],
    "trpo": [
        "Acrobot-v1",
        "--algo",
        "trpo",
        "--envs.num",
        "2",
        "--rollout-steps",
        "128",
        *OFTEN,
        "--envs.backend",
        "sync",
        "--total-steps",
        "1280",
    ],
    "land": [
        "land",
        "--envs.num",
        "2",
        *OFTEN,
        "--evaluation.every",
        "300",
        "--rollout-steps",
        "48",
        "--region.minibatch",
        "48",
        "--total-steps",
        "960",
    ],
    "language": LANGUAGE,
    "async": ["CartPole-v1", *SMALL, *OFTEN, "--envs.backend", "async", "--total-steps", "960"],
    "evaluation": [
        "CartPole-v1",
        *SMALL,
        "--total-steps",
        "128",
        "--evaluation.every",
        "64",
        "--evaluation.episodes",
        "400",
        "--evaluation.no-deterministic",
    ],
}
EXACT = set(KINDS) - {"async"}
"""Kinds whose environments save their state, so that a resumed run is bit-equal."""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    served = Commands(tmp_path_factory.mktemp("kills"))
    yield served
    served.close()


def digest(run: Path) -> tuple[str, ...]:
    """Return hashes of everything a run ends with, times aside."""
    last = load(run)
    hashes = [
        hashlib.sha256((last.path / name).read_bytes()).hexdigest()
        for name in ("weights.safetensors", "state.safetensors")
    ]
    untimed = {k: v for k, v in last.data.items() if k not in ("saved", "seconds")}
    table = read_metrics(run)
    metrics = {
        "step": table.step.tolist(),
        **{k: v.tolist() for k, v in table.columns.items() if not k.startswith("time/")},
        **table.texts,
    }
    return (*hashes, json.dumps(untimed, sort_keys=True), json.dumps(metrics, sort_keys=True))


def reference(commands: Commands, kind: str) -> tuple[tuple[str, ...], float]:
    """Train without interruption, twice: the second is timed, with everything compiled."""
    for name in ("warm", "whole"):
        argv = ["train", *KINDS[kind], "--name", f"{kind}-{name}", "--quiet"]
        status, seconds, text = commands.run(argv)
        assert status == 0, text
    return digest(commands.folder / "runs" / f"{kind}-whole" / "seed-0"), seconds


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_runs_that_are_killed_lose_nothing(commands: Commands, kind: str) -> None:
    whole, seconds = reference(commands, kind)
    draw = random.Random(f"{kind} {SEED}")
    wanted = -(-KILLS // len(KINDS))
    kills = attempts = 0
    while kills < wanted:
        attempts += 1
        assert attempts < 5 * wanted, f"{kind}: {kills} kills in {attempts} runs"
        name = f"{kind}-{attempts}"
        run = commands.folder / "runs" / name / "seed-0"
        argv, status = ["train", *KINDS[kind], "--name", name, "--quiet"], -9
        while status == -9:
            before = newest(run)
            again = draw.random() < 0.75 and kills < wanted
            status, _, text = commands.run(argv, draw.uniform(0.0, seconds) if again else None)
            assert "Traceback" not in text, text
            kills += status == -9
            assert newest(run) >= before, f"{name}: a finished checkpoint was lost"
            if (run / RECORD).is_file():
                argv = ["resume", str(run), "--quiet"]
        assert status == 0, text
        if kind in EXACT:
            assert digest(run) == whole, f"{name}: differs from the run without interruption"
        else:
            assert read_metrics(run).step.tolist() == json.loads(whole[-1])["step"]
    print(f"{kind}: {kills} kills, {attempts} runs")


def newest(run: Path) -> int:
    """Return the step of the newest good checkpoint, or 0 before the first."""
    if not any((run / "checkpoints").glob("0*/manifest.json")):
        return 0
    return load(run).step
