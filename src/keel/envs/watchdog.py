"""A watchdog over environments that run in this process: what never returns is named, and ended.

A thread looks now and then whether a call into an environment has got any further. One that has
not for `timeout` seconds is interrupted by a signal, which becomes an `EnvHungError`. Code that no
signal interrupts (C that never returns to Python) can only be ended with its process: this is done
where the process is a run of its own (`owned_process`), after `before_abrupt_exit` has had its say.
Where such code holds Python's lock (a regular expression that backtracks for years), not even the
thread can run: only worker processes, which can be killed, help against that.

A call costs less than a microsecond: nothing is timed where it happens.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Protocol

from keel.envs.faults import EnvError, EnvHungError, EnvRaisedError, EnvWarning, describe

SIGNAL: signal.Signals | None = getattr(signal, "SIGURG", None)
"""Interrupts the main thread; ignored by default, so that a stray one does no harm."""
GRACE = 5.0
"""Seconds for a call that was interrupted to return, before the process is ended."""
CLOSE_TIMEOUT = 10.0
"""Seconds at most for environments to close."""
FAILED = 2


class Place(NamedTuple):
    """Place of the environment at work: −1 for all of them together."""

    env: int
    seed: int
    step: int


UNKNOWN = Place(-1, -1, 0)


class _Interrupted(BaseException):
    """Exception of the signal in a call that hangs: no `except Exception` of its own stops it."""


class Watch:
    """Supervise calls into environments: `with watch("step"): env.step(action)`.

    What they raise, `SystemExit` included, becomes an `EnvRaisedError`; a call that hangs, an
    `EnvHungError`.

    Args:
        place: a method that tells which environment is at work; called from another thread.
        timeout: seconds without any progress after which a call counts as hung.
    """

    def __init__(self, place: Callable[[], Place], timeout: float) -> None:
        self._place = weakref.WeakMethod(place)
        self.timeout, self._limit = timeout, timeout
        self._doing, self._calls, self._active = "", 0, False
        self._thread = 0
        self._position: object = None
        self._stuck = 0.0
        self._interrupted = -1  # the call that was interrupted
        self._warned = -1
        _patrol.add(self)

    def __call__(self, doing: str, limit: float | None = None) -> Watch:
        """Say what is done next, and how long it may take if not `timeout`."""
        self._doing, self._limit = doing, self.timeout if limit is None else limit
        return self

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._calls += 1
        self._active = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._active = False
        if kind is None or error is None:
            return
        if kind is _Interrupted:
            raise self.fault() from None
        if isinstance(error, Exception | SystemExit) and not isinstance(error, EnvError):
            where, lines = self._where() or UNKNOWN, traceback.format_exception(error)
            raise EnvRaisedError(describe(error, self._doing), *where, "".join(lines)) from error

    def fault(self) -> EnvHungError:
        """Return the error that names the environment at work."""
        what = f"did not return from {self._doing} for {self._limit:g} s"
        return EnvHungError(what, *(self._where() or UNKNOWN))

    def is_interrupted(self) -> bool:
        """Return whether the call that runs now is the one that hangs."""
        return self._active and self._interrupted == self._calls

    def check(self, elapsed: float) -> None:
        """Look whether the running call got further in the last `elapsed` seconds."""
        position = (self._calls, self._where()) if self._active else None
        if position is None or position != self._position:
            self._position, self._stuck = position, 0.0
            return
        self._stuck += elapsed
        if self._stuck < self._limit or _is_debugged(self._thread):
            return
        if _can_interrupt(self._thread) and self._stuck < self._limit + GRACE:
            self._interrupted = self._calls
            signal.pthread_kill(self._thread, SIGNAL)  # type: ignore[arg-type]
        else:
            self._give_up()

    def _give_up(self) -> None:
        message = f"{self.fault()}; it could not be interrupted"
        if _OWNERS:
            status = _OWNERS[-1].closing_status() if self._doing == "close" else FAILED
            end_process(status, f"{message}: the process ends")
        if self._warned != self._calls:
            self._warned = self._calls
            warnings.warn(f"{message}: end the process", EnvWarning, stacklevel=2)

    def _where(self) -> Place | None:
        place = self._place()
        return None if place is None else place()


class Spot:
    """The place of an environment that was not seeded, and is not stepped by number."""

    def __init__(self, index: int = 0) -> None:
        self.index = index

    def place(self) -> Place:
        """Return it as a watch needs it."""
        return Place(self.index, -1, 0)


class _Patrol:
    """The thread that looks after all watches, for as long as there are any."""

    def __init__(self) -> None:
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._lock = threading.RLock()  # the signal may come to a thread that holds it
        self._thread: threading.Thread | None = None

    def add(self, watch: Watch) -> None:
        _listen()
        with self._lock:
            self._watches.add(watch)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="keel-watchdog", daemon=True)
                self._thread.start()

    def watches(self) -> list[Watch]:
        with self._lock:
            return list(self._watches)

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            with self._lock:
                watches = list(self._watches)  # one may be collected at any moment
                if not watches:
                    self._thread = None
                    return
                shortest = min(min(watch.timeout, watch._limit) for watch in watches)
            del watches
            interval = min(1.0, max(0.02, shortest / 8))
            time.sleep(interval)
            now = time.monotonic()
            # of a process that was stopped for a while (Ctrl-Z) only what it could use counts
            elapsed, last = min(now - last, 2.0 * interval), now
            for watch in self.watches():
                watch.check(elapsed)


_patrol = _Patrol()


def _listen() -> None:
    """Install the handler of the signal, unless another one is installed."""
    free = SIGNAL is not None and signal.getsignal(SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN)
    if free and threading.current_thread() is threading.main_thread():
        signal.signal(SIGNAL, _interrupt)  # type: ignore[arg-type]


def _interrupt(_: int, frame: FrameType | None) -> None:
    leaving = frame is not None and frame.f_code is Watch.__exit__.__code__
    if not leaving and any(watch.is_interrupted() for watch in _patrol.watches()):
        raise _Interrupted


def _can_interrupt(thread: int) -> bool:
    main = threading.main_thread().ident == thread
    return main and SIGNAL is not None and signal.getsignal(SIGNAL) is _interrupt


def _is_debugged(thread: int) -> bool:
    """Return whether the call is in a debugger: then it may take its time."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__") in ("bdb", "pdb"):
            return True
        frame = frame.f_back
    return False


