"""Rewards: any Python functions of an example and a completion, weighed, guarded and counted.

A function that raises, hangs, or gives something other than a finite number spoils one sample and
not the run: the sample is marked as not valid, and the failure is counted by its kind. When too
large a share of a batch is spoilt, a `RewardError` says so with the first failure in it.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keel.apps.language.registries import REWARDS
from keel.apps.language.tasks.protocol import Example
from keel.errors import InputError, KeelError, check_choice
from keel.registry import as_function, import_function

RewardFunction = Callable[[Example, str], float]
Floats = NDArray[np.float64]

RAISED, TIMED_OUT, DIED = "raised", "timed out", "died"
NOT_FINITE, NOT_A_NUMBER = "not finite", "not a number"
OVERLONG = "overlong"
START_TIMEOUT = 60.0
"""Seconds for a worker to start."""
GRACE = 5.0
"""Seconds after a deadline when a worker ends itself, should its parent be gone."""


class RewardError(KeelError):
    """Too large a share of the rewards of a batch failed."""


class Scores(NamedTuple):
    """Rewards of a batch of B completions."""

    score: Floats
    """`[B]`: weighted sum of all parts; nan where not valid"""
    valid: NDArray[np.bool_]
    """`[B]`: every function gave a finite number"""
    parts: dict[str, Floats]
    """`[B]` each, by the name of the function, not weighted; nan where it failed"""
    failures: dict[str, int]
    """by kind: `raised`, `timed out`, `died`, `not finite`, `not a number`"""

    def means(self) -> dict[str, float]:
        """Return the mean of each part over the valid samples; nan if there are none."""
        some = self.valid.any()
        return {
            name: float(part[self.valid].mean()) if some else math.nan
            for name, part in self.parts.items()
        }


@dataclass(frozen=True)
class Overlong:
    """A penalty on long completions, as in DAPO (arXiv 2503.14476): 0 up to `soft` tokens, −1 from
    `hard` on, linear in between; times `weight`."""

    soft: int
    hard: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.soft < self.hard:
            raise InputError(f"overlong: expected 0 <= soft < hard, got {self.soft}, {self.hard}")
        if not (math.isfinite(self.weight) and self.weight >= 0.0):
            raise InputError(f"overlong.weight: expected at least 0, got {self.weight}")

    def penalty(self, lengths: Sequence[int]) -> Floats:
        """Return the penalty `[B]`, from −1 to 0, before `weight`."""
        past = (np.asarray(lengths, np.float64) - self.soft) / (self.hard - self.soft)
        return -np.clip(past, 0.0, 1.0)


class Rewards:
    """Reward functions by name, each a callable `(example, completion) -> float`.

    Without a `timeout` they run in this process: nothing is paid, and a function that hangs hangs
    the training. That is for trusted verifiers.

    With a `timeout` (seconds for one call of one function) they run in a process that is forked for
    every batch, so that functions may be closures and data may be anything; only numbers and texts
    of errors come back. At the deadline the process is killed together with those it has started,
    which ends loops, sleeps and waits in Python and in C alike. What this cannot do: stop a process
    that the kernel itself holds up (a dead network drive); reach processes that have left their
    group, or work elsewhere that a call has begun; keep what a function remembers from one batch to
    the next. Threads and what they hold do not come along: torch is given one thread there, and a
    function that waits for another of the parent's is counted as timed out.

    Examples:
        >>> rewards = Rewards({"right": lambda example, text: text == example.answer})
        >>> rewards([Example("2+2=", "4", {})], ["4"]).score
        array([1.])
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        weights: Mapping[str, float] | None = None,
        *,
        timeout: float | None = None,
        max_failures: float = 0.2,
        overlong: Overlong | None = None,
    ) -> None:
        """`weights` default to 1; a function of weight 0 is measured only. More than the share
        `max_failures` of a batch that is not valid is an error."""
        if not functions:
            raise InputError("rewards: expected at least one function")
        if overlong is not None and OVERLONG in functions:
            raise InputError(f"rewards: the name {OVERLONG!r} is that of the length penalty")
        if timeout is not None and not (math.isfinite(timeout) and timeout > 0.0):
            raise InputError(f"timeout: expected seconds above 0, or None, got {timeout}")
        if timeout is not None and "fork" not in multiprocessing.get_all_start_methods():
            raise InputError("timeout: this system cannot fork processes; use timeout=None")
        if not 0.0 <= max_failures <= 1.0:
            raise InputError(f"max_failures: expected a share from 0 to 1, got {max_failures}")
        self.functions = dict(functions)
        self.weights = _weights(self.functions, weights)
        self.timeout, self.max_failures, self.overlong = timeout, max_failures, overlong

    def __call__(
        self,
        examples: Sequence[Example],
        completions: Sequence[str],
        lengths: Sequence[int] | None = None,
    ) -> Scores:
        """Score `B` completions, one for each of `examples`; `lengths` in tokens are needed for
        `overlong` only."""
        size = len(completions)
        if len(examples) != size:
            raise InputError(f"rewards: {len(examples)} examples, but {size} completions")
        calls = [
            Call(row, name, function, examples[row], completions[row])
            for row in range(size)
            for name, function in self.functions.items()
        ]
        parts = {name: np.full(size, math.nan) for name in self.functions}
        tally = Tally(size, self.max_failures)
        with contextlib.closing(self._outcomes(calls)) as outcomes:
            for call, outcome in zip(calls, outcomes, strict=True):
                parts[call.name][call.row] = outcome.value
                tally.add(call, outcome)
        score = sum((self.weights[name] * part for name, part in parts.items()), np.zeros(size))
        if self.overlong is not None:
            parts[OVERLONG] = self._penalty(lengths, size)
            score = score + self.overlong.weight * parts[OVERLONG]
        valid = np.isfinite(score)
        return Scores(np.where(valid, score, math.nan), valid, parts, dict(tally.failures))

    def _penalty(self, lengths: Sequence[int] | None, size: int) -> Floats:
        assert self.overlong is not None
        if lengths is None or len(lengths) != size:
            had = "none" if lengths is None else str(len(lengths))
            raise InputError(f"rewards: overlong needs {size} lengths in tokens, got {had}")
        return self.overlong.penalty(lengths)

    def _outcomes(self, calls: Sequence[Call]) -> Generator[Outcome, None, None]:
        if self.timeout is None:
            return (outcome_of(call) for call in calls)
        return outcomes_by_deadline(calls, self.timeout)


