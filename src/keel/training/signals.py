"""Stopping on request: a signal sets a flag, and the loop ends at its next safe point."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """What was asked of the run while it worked."""

    def __init__(self, notify: Callable[[signal.Signals], None] | None = None) -> None:
        self.requested: signal.Signals | None = None
        """the first signal that arrived; None while nothing did"""
        self._interrupts = 0
        self._notify = notify

    @property
    def exit_code(self) -> int:
        """What the process should return: 143 after SIGTERM, 130 after SIGINT, else 0."""
        return 0 if self.requested is None else 128 + self.requested

    def receive(self, number: int, _: FrameType | None = None) -> None:
        """The signal handler: note the request; at the second SIGINT stop at once."""
        arrived = signal.Signals(number)
        self._interrupts += arrived == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
        if self.requested is None:
            self.requested = arrived
            if self._notify is not None:
                self._notify(arrived)


_LISTENING: list[StopRequest] = []


def stop_requested() -> bool:
    """Whether the innermost `graceful_stop` was asked to: for long work inside of one step."""
    return bool(_LISTENING) and _LISTENING[-1].requested is not None


@contextmanager
def graceful_stop(
    notify: Callable[[signal.Signals], None] | None = None,
) -> Iterator[StopRequest]:
    """Turn SIGTERM and the first SIGINT into a request, for as long as the block lasts.

    Ask `.requested` at safe points, save, and leave with `.exit_code`. `notify` is told at once
    (from within the signal handler), so that a user sees that Ctrl-C was understood. A signal that
    was ignored (`nohup`) stays ignored. Handlers belong to the main thread: elsewhere nothing is
    installed and nothing is ever requested.

    >>> with graceful_stop() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.requested.name, stop.exit_code
    ('SIGTERM', 143)
    """
    stop = StopRequest(notify)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = {}
    try:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, stop.receive)
        _LISTENING.append(stop)
        yield stop
    finally:
        if stop in _LISTENING:
            _LISTENING.remove(stop)
        for number, handler in previous.items():
            # None: a handler that C installed, which Python can neither see nor give back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
