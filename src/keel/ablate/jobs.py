"""Processes side by side: as many at a time as there are cores for."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from keel.envs.names import atari_game
from keel.resources import cores

Key = TypeVar("Key")
PAUSE = 0.2


@dataclass(frozen=True)
class Job:
    """How a process ended."""

    status: int
    out: str
    error: str

    @property
    def reason(self) -> str:
        """The last line it had to say."""
        return self.error.strip().splitlines()[-1] if self.error.strip() else "failed"


class _Running:
    """A process in a session of its own, so that Ctrl-C reaches it once, through us.

    It writes into files: a pipe that nobody reads would stop it when full.
    """

    def __init__(self, command: list[str]) -> None:
        self.out: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.error: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdout=self.out, stderr=self.error, start_new_session=True
        )

    def ended(self) -> Job | None:
        status = self.process.poll()
        if status is None:
            return None
        texts = []
        for file in (self.out, self.error):
            file.seek(0)
            texts.append(file.read())
            file.close()
        return Job(status, *texts)


def at_once(config: Any) -> int:
    """A network small enough for one thread leaves the other cores to other runs."""
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
    """Run all of them, `limit` at a time; `done` hears of each, `tick` what runs meanwhile.

    When interrupted or terminated, all that run are told to stop, which lets them save what they
    have.
    """
    waiting = list(commands)
    running: dict[Key, _Running] = {}
    try:
        with _terminable():
            _work_through(waiting, running, limit, done, tick, pause)
    finally:
        for child in running.values():
            child.process.terminate()
        for child in running.values():
            child.process.wait()


def _work_through(
    waiting: list[tuple[Key, Callable[[], list[str]]]],
    running: dict[Key, _Running],
    limit: int,
    done: Callable[[Key, Job], None],
    tick: Callable[[list[Key]], None],
    pause: float,
) -> None:
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


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends this process by an exception, so that those it has started end with it."""
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
