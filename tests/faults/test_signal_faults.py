"""Signals in the middle of work: a real process, its exit status, and what it leaves behind."""

from __future__ import annotations

import json
import signal
import sys
import threading

import pytest
from children import run_child

from keel.tracking import list_runs
from keel.training.checkpoint import load
from keel.training.signals import graceful_stop

# A loop like the real one: rollout, update, checkpoint at the safe point. At `place` of iteration 3
# the signals arrive; within a save that is before half of a file is written. One process that forks
# for each case: torch is imported only once.
LOOP = """
import json, os, sys
from pathlib import Path
import torch
from keel.tracking import MetricsWriter, RunDirectory
from keel.training import checkpoint
from keel.training.signals import graceful_stop
torch.set_num_threads(1)
os.fsync = lambda _: None  # nothing here depends on it, and a busy disk is slow

def loop(root, place, numbers):
    iteration = 0

    def at(here):
        if (here, iteration) == (place, 3):
            for number in numbers:
                os.kill(os.getpid(), number)

    checkpoint._crash_point = at
    with RunDirectory.create(root, "demo", config={}) as run, graceful_stop() as stop:
        with MetricsWriter(run.metrics) as writer:
            for iteration in range(1, 10):
                at("rollout")
                at("update")
                writer.write(iteration, {"train/loss": 1.0 / iteration})
                checkpoint.save(run.path, iteration, {}, {"w": torch.full((9,), iteration)}, {})
                if stop.requested:
                    sys.exit(stop.exit_code)

codes = []
for number, case in enumerate(json.loads(sys.argv[2])):
    child = os.fork()
    if child == 0:
        loop(Path(sys.argv[1]) / str(number), *case)
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""
TERM, INT = int(signal.SIGTERM), int(signal.SIGINT)
CASES = [
    ("rollout", [TERM, TERM]),
    ("write state.json", [TERM]),
    ("update", [INT]),
    ("update", [INT, INT]),
    ("write weights.safetensors", [INT, INT]),
    ("publish", [INT, INT]),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Exit code, run and last checkpoint of each case."""
    root = tmp_path_factory.mktemp("signals")
    command = [sys.executable, "-c", LOOP, str(root), json.dumps(CASES)]
    done = run_child(command)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    runs = [list_runs(root / str(number))[0] for number in range(len(CASES))]
    return [(code, run, load(run.path)) for code, run in zip(codes, runs, strict=True)]


@pytest.mark.parametrize("case", [0, 1])
def test_sigterm_stops_at_the_next_safe_point(outcomes, case):
    """Fault 15: mid-iteration or mid-save: the iteration is finished and saved, exit 143."""
    code, run, found = outcomes[case]
    assert (code, found.step, run.step, run.status) == (143, 3, 3, "stopped")


def test_one_interrupt_is_graceful(outcomes):
    """Fault 16: SIGINT once: exit 130 after the checkpoint."""
    code, run, found = outcomes[2]
    assert (code, found.step, run.step, run.status) == (130, 3, 3, "stopped")


@pytest.mark.parametrize("case", [3, 4, 5])
def test_two_interrupts_are_immediate(outcomes, case):
    """Fault 16: SIGINT twice: at once, also within a save, and the last checkpoint is valid."""
    code, run, found = outcomes[case]
    assert code == -signal.SIGINT  # Python's own end after KeyboardInterrupt
    assert (found.step, run.status) == (2, "stopped")
    assert found.weights["w"].eq(2).all()


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_stopped_run_leaves_neither_lock_nor_drafts(outcomes, case):
    """Faults 15 and 16: the next start finds a clean directory."""
    _, run, _ = outcomes[case]
    assert not (run.path / "lock").exists()
    assert not list((run.path / "checkpoints").glob(".*"))


@pytest.mark.usefixtures("sigint")
def test_previous_handlers_are_restored():
    """Fault 17: after a normal end and after an error."""

    def mine(number, frame):
        pass

    kept = {number: signal.signal(number, mine) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with graceful_stop():
            assert signal.getsignal(signal.SIGTERM) is not mine
        assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is mine
        with pytest.raises(ValueError, match="in the loop"), graceful_stop():
            raise ValueError("in the loop")
        assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is mine
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def test_another_thread_may_train():
    """Fault 17: where no handler can be installed nothing crashes, and none is changed."""
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with graceful_stop() as stop:
            seen.append((stop.requested, stop.exit_code, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, 0, before)]
