"""Stopping on request: a signal sets a flag, and the loop ends at its next safe point.

Who does not want to wait sends the signal again: the second SIGINT and the third SIGTERM (`timeout`
sends two) end the run at once, also where it hangs in code that never returns to Python.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from keel.envs.watchdog import FAILED, end_process, owned_process

SIGNALS = (signal.SIGTERM, signal.SIGINT)
AT_ONCE = {signal.SIGINT: 2, signal.SIGTERM: 3}
"""Number of equal signals that stop a run at once."""
END = b"\0"
REMIND = 0.5
PATIENCE = 3.0
"""Seconds for the main thread to stop at once; after them the process is ended."""


class Terminated(KeyboardInterrupt):
    """Exception of a SIGTERM that arrived so often that the run ends at once."""


class StopRequest:
    """Signals that asked the run to stop."""

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        """the first signal that arrived; None while nothing did"""
        self.received: Counter[signal.Signals] = Counter()
        """signals that the main thread has answered"""
        self.safe = False
        """whether everything is on the disk and nothing is left but to close environments"""

    @property
    def exit_code(self) -> int:
        """Exit status of the process: 143 after SIGTERM, 130 after SIGINT, else 0."""
        return 0 if self.requested is None else 128 + self.requested

    def closing_status(self) -> int:
        """Return the exit status of a process that cannot even close its environments."""
        return self.exit_code if self.safe else FAILED

    def receive(self, number: int, _: FrameType | None = None) -> None:
        """Handle a signal: note the request; if it has come often enough, stop at once."""
        arrived = signal.Signals(number)
        self.received[arrived] += 1
        if self.requested is None:
            self.requested = arrived
        if self.received[arrived] >= AT_ONCE[arrived]:
            raise Terminated if arrived is signal.SIGTERM else KeyboardInterrupt


_LISTENING: list[StopRequest] = []


def stop_requested() -> bool:
    """Return whether the innermost `graceful_stop` was asked to: for long work within one step."""
    return bool(_LISTENING) and _LISTENING[-1].requested is not None


@contextmanager
def graceful_stop() -> Iterator[StopRequest]:
    """Turn SIGTERM and the first SIGINT into a request, for as long as the block lasts.

    Ask `.requested` at safe points, save, and leave with `.exit_code`. A signal that was ignored
    (`nohup`) stays ignored. Handlers belong to the main thread: elsewhere nothing is installed and
    nothing is ever requested.

    Examples:
        >>> with graceful_stop() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.requested.name, stop.exit_code
        ('SIGTERM', 143)
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = {}
    try:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, stop.receive)
        _LISTENING.append(stop)
        with _enforced(stop), owned_process(stop):
            yield stop
    finally:
        if stop in _LISTENING:
            _LISTENING.remove(stop)
        for number, handler in previous.items():
            # None: a handler that C installed, which Python can neither see nor give back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _enforced(stop: StopRequest) -> Iterator[None]:
    """Let a thread end the process where the main thread cannot answer a signal.

    Python runs handlers in the main thread, and only between two steps of Python code; the wakeup
    descriptor is written by the operating system's own handler.
    """
    if os.name != "posix":
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(
        target=_enforce, args=(reader, stop), name="keel-signals", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writer, END)
        thread.join()
        os.close(writer)
        os.close(reader)


def _enforce(reader: int, stop: StopRequest) -> None:
    arrived: Counter[signal.Signals] = Counter()
    while END not in (data := os.read(reader, 64)):
        arrived.update(signal.Signals(byte) for byte in data if byte in SIGNALS)
        for number in SIGNALS:
            if arrived[number] >= AT_ONCE[number] > stop.received[number]:
                _end_unless_answered(number, stop)


def _end_unless_answered(number: signal.Signals, stop: StopRequest) -> None:
    """Wait for the main thread, which may have seen several signals as one: remind it once."""
    for timeout in (REMIND, PATIENCE):
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if stop.received[number] >= AT_ONCE[number]:
                return
            time.sleep(0.02)
        for _ in range(AT_ONCE[number] - stop.received[number] if timeout == REMIND else 0):
            os.kill(os.getpid(), number)
            time.sleep(0.02)  # signals that arrive together count as one
    end_process(128 + number, f"{number.name} again, and no answer: the process ends")
