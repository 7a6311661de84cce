"""Try the mutants of one module in forked children of a process that has imported everything.

A mutant inside of a function is tried in a child of a process that has collected the tests: the
child gives the functions of the module their changed code, and runs the tests that call the changed
function, those first that noticed most mutants before. Every other mutant is tried by a child that
imports the changed file: of what stands outside of functions, and of functions that are called when
files are imported. Standard input has a job a line, one for every module; standard output an answer
a line: a list of outcomes, each with the test that noticed and the seconds it took.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import math
import os
import resource
import signal
import sys
import time
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
from functions import Tracer, function_spans, functions_of, give_code, span_of

LIBRARIES = (
    "torch", "torch.func", "numpy", "numba", "gymnasium", "gymnasium.vector", "hypothesis",
    "hypothesis.extra.numpy", "yaml",
)  # fmt: skip
"""What tests import besides Keel."""
KILLED, SURVIVED, TIMEOUT, UNSURE = "killed", "survived", "timeout", "unsure"
STATUS_UNSURE = 3
"""Exit status of a child that could not use a mutant's code."""
AT_IMPORT = ""
"""In place of a test's name: what is called when files are imported."""
PATIENCE = 10
"""Seconds of waiting for one of processor time: more is a mutant that waits for something."""
POLL = 0.005
SPARE_BYTES = 4 << 30
"""Memory that a mutant may take beyond what the process has already."""

Mutant = dict[str, Any]
Answer = dict[str, Any]


class Baseline:
    """How long each test takes without a mutant, and which functions of the module it calls."""

    def __init__(self, seconds: dict[str, float], called: dict[str, list[int]]) -> None:
        self.seconds = seconds
        self.called = {test: set(lines) for test, lines in called.items()}

    def tests_of(self, lines: range | None, slowest: float) -> list[str]:
        """Return the tests that call a function of these lines (all, where there is none)."""
        return [
            test
            for test, seconds in self.seconds.items()
            if seconds <= slowest
            and (lines is None or any(line in lines for line in self.called[test]))
        ]

    def limit(self, tests: Iterable[str]) -> int:
        """Return the seconds of processor time after which these tests must have ended."""
        return math.ceil(4.0 + 3.0 * sum(self.seconds[test] for test in tests))


