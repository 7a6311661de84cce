"""Faults of a whole run, on real processes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from children import is_alive, run_child, wait_until
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv

from keel.config import Config, from_dict
from keel.envs import EnvHungError, WorkerDiedError
from keel.errors import RunWarning
from keel.tracking.writer import MetricsWriter
from keel.training.checkpoint import CheckpointError, load
from keel.training.runner import resume, start

Start = Callable[..., subprocess.Popen[str]]


def train(root: Path, *more: str) -> list[str]:
    """The command of a run that would go on for minutes."""
    return [
        sys.executable, "-m", "keel", "train", "CartPole-v1", "--runs", str(root), "--name", "run",
        "--compile", "off", "--total-steps", "1e7", "--quiet", *more,
    ]  # fmt: skip


def wait_for_lines(path: Path, lines: int) -> None:
    wait_until(
        lambda: path.exists() and path.read_text().count("\n") >= lines,
        f"{path} has {lines} lines",
    )


@pytest.mark.parametrize(
    ("number", "backend"), [(signal.SIGTERM, "async"), (signal.SIGINT, "vector")]
)
def test_a_signal_to_all_processes_of_a_run_ends_it_at_its_next_safe_point(
    number: signal.Signals, backend: str, tmp_path: Path, child: Start
) -> None:
    """Faults 15 and 16: a checkpoint of the last iteration, the lock released, the status told.

    `timeout`, systemd and schedulers send the signal to workers as well, who leave it to the run.
    """
    process = child(train(tmp_path, "--envs.backend", backend))
    run = tmp_path / "run" / "seed-0"
    wait_for_lines(run / "metrics.jsonl", 3)
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number, err
    assert "of 10,000,000 steps; go on with: keel resume " + str(run) in err
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert load(run).step == last["step"]
    assert not (run / "lock").exists()
    assert json.loads((run / "run.json").read_text())["status"] == "stopped"


def test_a_killed_run_can_be_resumed(tmp_path: Path, child: Start) -> None:
    """Fault 1, on a whole run: kill −9, take over the stale lock, go on."""
    process = child(train(tmp_path))
    run = tmp_path / "run" / "seed-0"
    wait_for_lines(run / "metrics.jsonl", 3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    again = child([sys.executable, "-m", "keel", "resume", str(run), "--quiet"])
    before = (run / "metrics.jsonl").read_text().count("\n")
    wait_for_lines(run / "metrics.jsonl", before + 2)
    again.kill()
    again.communicate()
    saved = load(run).step
    done = run_child(
        [sys.executable, "-m", "keel", "resume", str(run), "--total-steps", str(saved + 512),
         "--json"]
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] >= saved + 512


# --- the disk, and environments, under a run that trains ----------------------------------------


def small(**more: Any) -> Config:
    base = {
        "total_steps": 1024,
        "rollout_steps": 32,
        "envs": {"num": 4},
        "region": {"minibatch": 64, "epochs": 1},
        "network": {"hidden": [8]},
        "evaluation": {"episodes": 2},
        "checkpoints": {"every": 256},
    }
    return from_dict(more, from_dict(base))


def test_a_full_disk_in_a_checkpoint_costs_no_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 2, on a run: it stops with a typed error, and goes on once there is space."""
    run = start(small(), tmp_path, "run")
    for progress in run:
        if progress.steps >= 384:
            break

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="the disk is full: the checkpoint needs"):
            for _ in run:
                pass
    path = tmp_path / "run" / "seed-0"
    assert load(path).step == 256
    assert not [p for p in (path / "checkpoints").iterdir() if ".tmp" in p.name]
    *_, last = resume(path)
    assert last.done


def test_a_full_disk_in_metrics_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 3, on a run: one warning, and the number of lines that are missing."""
    real, failing = MetricsWriter._append, iter([True] * 3)

    def append(self: MetricsWriter, descriptor: int, line: bytes) -> None:
        if next(failing, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, descriptor, line)

    monkeypatch.setattr(MetricsWriter, "_append", append)
    with pytest.warns(RunWarning, match="disk is full") as warned:
        *_, last = start(small(), tmp_path, "run")
    assert last.done
    assert len([w for w in warned if issubclass(w.category, RunWarning)]) == 1
    lines = [json.loads(x) for x in (last.path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 8 - 3
    assert lines[0]["dropped"] == 3


@pytest.mark.parametrize(("fault", "error"), [("hang", EnvHungError), ("kill", WorkerDiedError)])
def test_a_run_whose_environment_hangs_or_dies_ends_with_its_name(
    fault: str, error: type[Exception], tmp_path: Path
) -> None:
    """Faults 19 and 20, on a run: a typed error, the run marked, no process left."""
    changes = {
        "env": f"keel/Fatal-{fault}-v0",
        "envs": {"num": 4, "backend": "async", "timeout": 2.0},
        "total_steps": 10_000,
    }
    with pytest.raises(error, match="environment"):
        for _ in start(small(**changes), tmp_path, "run"):
            pass
    record = json.loads((tmp_path / "run" / "seed-0" / "run.json").read_text())
    assert record["status"] == "failed"
    assert not multiprocessing.active_children()


def test_a_killed_run_leaves_no_workers(tmp_path: Path, child: Start) -> None:
    """Fault 21, on a run: kill -9 of the trainer; its workers end, and its shared memory."""
    before = set(Path("/dev/shm").iterdir())
    process = child(train(tmp_path, "--envs.backend", "async"))
    wait_for_lines(tmp_path / "run" / "seed-0" / "metrics.jsonl", 2)
    children = _family(process.pid)
    assert children
    process.kill()
    process.communicate(timeout=120)
    wait_until(lambda: not any(map(is_alive, children)), "workers end with the run")
    left = [
        p for p in set(Path("/dev/shm").iterdir()) - before if p.name.startswith(("psm_", "pym-"))
    ]
    assert not left


def _family(pid: int) -> list[int]:
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in listing.read_text().split()]
    return found


def test_an_environment_that_changed_its_spaces_is_refused(tmp_path: Path) -> None:
    """Fault 12, on a run: both sides are named, before anything is trained."""
    gymnasium.register("keel/Changing-v0", CartPoleEnv, max_episode_steps=500)  # type: ignore[arg-type]
    run = start(small(env="keel/Changing-v0"), tmp_path, "run")
    next(run)
    run.close()
    gymnasium.registry.pop("keel/Changing-v0")
    gymnasium.register("keel/Changing-v0", PendulumEnv, max_episode_steps=200)  # type: ignore[arg-type]
    try:
        with pytest.raises(CheckpointError) as caught:
            resume(tmp_path / "run" / "seed-0")
    finally:
        gymnasium.registry.pop("keel/Changing-v0")
    assert "observation: the checkpoint has Box[4] float32" in str(caught.value)
    assert "action: the checkpoint has Discrete(2), this run has Box[1] float32" in str(
        caught.value
    )


class Fatal(CartPoleEnv):
    """CartPole whose 60th step never ends, or ends its process."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.count = fault, 0

    def step(self, action: Any) -> Any:
        self.count += 1
        if self.count == 60:
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return super().step(action)


for name in ("hang", "kill"):
    if f"keel/Fatal-{name}-v0" not in gymnasium.registry:
        gymnasium.register(f"keel/Fatal-{name}-v0", Fatal, kwargs={"fault": name})  # type: ignore[arg-type]
