"""Body of a worker process of the async backend: some lanes, on shared memory.

The parent sends one byte per step; actions and results travel through the shared memory. A worker
never outlives its parent, and leaves signals to it: what a terminal or a scheduler sends to all
processes of a run is for the parent to answer.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from keel.envs.faults import BadStepError, EnvRaisedError
from keel.envs.lanes import Env, Lanes
from keel.envs.spawning import unpack
from keel.envs.watchdog import CLOSE_TIMEOUT, close_all, closed_on_error
from keel.processes import request_parent_death_signal

PARENTAL = (signal.SIGTERM, signal.SIGINT)
"""Signals that a worker leaves to its parent."""
STEP, RESET, CLOSE, DONE, FAILED = b"s", b"r", b"c", b"k", b"e"


class Post(NamedTuple):
    """Number of a worker, and its environments `first … last − 1`."""

    number: int
    first: int
    last: int


def serve(pipe: Connection, payload: bytes, memory: Any, post: Post, main_thread: bool) -> None:
    """Run a worker: make the environments, then answer until it is closed."""
    _leave_signals_to_parent()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # many workers share the cores
    _die_with_parent(main_thread)
    try:
        lanes = _build(payload, memory, post)
        pipe.send_bytes(DONE)
    except BaseException:
        _report(pipe, EnvRaisedError("raised while it was made", post.first, -1, 0, _trace()))
        return
    try:
        while (message := pipe.recv_bytes())[:1] != CLOSE:
            try:
                if message == STEP:
                    lanes.step()
                else:
                    lanes.reset(np.frombuffer(message[1:], dtype=np.int64).tolist())
                pipe.send_bytes(DONE)
            except (BadStepError, EnvRaisedError) as error:
                _report(pipe, error)
        pipe.send_bytes(CLOSE)  # the message was read: from now on environments are closed
        problems = close_all(lanes.envs, float(message[1:]), post.first)
        pipe.send_bytes(json.dumps(problems).encode())
    except (EOFError, OSError):
        close_all(lanes.envs, CLOSE_TIMEOUT)  # the parent is gone


def _leave_signals_to_parent() -> None:
    """Let SIGTERM and SIGINT do nothing here; the parent blocked them while this process started.

    A handler that does nothing, and not `SIG_IGN`: processes that an environment starts would
    inherit that, and could not be terminated.
    """
    for number in PARENTAL:
        signal.signal(number, lambda *_: None)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTAL)


def _build(payload: bytes, memory: Any, post: Post) -> Lanes:
    factory, plan, autoreset = unpack(payload)
    buffers = plan.buffers(memory).rows(post.first, post.last)
    progress = np.ndarray(1, np.int64, buffer=memory, offset=plan.nbytes + 8 * post.number)
    envs: list[Env] = []
    with closed_on_error(envs, CLOSE_TIMEOUT):
        while len(envs) < post.last - post.first:
            envs.append(factory())
        return Lanes(envs, plan.layout, buffers, autoreset, post.first, progress)


def _report(pipe: Connection, error: Exception) -> None:
    fault: list[Any] = [str(error)]
    if isinstance(error, EnvRaisedError):
        fault = [error.what, error.index, error.seed, error.step, error.detail]
    pipe.send_bytes(FAILED + json.dumps(fault).encode())


def _trace() -> str:
    return traceback.format_exc()


def _die_with_parent(main_thread: bool) -> None:
    """End with the parent, by the kernel's signal and by a thread that waits for its end."""
    if main_thread:  # the signal comes with the end of the *thread* that started us
        request_parent_death_signal()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: Any) -> None:
    parent.join()
    os._exit(1)
