"""Faults of a whole run, on real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keel.training.checkpoint import load


def launch(root: Path) -> subprocess.Popen[str]:
    """A run that would go on for minutes."""
    command = [
        sys.executable, "-m", "keel", "train", "CartPole-v1", "--runs", str(root), "--name", "run",
        "--compile", "off", "--total-steps", "1e7", "--quiet",
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_lines(path: Path, lines: int, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if path.exists() and path.read_text().count("\n") >= lines:
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} has not {lines} lines after {seconds} s")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_run_at_its_next_safe_point(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    """Faults 15 and 16: a checkpoint of the last iteration, the lock released, the status told."""
    process = launch(tmp_path)
    run = tmp_path / "run" / "seed-0"
    wait_for_lines(run / "metrics.jsonl", 3)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert load(run).step == last["step"]
    assert not (run / "lock").exists()
    assert json.loads((run / "run.json").read_text())["status"] == "stopped"


def test_a_killed_run_can_be_resumed(tmp_path: Path) -> None:
    """Fault 1, on a whole run: kill −9, take over the stale lock, go on."""
    process = launch(tmp_path)
    run = tmp_path / "run" / "seed-0"
    wait_for_lines(run / "metrics.jsonl", 3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    again = subprocess.Popen(
        [sys.executable, "-m", "keel", "resume", str(run), "--quiet"], stderr=subprocess.PIPE
    )
    before = (run / "metrics.jsonl").read_text().count("\n")
    wait_for_lines(run / "metrics.jsonl", before + 2)
    again.kill()
    again.communicate()
    saved = load(run).step
    done = subprocess.run(
        [sys.executable, "-m", "keel", "resume", str(run), "--total-steps", str(saved + 512),
         "--json"],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] >= saved + 512
