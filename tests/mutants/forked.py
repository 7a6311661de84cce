"""Try the mutants of one module in forked children of a process that has imported everything.

A mutant inside of a function is tried in a child of a process that has collected the tests: the
child gives the functions of the module their changed code, and runs the tests that call the changed
function, those first that noticed most mutants before. Every other mutant, and every one that seems
to survive, is tried by a child that imports the changed file. Standard input has a job a line, one
for every module; standard output an answer a line: a list of outcomes, each with the test that
noticed and the seconds it took.
"""

from __future__ import annotations

import ast
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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

LIBRARIES = (
    "torch", "torch.func", "numpy", "numba", "gymnasium", "gymnasium.vector", "hypothesis",
    "hypothesis.extra.numpy", "yaml",
)  # fmt: skip
"""What tests import besides Keel."""
KILLED, SURVIVED, TIMEOUT = "killed", "survived", "timeout"
UNSURE = 3
"""Exit status of a child that could not use a mutant's code."""
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

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        assert not session.testsfailed, "the tests cannot be collected without a mutant"
        self.items = {item.nodeid: item for item in session.items}
        path = Path(self.job["path"])
        functions = functions_of(path)
        gc.freeze()
        baseline = self.measure(path)
        self.answer(seconds=baseline.seconds, called={t: [*c] for t, c in baseline.called.items()})
        spans = function_spans(path.read_text(encoding="utf-8"))
        for index, mutant in enumerate(self.job["mutants"]):
            lines = span_of(spans, mutant["line"])
            if lines is not None:
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
        self.traced = str(path)
        before = set(sys.modules)
        seconds = {}
        items = list(self.items.values())
        for item, following in zip(items, [*items[1:], None], strict=True):
            began = time.process_time()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            seconds[item.nodeid] = time.process_time() - began
        called = {test: [*self.calls[test] | self.calls[file_of(test)]] for test in seconds}
        imported = [name for name in sys.modules if name not in before]
        measured = {"seconds": seconds, "called": called, "failed": self.failed}
        json.dump({**measured, "imported": imported}, pipe)
        pipe.flush()

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
            in_child(lambda: self.run(mutant, functions, tests, write), limit)
        os.close(write)
        outcome = outcome_of(wait(child, limit))
        with os.fdopen(read) as pipe:
            test = pipe.read()
        self.kills[test] += outcome == KILLED
        self.answer(index, outcome, test, time.perf_counter() - began, tests)

    def run(
        self, mutant: Mutant, functions: list[types.FunctionType], tests: list[str], write: int
    ) -> int:
        """In a child: give the functions their changed code, and run tests until one fails."""
        Path(self.job["path"]).write_text(mutant["source"], encoding="utf-8")  # for its children
        try:
            give_code(functions, mutant["source"], self.job["path"])
        except (KeyError, ValueError):  # another closure, say: the changed file must be imported
            return UNSURE
        items = [self.items[test] for test in tests]
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed is not None:
                os.write(write, self.failed.encode())
                return 1
        return 0

    def answer(self, index: int | None = None, outcome: str = "", test: str = "",
               took: float = 0.0, tests: Iterable[str] = (), **more: Any) -> None:  # fmt: skip
        fields = {"index": index, "outcome": outcome, "test": test, "took": took}
        print(json.dumps({**fields, "tests": list(tests), **more}), file=self.answers, flush=True)


class Tracer:
    """Notes the first lines of the functions of a file that are called."""

    def __init__(self, path: str, calls: set[int]) -> None:
        self.path = path
        self.calls = calls

    def __call__(self, frame: types.FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code.co_filename == self.path:
            self.calls.add(code.co_firstlineno)

    def __enter__(self) -> None:
        if self.path:
            sys.settrace(self)

    def __exit__(self, *_: object) -> None:
        if self.path:
            sys.settrace(None)


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


def function_spans(source: str) -> list[tuple[range, range]]:
    """Return of every outermost function its lines with decorators, and those of its body."""
    spans = []
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
                end = (node.end_lineno or 0) + 1
                spans.append((range(first, end), range(node.body[0].lineno, end)))
            else:
                waiting.append(node)
    return spans


def span_of(spans: list[tuple[range, range]], line: int) -> range | None:
    """Return the lines of the function whose body has a line; `None` for what runs at import."""
    return next((lines for lines, body in spans if line in body), None)


def functions_of(path: Path) -> list[types.FunctionType]:
    """Return all functions that were made from a file, wherever they are referred to."""
    found = [x for x in gc.get_objects() if type(x) is types.FunctionType]
    return [x for x in found if x.__code__.co_filename == str(path)]


def give_code(functions: list[types.FunctionType], source: str, path: str) -> None:
    """Let functions that exist already run the code of a changed source."""
    codes = {
        (code.co_name, code.co_firstlineno): code
        for code in codes_of(compile(source, path, "exec"))
    }
    for function in functions:
        code = function.__code__
        function.__code__ = codes[code.co_name, code.co_firstlineno]


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and all that are inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


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
    timeouts = (-signal.SIGKILL, -signal.SIGXCPU)
    return {0: SURVIVED, UNSURE: SURVIVED, **dict.fromkeys(timeouts, TIMEOUT)}.get(status, KILLED)


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
    baseline = Baseline(lines[0]["seconds"], lines[0]["called"])
    return baseline, {line["index"]: line for line in lines[1:]}


def import_all(names: Iterable[str]) -> None:
    """Import libraries here, so that no child has to; Keel's own modules are the mutants'."""
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
        if answer is None or (answer["outcome"] == SURVIVED and answer["tests"]):
            tests = everything if answer is None else answer["tests"]
            answers[index] = import_mutant(job, mutant, tests, 20 + baseline.limit(tests))
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