def _weights(
    functions: Mapping[str, RewardFunction], weights: Mapping[str, float] | None
) -> dict[str, float]:
    """Return one weight for each function."""
    if weights is None:
        return dict.fromkeys(functions, 1.0)
    for name, weight in weights.items():
        check_choice("weight of reward", name, functions)
        if not math.isfinite(weight):
            raise InputError(f"weight of reward {name!r}: expected a finite number, got {weight}")
    missing = [name for name in functions if name not in weights]
    if missing:
        raise InputError(f"weights: none for reward {missing[0]!r}")
    return {name: float(weights[name]) for name in functions}


class Call(NamedTuple):
    """A call of one function on one sample."""

    row: int
    name: str
    function: RewardFunction
    example: Example
    completion: str


class Outcome(NamedTuple):
    """The outcome of a call: a finite number, or a kind of failure with details."""

    value: float
    failure: str = ""
    detail: str = ""


class Tally:
    """Failures of a batch of `size` samples; raises as soon as there are too many."""

    def __init__(self, size: int, max_failures: float) -> None:
        self.failures: Counter[str] = Counter()
        self._size, self._max_failures = size, max_failures
        self._rows: set[int] = set()
        self._first = ""

    def add(self, call: Call, outcome: Outcome) -> None:
        """Count one outcome."""
        if not outcome.failure:
            return
        self.failures[outcome.failure] += 1
        self._rows.add(call.row)
        self._first = self._first or f"{call.name!r} on completion {call.row}: {outcome.detail}"
        if len(self._rows) / self._size > self._max_failures:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.failures.items())
            raise RewardError(
                f"rewards: failed on {len(self._rows)} of the first {call.row + 1} of {self._size} "
                f"completions ({kinds}), more than max_failures = {self._max_failures:g} of the "
                f"batch; the first was {self._first}; mend the function, or raise max_failures"
            )