# --- closing ------------------------------------------------------------------------------------


def close_all(envs: Sequence[Any], timeout: float, first: int = 0) -> list[str]:
    """Close environments; return a sentence about each that raised or hung.

    After one that hangs, those behind it are left as they are: all together take `timeout` seconds
    at most.
    """
    position = Spot()
    watch = Watch(position.place, timeout)
    problems = []
    deadline = time.monotonic() + timeout
    for row, env in enumerate(envs):
        index = position.index = first + row
        try:
            with watch("close", max(0.05, deadline - time.monotonic())):
                env.close()
        except EnvHungError:
            rest = len(envs) - row - 1
            suffix = f", and {rest} more were not closed" if rest else ""
            problems.append(f"environment {index} did not close within {timeout:g} s{suffix}")
            break
        except EnvError as error:
            cause = error.__cause__ or error
            problems.append(f"environment {index} {describe(cause, 'close')} when it was closed")
    return problems


def close_and_warn(envs: Sequence[Any], timeout: float) -> None:
    """Close environments of this process; those that raise or hang are named in a warning."""
    for problem in close_all(envs, min(timeout, CLOSE_TIMEOUT)):
        warnings.warn(problem, EnvWarning, stacklevel=3)


@contextmanager
def closed_on_error(envs: Sequence[Any], timeout: float) -> Iterator[None]:
    """Close the environments that were made so far if the block raises.

    A simulator that one of them has started would live on after this process.
    """
    try:
        yield
    except BaseException:
        close_and_warn(envs, timeout)
        raise


# --- the end of a process -----------------------------------------------------------------------


class Owner(Protocol):
    """Owner of this process, which may end it."""

    def closing_status(self) -> int:
        """Return the exit status if environments cannot be closed."""


_OWNERS: list[Owner] = []
_LAST_WORDS: list[Callable[[int], None]] = []


@contextmanager
def owned_process(owner: Owner) -> Iterator[None]:
    """Declare that this process may be ended if an environment in it can be stopped by no means."""
    _OWNERS.append(owner)
    try:
        yield
    finally:
        _OWNERS.remove(owner)


@contextmanager
def before_abrupt_exit(action: Callable[[int], None]) -> Iterator[None]:
    """Call `action` with the exit status if the process has to be ended within the block."""
    _LAST_WORDS.append(action)
    try:
        yield
    finally:
        _LAST_WORDS.remove(action)


def end_process(status: int, message: str) -> None:
    """End this process now, whatever its main thread does, with one line on standard error."""
    for action in reversed(_LAST_WORDS):
        with suppress(Exception):
            action(status)
    with suppress(OSError):
        os.write(2, f"keel: {message}\n".encode())
    os._exit(status)