class Session:
    """The pytest plugin of a process that collects tests, and runs them in forked children."""

    def __init__(self, job: dict[str, Any], answers: TextIO) -> None:
        self.job = job
        self.answers = answers
        self.failed: str | None = None
        self.kills: Counter[str] = Counter()
        self.traced = ""
        self.calls: dict[str, set[int]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        with Tracer(self.job["path"], self.calls[AT_IMPORT]):
            return (yield)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        assert not session.testsfailed, "the tests cannot be collected without a mutant"
        self.items = {item.nodeid: item for item in session.items}
        path = Path(self.job["path"])
        functions = functions_of(path)
        gc.freeze()
        baseline = self.measure(path)
        print(json.dumps(baseline.seconds), file=self.answers, flush=True)
        spans = function_spans(path.read_text(encoding="utf-8"))
        for index, mutant in enumerate(self.job["mutants"]):
            lines = span_of(spans, mutant["line"])
            if lines is not None and not any(x in lines for x in self.calls[AT_IMPORT]):
                self.try_mutant(index, mutant, functions, baseline, lines)
        return True

    def measure(self, path: Path) -> Baseline:
        """Run every test once in a child."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            in_child(lambda: self.measured(path, os.fdopen(write, "w")))
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        measured = json.loads(text or "{}")
        assert "failed" in measured, "the process that ran the tests without a mutant has ended"
        import_all(measured["imported"])
        if measured["failed"]:
            sys.exit(f"a test fails without any mutant: {measured['failed']}")
        return Baseline(measured["seconds"], measured["called"])

    def measured(self, path: Path, pipe: TextIO) -> None:
        """In a child: run every test, and tell how long each took and what it called."""
        signal.signal(signal.SIGPROF, signal.default_int_handler)
        self.traced = str(path)
        before = set(sys.modules)
        seconds = {}
        items = list(self.items.values())
        for item, following in zip(items, [*items[1:], None], strict=True):
            seconds[item.nodeid] = self.timed(item, following)
        called = {test: [*self.calls[test] | self.calls[file_of(test)]] for test in seconds}
        imported = [name for name in sys.modules if name not in before]
        measured = {"seconds": seconds, "called": called, "failed": self.failed}
        json.dump({**measured, "imported": imported}, pipe)
        pipe.flush()

    def timed(self, item: pytest.Item, following: pytest.Item | None) -> float:
        """Run a test for its processor time; infinite, and given up, where it takes too long."""
        began, before = time.process_time(), self.failed
        try:
            signal.setitimer(signal.ITIMER_PROF, self.job["slowest"])
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        except KeyboardInterrupt:
            item.session._setupstate.teardown_exact(None)
        finally:
            late = signal.setitimer(signal.ITIMER_PROF, 0)[0] == 0.0
        if late:  # whatever the test made of the interrupt
            self.failed = before
        return math.inf if late else time.process_time() - began

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """What a fixture calls counts for all tests of its file: they may share what it made."""
        with Tracer(self.traced, self.calls[file_of(item.nodeid)]):
            yield

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with Tracer(self.traced, self.calls[item.nodeid]):
            yield

    def try_mutant(
        self,
        index: int,
        mutant: Mutant,
        functions: list[types.FunctionType],
        baseline: Baseline,
        lines: range,
    ) -> None:
        """Try a mutant of a function's body, and tell what came of it."""
        tests = baseline.tests_of(lines, self.job["slowest"])
        limit = baseline.limit(tests)
        tests.sort(key=lambda test: (-self.kills[test], round(baseline.seconds[test], 1)))
        began = time.perf_counter()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            limits = {test: 2.0 + 3.0 * baseline.seconds[test] for test in tests}
            in_child(lambda: self.run(mutant, functions, limits, write), limit)
        os.close(write)
        outcome = outcome_of(wait(child, limit))
        with os.fdopen(read) as pipe:
            test = pipe.read()
        self.kills[test] += outcome == KILLED
        self.answer(index, outcome, test, time.perf_counter() - began)

    def run(
        self,
        mutant: Mutant,
        functions: list[types.FunctionType],
        limits: dict[str, float],
        write: int,
    ) -> int:
        """In a child: give the functions their changed code, and run tests until one fails.

        Beyond its limit of processor time a test is ended by SIGPROF, and the child with it.
        """
        Path(self.job["path"]).write_text(mutant["source"], encoding="utf-8")  # for its children
        try:
            give_code(functions, mutant["source"], self.job["path"])
        except (KeyError, ValueError):  # another closure, say: the changed file must be imported
            return STATUS_UNSURE
        items = [self.items[test] for test in limits]  # none where no test calls the function
        for item, following in itertools.zip_longest(items, items[1:]):
            signal.setitimer(signal.ITIMER_PROF, limits[item.nodeid])
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed is not None:
                os.write(write, self.failed.encode())
                return 1
        return 0

    def answer(self, index: int, outcome: str, test: str, took: float) -> None:
        fields = {"index": index, "outcome": outcome, "test": test, "took": round(took, 2)}
        print(json.dumps(fields), file=self.answers, flush=True)


class Chosen:
    """The pytest plugin of a process that imports a mutant: some tests, in some order."""

    def __init__(self, tests: list[str], write: int) -> None:
        self.order = {test: rank for rank, test in enumerate(tests)}
        self.write = write

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.order),
            key=lambda item: self.order[item.nodeid],
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self.write, report.nodeid.encode())


def file_of(test: str) -> str:
    return test.partition("::")[0]


def in_child(work: Callable[[], int | None], limit: int | None = None) -> None:
    """Do something in a process group of its own, without output; never return.

    The limit is of processor time, as other programs may take most of a machine.
    """
    status = 2
    try:
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3 if "KEEL_MUTANTS_OUTPUT" not in os.environ else 1):
            os.dup2(nothing, standard)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
        status = work() or 0
    finally:
        os._exit(status)


def wait(child: int, limit: int) -> int:
    """Return the child's exit status, or minus the signal that ended it.

    Polls are counted, not the clock's seconds: other programs may halt both of us for minutes.
    """
    for poll in itertools.count():
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if poll == int(PATIENCE * limit / POLL):
            os.killpg(child, signal.SIGKILL)
        time.sleep(POLL)
    raise AssertionError