def outcome_of(call: Call) -> Outcome:
    """Call a function here and now, and judge what it gives."""
    try:
        value = call.function(call.example, call.completion)
    except (Exception, SystemExit) as error:
        return Outcome(math.nan, RAISED, describe(error))
    return outcome_from(value)


def outcome_from(result: Any) -> Outcome:
    """Return a finite number of any type as an outcome, or a failure; a number as text is none."""
    try:
        value = None if isinstance(result, str | bytes) else float(result)
    except OverflowError:
        value = math.inf
    except Exception:  # arrays and tensors of several numbers have errors of their own
        value = None
    if value is None:
        return Outcome(math.nan, NOT_A_NUMBER, f"it gave {type(result).__name__}, not a number")
    if not math.isfinite(value):
        return Outcome(math.nan, NOT_FINITE, f"it gave {value}")
    return Outcome(value)


def describe(error: BaseException) -> str:
    """Return kind and message of an error on one short line."""
    return " ".join(traceback.format_exception_only(error)[-1].split())[:200]


def outcomes_by_deadline(calls: Sequence[Call], timeout: float) -> Generator[Outcome, None, None]:
    """Yield outcomes of all calls in order, each within `timeout` seconds.

    After a hang or a death a new worker goes on with the next call.
    """
    done = 0
    while done < len(calls):
        with contextlib.closing(Worker(calls[done:], timeout)) as worker:
            for _ in calls[done:]:
                outcome = worker.next_outcome()
                done += 1
                yield outcome
                if outcome.failure in (TIMED_OUT, DIED):
                    break


class Worker:
    """A process forked here and now, so that it has functions and data already."""

    def __init__(self, calls: Sequence[Call], timeout: float) -> None:
        context = multiprocessing.get_context("fork")
        self._timeout, self._ended = timeout, False
        self._pipe, child_end = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_serve, args=(child_end, calls, timeout), daemon=True
        )
        self._process.start()
        child_end.close()
        answered = self._pipe.poll(START_TIMEOUT)
        if not answered or self._receive() is None:
            self.close()
            how = f"ended with code {self._process.exitcode}"
            raise RewardError(
                "rewards: the process to run them in "
                + (how if answered else f"was not there after {START_TIMEOUT:g} s")
            )

    def next_outcome(self) -> Outcome:
        """Wait for the next outcome until the deadline. After a hang or a death there is none."""
        if not self._pipe.poll(self._timeout):
            self.close()
            detail = f"it gave no answer for {self._timeout:g} s and was killed"
            return Outcome(math.nan, TIMED_OUT, detail)
        message = self._receive()
        if message is None:
            self.close()
            detail = f"its process ended with code {self._process.exitcode}"
            return Outcome(math.nan, DIED, detail)
        return Outcome(*json.loads(message))

    def close(self) -> None:
        """End the process and all of its group."""
        if self._ended:
            return
        self._ended = True
        group = self._process.pid
        assert group is not None
        self._process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
            os.killpg(group, signal.SIGKILL)
        self._process.join()
        self._pipe.close()

    def _receive(self) -> bytes | None:
        try:
            return self._pipe.recv_bytes()
        except (EOFError, OSError):
            return None


def _serve(pipe: Connection, calls: Sequence[Call], timeout: float) -> None:
    """Run the calls in a worker: first a message that it has started, then outcome by outcome."""
    os.setpgid(0, 0)  # Ctrl-C is the parent's business, and the whole group can be killed
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # threads do not survive fork: it would hang
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        pipe.send_bytes(b"here")
        for call in calls:
            signal.setitimer(signal.ITIMER_REAL, timeout + GRACE)
            pipe.send_bytes(json.dumps(outcome_of(call)).encode())


def load_function(name: str) -> Callable[[Any, str], Any]:
    """Return the reward function or the tool of a name or `module:function`; check its arguments.

    It must take two; modules of the working directory count.
    """
    takes = ["an example (a tool: its data)", "a text"]
    if name in REWARDS.names():
        return as_function(REWARDS.get(name), name, takes)
    if not re.fullmatch(r"[\w.]+:\w+", name):
        raise InputError(f"{name}: expected module:function, such as my_rewards:right")
    return import_function(name, takes=takes)
