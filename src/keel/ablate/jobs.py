"""Processes side by side: as many at a time as there are cores for."""

from __future__ import annotations

import json
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from keel.envs.names import atari_game
from keel.processes import start_child
from keel.resources import cores

Key = TypeVar("Key")
PAUSE = 0.2


@dataclass(frozen=True)
class Job:
    """Result of a process that has ended."""

    status: int
    out: str
    error: str

    @property
    def reason(self) -> str:
        """Last line of its standard error: why it failed."""
        lines = self.error.strip().splitlines()
        return lines[-1].removeprefix("keel: ") if lines else f"ended with status {self.status}"

    @property
    def result(self) -> dict[str, Any] | None:
        """JSON object in the last line of its standard output; None if it failed."""
        if self.status != 0:
            return None
        try:
            result = json.loads(self.out.splitlines()[-1])
        except (IndexError, ValueError):
            return None
        return result if isinstance(result, dict) else None


def failure_lines(failed: Sequence[tuple[str, str]], total: int) -> list[str]:
    """Say why jobs failed, every reason once.

    Args:
        failed: label and reason of each job that failed.
        total: number of all jobs, also those that did not fail.
    """
    by_reason: dict[str, list[str]] = {}
    for label, reason in failed:
        by_reason.setdefault(reason, []).append(label)
    if len(by_reason) == 1 and len(failed) == total:
        return list(by_reason)
    return [f"{reason} ({'; '.join(labels)})" for reason, labels in by_reason.items()]


class _Running:
    """A process that ends with this one, and writes into files.

    A pipe that is not read would block it when full.
    """

    def __init__(self, command: list[str]) -> None:
        self.out, self.error = _text_file(), _text_file()
        self.process = start_child(command, self.out, self.error)

    def ended(self) -> Job | None:
        status = self.process.poll()
        if status is None:
            return None
        texts = []
        for file in (self.out, self.error):
            file.seek(0)
            texts.append(file.read())
        self.close()
        return Job(status, *texts)

    def close(self) -> None:
        """Close the pipe and the files of a process that has ended."""
        self.out.close()
        self.error.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


def _text_file() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def at_once(config: Any) -> int:
    """Return the number of runs to train at once: small networks use one core each.

    Args:
        config: of one of the runs.
    """
    network = getattr(config, "network", None)
    large = network is None or network.kind == "cnn" or atari_game(config.env) is not None
    large = large or "NoFrameskip" in config.env
    threads = config.threads or (cores() if large else 1)
    return max(1, cores() // threads)


def run_jobs(
    commands: Sequence[tuple[Key, Callable[[], list[str]]]],
    limit: int,
    done: Callable[[Key, Job], None],
    tick: Callable[[list[Key]], None] = lambda _: None,
    *,
    pause: float = PAUSE,
) -> None:
    """Run commands in processes of their own.

    When interrupted or terminated, all that run are asked to stop, which lets them save what they
    have.

    Args:
        commands: a key and a function that returns the command, for every job.
        limit: number of processes at a time.
        done: is called with the key and the result of every job that has ended.
        tick: is called every `pause` seconds with the keys of the jobs that run.
        pause: seconds between two looks.
    """
    waiting = list(commands)
    running: dict[Key, _Running] = {}
    try:
        with _terminable():
            while waiting or running:
                while waiting and len(running) < limit:
                    key, command = waiting.pop(0)
                    running[key] = _Running(command())
                tick(list(running))
                for key, child in list(running.items()):
                    if (job := child.ended()) is not None:
                        del running[key]
                        done(key, job)
                time.sleep(pause if running else 0.0)
    finally:
        for child in running.values():
            child.process.terminate()
        for child in running.values():
            child.process.wait()
            child.close()


@contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that the processes started here end, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
