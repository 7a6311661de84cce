"""Gymnasium environments in worker processes, with shared memory; failures have names.

Workers are started with `spawn`: no lock or thread of the parent is copied into them, and its
script is not run again. The memory has no name in the file system, so nothing is left behind
however the parent ends.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import numpy as np

from keel.envs.factory import factory_for
from keel.envs.faults import (
    BadStepError,
    ClosedEnvError,
    EnvError,
    EnvHungError,
    EnvRaisedError,
    EnvWarning,
    WorkerDiedError,
)
from keel.envs.lanes import Env, Plan, read_obs, read_step, warn_of_masks
from keel.envs.protocol import Autoreset, Episodes, Obs, Request, Saved, Step, env_seeds
from keel.envs.spaces import action_layout, observation_layout
from keel.envs.spawning import PREFIX, ScriptlessProcess, pack
from keel.envs.watchdog import CLOSE_TIMEOUT, close_and_warn
from keel.envs.worker import CLOSE, DONE, PARENTAL, RESET, STEP, Post, serve

START_TIMEOUT = 120.0
"""Seconds for a worker to import what it needs and to make its environments."""


PATIENCE = 2.0
"""Seconds for a worker to hear that it is to close, and to end after it has."""


class Worker(NamedTuple):
    """A process, the parent's end of its pipe, and the environments it steps."""

    process: BaseProcess
    pipe: Connection
    post: Post


class AsyncEnvs:
    """`num_envs` environments made by `factory`, spread over `workers` processes.

    A worker that dies or hangs is replaced up to `restarts` times: its environments begin new
    episodes, and the rows of that step are both `ignored` and `truncated`. Then, or when an
    environment raises, all workers are closed and the error names environment, seed and step.
    """

    backend = "gymnasium async"

    agents: tuple[str, ...] = ()

    def __init__(
        self,
        factory: Callable[[], Env],
        num_envs: int,
        *,
        autoreset: Autoreset = "next_step",
        workers: int = 1,
        timeout: float = 60.0,
        restarts: int = 0,
    ) -> None:
        model = factory()  # for its spaces only
        try:
            layout = observation_layout(model.observation_space)
            self._actions = action_layout(model.action_space)
            warn_of_masks(model, self._actions.choices)
            self.declared_spaces = ((model.observation_space, model.action_space),)
        finally:
            close_and_warn([model], timeout)
        self.num_envs, self.autoreset, self.restarts = num_envs, autoreset, 0
        self.observation_space, self.action_space = layout.space, self._actions.space
        self._timeout, self._allowed = timeout, restarts
        self._plan = Plan(layout, self._actions, num_envs)
        self._plan.expect_memory()
        self._payload = pack(factory, self._plan, autoreset)
        self._context = multiprocessing.get_context("spawn")
        self._memory = self._context.RawArray("B", self._plan.nbytes + 8 * workers)
        self._buffers = self._plan.buffers(self._memory)
        self._progress = np.ndarray(
            workers, np.int64, buffer=self._memory, offset=self._plan.nbytes
        )
        self._episodes = Episodes(num_envs)
        self._seeds = [-1] * num_envs
        self._seed, self._steps, self._busy = 0, 0, False
        self._workers: list[Worker] = []
        # multiprocessing runs it before it waits for the workers, which no signal ends
        self._finalizer = Finalize(self, _stop, (self._workers, timeout), exitpriority=0)
        edges = np.linspace(0, num_envs, workers + 1).astype(int).tolist()
        for number in range(workers):
            self._workers.append(self._start(Post(number, edges[number], edges[number + 1])))
        for worker in self._workers:
            self._await_start(worker)

    def reset(self, seed: int) -> Obs:
        self._seed, self._steps = seed, 0
        self._seeds = env_seeds(seed, self.num_envs)
        self._episodes.clear()
        self._buffers.masked[:] = False
        self._exchange(self._reset_message)
        return read_obs(self._buffers, np.zeros(self.num_envs, dtype=bool), self._actions)

    def step(self, action: np.ndarray) -> Step:
        self._buffers.action[:] = self._actions.encode(action)
        self._steps += 1
        for first, last in self._exchange(lambda post: STEP):
            rows = np.arange(first, last)
            self._buffers.reward[rows] = 0.0
            self._buffers.terminated[rows] = False
            self._buffers.truncated[rows] = self._buffers.ignored[rows] = True
            self._episodes.drop(rows)
        return read_step(self._buffers, self._episodes, self.autoreset, self._actions)

    def close(self) -> None:
        self._finalizer()

    def save(self) -> Saved | None:
        return None  # the state lives in other processes

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
        raise EnvError("async environments cannot be restored; `save` returned None")

    def _reset_message(self, post: Post) -> bytes:
        return RESET + np.array(self._seeds[post.first : post.last], dtype=np.int64).tobytes()

    def _exchange(self, message: Callable[[Post], bytes]) -> list[tuple[int, int]]:
        """Send to all workers, receive from all; return the ranges that had to be replaced."""
        if not self._workers:
            raise ClosedEnvError("the worker processes are closed: make the environments again")
        if self._busy:
            raise ClosedEnvError("a step was interrupted and its answers are lost: make new ones")
        self._busy = True
        waiting = {worker.pipe: worker for worker in self._workers}
        faults: dict[int, EnvError] = {}
        for worker in self._workers:
            try:
                worker.pipe.send_bytes(message(worker.post))
            except OSError:
                faults[worker.post.number] = self._death(waiting.pop(worker.pipe))
        deadline = time.monotonic() + self._timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                worker = waiting.pop(pipe)  # type: ignore[call-overload]
                fault = self._receive(worker)
                if fault is not None:
                    faults[worker.post.number] = fault
            if not ready:
                for worker in waiting.values():
                    faults[worker.post.number] = self._hang(worker)
                waiting.clear()
        replaced = [self._replace(number, fault) for number, fault in faults.items()]
        self._busy = False
        return replaced

    def _receive(self, worker: Worker) -> EnvError | None:
        try:
            reply = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            return self._death(worker)
        return None if reply == DONE else _parse_fault(reply)

    def _death(self, worker: Worker) -> WorkerDiedError:
        worker.process.join(5.0)
        code = worker.process.exitcode
        cause = f"exited with code {code}"
        if code is not None and code < 0:
            cause = f"was killed by {signal.Signals(-code).name}"
        index = self._at_work(worker)
        message = f"lost its worker: process {worker.process.pid} {cause}"
        return WorkerDiedError(message, index, self._seeds[index], self._steps)

    def _hang(self, worker: Worker) -> EnvHungError:
        worker.process.kill()
        worker.process.join()
        index = self._at_work(worker)
        message = f"gave no answer for {self._timeout:g} s; its worker was killed"
        return EnvHungError(message, index, self._seeds[index], self._steps)

    def _at_work(self, worker: Worker) -> int:
        return int(
            np.clip(self._progress[worker.post.number], worker.post.first, self.num_envs - 1)
        )

    def _replace(self, number: int, fault: EnvError) -> tuple[int, int]:
        restartable = (
            isinstance(fault, EnvHungError | WorkerDiedError) and self.restarts < self._allowed
        )
        if not restartable:
            self.close()
            raise fault
        self.restarts += 1
        old = self._workers[number]
        old.pipe.close()
        first, last = old.post.first, old.post.last
        self._seeds[first:last] = env_seeds([self._seed, self.restarts], self.num_envs)[first:last]
        worker = self._workers[number] = self._start(old.post)
        self._await_start(worker)
        next_fault = self._reset_one(worker)
        return (first, last) if next_fault is None else self._replace(number, next_fault)

    def _reset_one(self, worker: Worker) -> EnvError | None:
        try:
            worker.pipe.send_bytes(self._reset_message(worker.post))
        except OSError:
            return self._death(worker)
        return self._receive(worker) if worker.pipe.poll(self._timeout) else self._hang(worker)

    def _start(self, post: Post) -> Worker:
        parent_pipe, child_pipe = self._context.Pipe()
        main_thread = threading.current_thread() is threading.main_thread()
        process = ScriptlessProcess(
            target=serve,
            args=(child_pipe, self._payload, self._memory, post, main_thread),
            name=f"{PREFIX}{post.first}-{post.last - 1}",
            daemon=True,
        )
        with _signals_blocked():
            process.start()
        child_pipe.close()
        self._progress[post.number] = post.first
        return Worker(process, parent_pipe, post)

    def _await_start(self, worker: Worker) -> None:
        if worker.pipe.poll(max(START_TIMEOUT, self._timeout)):
            fault = self._receive(worker)
        else:
            fault = self._hang(worker)
        if fault is None:
            return
        self.close()
        if isinstance(fault, WorkerDiedError):
            raise WorkerDiedError(
                f"could not be made: process {worker.process.pid} ended with code "
                f"{worker.process.exitcode}",
                *(fault.index, fault.seed, fault.step),
            )
        raise fault


