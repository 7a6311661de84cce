"""Environments of this process that hang, leave or cannot be closed: each is named, and ended."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from keel.envs import EnvHungError, EnvRaisedError, Envs, EnvWarning, VectorEnvs, make_envs
from keel.envs import watchdog as module
from keel.envs.multi import ParallelEnvs
from keel.training.signals import graceful_stop


def sleep() -> None:
    time.sleep(600)


def swallow() -> None:
    """Tries again for ever, whatever goes wrong."""
    while True:
        try:
            time.sleep(600)
        except Exception:
            continue


def deadlock() -> None:
    """Waits in C, where no signal interrupts it; other threads run."""
    mutex = ctypes.create_string_buffer(128)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


class Stuck(gymnasium.Env[Any, Any]):
    """Does something in its second step, or when it is closed."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)
    possible_agents = agents = ("a",)

    def __init__(
        self, step: Callable[[], Any] | None = None, close: Callable[[], Any] | None = None
    ) -> None:
        self.count, self._step, self._close = 0, step, close

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        if self.count == 2 and self._step is not None:
            self._step()
        return np.zeros(1, np.float32), 1.0, False, False, {}

    def close(self) -> None:
        if self._close is not None:
            self._close()


if "keel/Stuck-v0" not in gymnasium.registry:
    gymnasium.register("keel/Stuck-v0", Stuck)  # type: ignore[arg-type]


def stuck(timeout: float, backend: Any = "sync", **actions: Callable[[], Any]) -> Envs:
    return make_envs(
        "keel/Stuck-v0", 2, backend=backend, seed=0, timeout=timeout, env_kwargs=actions, threads=1
    )


def play(envs: Envs, steps: int = 3) -> None:
    envs.reset(0)
    for _ in range(steps):
        envs.step(np.zeros(2, np.int64))


# --- hanging ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hang", [sleep, swallow])
def test_a_hang_of_this_process_is_interrupted_and_named(hang: Callable[[], None]) -> None:
    with pytest.raises(
        EnvHungError, match=r"environment 0 did not return from step for 0.3 s"
    ) as e:
        play(stuck(0.3, step=hang))
    assert (e.value.index, e.value.step) == (0, 2)


def test_a_slow_environment_is_not_taken_for_a_hung_one() -> None:
    """Each of the two takes less than the timeout, both together take more."""
    envs = stuck(0.8, step=lambda: time.sleep(0.5))
    play(envs)
    envs.close()


def test_what_no_signal_interrupts_is_told_of_in_a_process_that_is_not_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A notebook is not ended: its user is told."""
    monkeypatch.setattr(module, "_can_interrupt", lambda thread: False)
    with pytest.warns(EnvWarning, match="did not return from step for 0.2 s .*end the process"):
        play(stuck(0.2, step=lambda: time.sleep(0.6)))


def test_a_late_signal_does_not_lock_the_thread_that_adds_a_watch() -> None:
    """The call has returned meanwhile, and its thread is at the next environment."""

    def give_up(*_: object) -> None:
        raise AssertionError("the handler waits for its own thread")

    handlers = {signal.SIGURG: module._interrupt, signal.SIGALRM: give_up}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with module._patrol._lock:  # as while a watch is added
            signal.setitimer(signal.ITIMER_REAL, 5.0)
            signal.raise_signal(signal.SIGURG)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)


def in_child(work: Callable[[], None], errors: Path, *, after: Callable[[int], None]) -> int:
    """Fork, do `work` in a child whose standard error goes to a file, and return its status."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.alarm(120)  # ends even what holds Python's lock
        with graceful_stop() as stop:
            try:
                work()
            except KeyboardInterrupt:
                os._exit(stop.exit_code)
        os._exit(0)
    try:
        after(child)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise


def test_a_hang_in_c_ends_the_process_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE", 0.2)
    errors, last_words = tmp_path / "errors", tmp_path / "last_words"

    def work() -> None:
        with module.before_abrupt_exit(lambda status: last_words.write_text(str(status)) and None):
            play(stuck(0.2, step=deadlock))

    assert in_child(work, errors, after=lambda _: None) == 2
    message = r"keel: environment 0 did not return from step for 0.2 s .*could not be interrupted"
    assert re.search(message, errors.read_text())
    assert last_words.read_text() == "2", "who keeps the run has its say"


@pytest.mark.parametrize(
    ("hang", "number", "times"), [(sleep, signal.SIGTERM, 3), (deadlock, signal.SIGINT, 2)]
)
def test_a_signal_that_is_repeated_ends_a_run_that_hangs(
    hang: Callable[[], None],
    number: signal.Signals,
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("keel.training.signals.PATIENCE", 0.2)
    begun = tmp_path / "begun"

    def step() -> None:
        begun.touch()
        hang()

    def insist(child: int) -> None:
        while not begun.exists():
            time.sleep(0.01)
        for _ in range(times):
            time.sleep(0.1)
            os.kill(child, number)

    status = in_child(lambda: play(stuck(600.0, step=step)), tmp_path / "errors", after=insist)
    assert status == 128 + number


# --- closing ------------------------------------------------------------------------------------


def fail() -> None:
    raise OSError("the display is gone")


@pytest.mark.parametrize(
    ("close", "message"),
    [
        (sleep, "environment 0 did not close within 0.3 s, and 1 more were not closed"),
        (fail, "environment 1 raised OSError: the display is gone when it was closed"),
        (sys.exit, r"environment 1 called sys.exit\(\) in close when it was closed"),
    ],
)
def test_what_cannot_be_closed_is_named_in_a_warning(
    close: Callable[[], None], message: str
) -> None:
    envs = stuck(0.3, close=close)
    with pytest.warns(EnvWarning, match=message):
        envs.close()


def test_workers_say_what_could_not_be_closed() -> None:
    envs = stuck(120.0, "async", close=fail)
    envs.reset(0)
    with pytest.warns(EnvWarning) as caught:
        envs.close()
    messages = [str(w.message) for w in caught if issubclass(w.category, EnvWarning)]
    ending = "raised OSError: the display is gone when it was closed"
    assert messages == [f"environment {i} {ending}" for i in (0, 1)]


# --- sys.exit -----------------------------------------------------------------------------------


def leave() -> None:
    sys.exit("no licence")


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_an_environment_that_calls_exit_is_named(backend: str) -> None:
    message = r"environment 0 called sys.exit\('no licence'\) in step \(seed \d+, step 2\)"
    with pytest.raises(EnvRaisedError, match=message):
        play(stuck(120.0, backend, step=leave))


def test_a_vector_that_calls_exit_is_named() -> None:
    venv = gymnasium.vector.SyncVectorEnv([lambda: Stuck(leave)] * 2)
    message = "the environments, stepped together, called sys.exit.* in step"
    with pytest.raises(EnvRaisedError, match=message):
        play(VectorEnvs(venv))


def test_one_of_several_agents_environments_that_calls_exit_is_named() -> None:
    envs: Any = ParallelEnvs.__new__(ParallelEnvs)
    envs._seeds, envs._steps, envs._at_work = [3, 4], [7, 8], 0
    envs._watch = module.Watch(envs._place, 30.0)
    message = r"environment 1 called sys.exit\('no licence'\) in step \(seed 4, step 8\)"
    with pytest.raises(EnvRaisedError, match=message), envs._watched(1, "step"):
        leave()
