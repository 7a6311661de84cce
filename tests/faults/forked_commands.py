"""Run `keel` commands in forked children of one process, which has imported everything already.

Requests come as lines of JSON on standard input, answers go to standard output. A request is
{"argv": [...], "cwd": DIR, "log": FILE, "kill_after": SECONDS or null}, the answer
{"status": exit status or minus the signal, "seconds": SECONDS}. A killed child takes its process
group with it. `Commands` is the side that asks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path


class Commands:
    """`keel` commands, run one at a time by a process that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        assert self._read() == {"ready": True}

    def run(self, argv: list[str], kill_after: float | None = None) -> tuple[int, float, str]:
        """Return exit status (minus the signal of a killed one), seconds, and what was printed."""
        self.count += 1
        log = self.folder / f"{self.count}.log"
        request = {"argv": argv, "cwd": str(self.folder), "log": str(log), "kill_after": kill_after}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        return int(answer["status"]), float(answer["seconds"]), log.read_text(errors="replace")

    def _read(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process that runs commands has ended"
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process and whatever it has started."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def main() -> None:
    """Serve requests until standard input ends."""
    import torch

    import keel.apps.language.kind
    import keel.cli.evaluate
    import keel.cli.train
    import keel.training.runner  # noqa: F401

    torch.set_num_threads(1)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        child = os.fork()
        if child == 0:
            run_command(request["argv"], Path(request["cwd"]), Path(request["log"]))
        status = wait(child, request["kill_after"])
        answer = {"status": status, "seconds": time.perf_counter() - started}
        print(json.dumps(answer), flush=True)


def run_command(argv: list[str], cwd: Path, log: Path) -> None:
    """Run one command in a process group of its own; never return."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(cwd)
    status = 1
    try:
        from keel.cli import main as keel

        status = keel(argv)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(child: int, kill_after: float | None) -> int:
    """Return the child's exit status, killing its group after some seconds."""
    deadline = None if kill_after is None else time.perf_counter() + kill_after
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if deadline is not None and time.perf_counter() >= deadline:
            try:
                os.killpg(child, signal.SIGKILL)
            except ProcessLookupError:  # it has not made its group yet
                os.kill(child, signal.SIGKILL)
            deadline = None
        time.sleep(0.002)


if __name__ == "__main__":
    main()