def outcome_of(status: int) -> str:
    """Return what an exit status says of a mutant; only our own limits of time send signals."""
    if -status in (signal.SIGKILL, signal.SIGXCPU, signal.SIGPROF):
        return TIMEOUT
    return {0: SURVIVED, STATUS_UNSURE: UNSURE}.get(status, KILLED)


def options(job: dict[str, Any]) -> list[str]:
    """Return the arguments of pytest."""
    words = ["-s", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb", "native"]
    overflow = "ignore:overflow encountered:RuntimeWarning"  # of whole numbers, without numba
    words += ["--disable-warnings", "--basetemp", job["scratch"]]
    return [*words, "-k", "not inductor and not compile", "-W", overflow, *job["tests"]]


def import_mutant(job: dict[str, Any], mutant: Mutant, tests: list[str], limit: int) -> Answer:
    """Try a mutant by tests that import the changed file."""
    path = Path(job["path"])
    original = path.read_text(encoding="utf-8")
    path.write_text(mutant["source"], encoding="utf-8")
    began = time.perf_counter()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        arguments = ["-x", *options(job)]
        in_child(lambda: pytest.main(arguments, plugins=[Chosen(tests, write)]), limit)
    os.close(write)
    outcome = outcome_of(wait(child, limit))
    path.write_text(original, encoding="utf-8")
    with os.fdopen(read) as pipe:
        test = pipe.read()
    return {"outcome": outcome, "test": test, "took": time.perf_counter() - began}


def collected(job: dict[str, Any]) -> tuple[Baseline, dict[int, Answer]]:
    """Collect tests in a child, which tries the mutants of functions in children of its own."""
    original = Path(job["path"]).read_text(encoding="utf-8")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        answers = os.fdopen(write, "w")
        os.dup2(2, 1)  # what pytest prints is not an answer
        status = pytest.main(options(job), plugins=[Session(job, answers)])
        answers.close()
        os._exit(int(status))
    os.close(write)
    with os.fdopen(read) as pipe:
        lines = [json.loads(line) for line in pipe]
    os.waitpid(child, 0)
    Path(job["path"]).write_text(original, encoding="utf-8")
    if not lines:
        sys.exit("the tests cannot be run without a mutant; see above")
    return Baseline(lines[0], {}), {line["index"]: line for line in lines[1:]}


def import_all(names: Iterable[str]) -> None:
    """Import libraries here, so that no child has to; Keel's own modules are the mutants'."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            if name.partition(".")[0] not in ("keel", "tests", "test", "conftest"):
                with contextlib.suppress(Exception):
                    importlib.import_module(name)


def prepare() -> None:
    """Import what every child needs, and let hypothesis draw the same few examples always."""
    import_all(LIBRARIES)
    import torch
    from hypothesis import HealthCheck, Phase, settings

    torch.set_num_threads(1)
    torch.testing.assert_close(torch.zeros(1), torch.zeros(1))  # imports a thousand modules
    settings.register_profile(
        "mutants",
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=12,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def try_all(job: dict[str, Any]) -> list[Answer]:
    """Return the outcome of every mutant of a job."""
    baseline, answers = collected(job)
    everything = baseline.tests_of(None, job["slowest"])
    everything.sort(key=lambda test: round(baseline.seconds[test], 1))
    for index, mutant in enumerate(job["mutants"]):
        answer = answers.get(index)
        if answer is None or answer["outcome"] == UNSURE:
            limit = 20 + baseline.limit(everything)
            answers[index] = import_mutant(job, mutant, everything, limit)
    keys = ("outcome", "test", "took")
    return [{key: answers[i][key] for key in keys} for i in range(len(job["mutants"]))]


def main() -> None:
    sys.dont_write_bytecode = True
    prepare()
    import numba

    for line in sys.stdin:
        job = json.loads(line)
        numba.config.DISABLE_JIT = job["without_jit"]
        os.environ["NUMBA_DISABLE_JIT"] = str(int(job["without_jit"]))
        print(json.dumps(try_all(job)), flush=True)


if __name__ == "__main__":
    main()