def make_async(request: Request) -> AsyncEnvs:
    """Make environments that worker processes step."""
    return AsyncEnvs(
        factory_for(request),
        request.num_envs,
        autoreset=request.autoreset,
        workers=request.thread_count,
        timeout=request.timeout,
        restarts=request.restart_workers,
    )


def _parse_fault(reply: bytes) -> EnvError:
    fault = json.loads(reply[1:])
    return BadStepError(*fault) if len(fault) == 1 else EnvRaisedError(*fault)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Start a process that a signal cannot end before it says what signals are to do."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # whose own start unblocks these signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTAL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop(workers: list[Worker], timeout: float) -> None:
    """Ask all workers to close, wait a moment, then kill them; warn of what went wrong."""
    limit = min(timeout, CLOSE_TIMEOUT)
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.pipe.send_bytes(CLOSE + str(limit).encode())
    started = time.monotonic()
    for worker in workers:
        for problem in _await_close(worker, started, limit):
            warnings.warn(problem, EnvWarning, stacklevel=3)
        worker.process.join(max(0.1, started + PATIENCE - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.pipe.close()
    workers.clear()


def _await_close(worker: Worker, started: float, limit: float) -> list[str]:
    """Wait until a worker has closed its environments; return what went wrong.

    One that is in the middle of a step, and does not even read the message, gets no more than
    `PATIENCE` seconds.
    """
    deadline, closing = started + PATIENCE, False
    try:
        while worker.pipe.poll(max(0.0, deadline - time.monotonic())):
            reply = worker.pipe.recv_bytes()
            if reply == CLOSE:
                deadline, closing = started + limit + PATIENCE, True
            elif closing:
                problems: list[str] = json.loads(reply)
                return problems
    except (EOFError, OSError):
        return []  # it had ended before
    if not closing:
        return []
    first, last = worker.post.first, worker.post.last - 1
    subject = f"environment {first}" if first == last else f"environments {first} to {last}"
    return [f"{subject} did not close within {limit:g} s; the worker was killed"]
