"""`make mutants` knows every module of the mathematics, and tests that are there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "keel"
PARTS = ("modules", "generate", "report", "functions", "forked")


@pytest.fixture(scope="module")
def parts() -> Iterator[dict[str, ModuleType]]:
    """The tool's own modules, which no other test finds by these short names."""
    folder = str(ROOT / "tests" / "mutants")
    sys.path.insert(0, folder)
    try:
        yield {name: import_module(name) for name in PARTS}
    finally:
        sys.path.remove(folder)
        for name in PARTS:
            sys.modules.pop(name, None)


def test_every_module_of_the_mathematics_has_tests_of_its_own(parts: dict[str, ModuleType]) -> None:
    patterns = (
        *("functional/*.py", "losses/*.py", "algorithms/*.py", "trust_region/*.py"),
        *("controllers/*.py", "apps/serving/kernels*.py"),
    )
    expected = {
        path.relative_to(SOURCE).as_posix()
        for pattern in patterns
        for path in SOURCE.glob(pattern)
        if path.name != "__init__.py"
    }
    modules = parts["modules"].MODULES
    assert expected <= set(modules)
    assert all((SOURCE / module).is_file() for module in modules)
    named = {test for tests in modules.values() for test in tests}
    assert not {test for test in named if not (ROOT / test).is_file()}


def test_annotations_are_no_mutants(parts: dict[str, ModuleType], tmp_path: Path) -> None:
    """`float | None` stands from column 9 to 21 of the first line, `int` is what is returned."""
    path = tmp_path / "some.py"
    path.write_text("def f(x: float | None) -> int:\n    y = 1 | 2\n")
    assert set(parts["generate"].annotations(path)) == {((1, 9), (1, 21)), ((1, 26), (1, 29))}


def test_a_mutant_reaches_functions_wherever_they_are_held(
    parts: dict[str, ModuleType], tmp_path: Path
) -> None:
    """A function keeps its identity, and what it makes anew is changed too."""
    path = str(tmp_path / "some.py")
    source = "def f(x):\n    return x + 1\n\ndef g(x):\n    return lambda: x * 2\n"
    names: dict[str, FunctionType] = {}
    exec(compile(source, path, "exec"), names)
    held = [names["f"], names["g"]]
    assert (held[0](5), held[1](5)()) == (6, 10)
    parts["functions"].give_code(held, source.replace("+ 1", "- 1").replace("* 2", "* 3"), path)
    assert (held[0](5), held[1](5)()) == (4, 15)


def test_what_runs_at_import_is_no_part_of_a_body(parts: dict[str, ModuleType]) -> None:
    """Defaults and decorators are evaluated once: such a mutant's file has to be imported."""
    source = (
        "LIMIT = 1\n\nclass A:\n    x = 2\n\n    @some\n    def f(self, y=3):\n        return y\n"
    )
    functions = parts["functions"]
    spans = functions.function_spans(source)
    found = [functions.span_of(spans, line) for line in range(1, 9)]
    assert found == [None] * 7 + [range(6, 9)]


def test_a_mutant_of_a_function_that_no_test_calls_survives(
    parts: dict[str, ModuleType], tmp_path: Path
) -> None:
    forked, path = parts["forked"], tmp_path / "some.py"
    session = forked.Session({"path": str(path)}, sys.stdout)
    session.items = {}
    status = session.run({"source": "def f():\n    return 2\n"}, [], {}, -1)
    assert forked.outcome_of(status) == forked.SURVIVED


def sample(tried: int, survived_first: int, survived: int) -> dict[str, object]:
    survivors = [{"before": "", "after": str(n)} for n in range(survived)]
    counts = {"mutants": 100, "tried": tried, "timeouts": 0, "survived_first": survived_first}
    return {**counts, "survivors": survivors}


def test_the_table_has_the_first_samples_and_the_last_ones(parts: dict[str, ModuleType]) -> None:
    """Two modules: of the first samples 10 of 20 and 18 of 20 were killed, of the second one's last
    9 of 10; a module that was sampled once says nothing of the tests of today. All but 1 of the 50
    are killed now."""
    report = {
        "functional/ratio.py": {"0": sample(20, 10, 1)},
        "functional/reduce.py": {"0": sample(20, 2, 0), "2": sample(10, 1, 0)},
    }
    rows = {line.split("|")[1].strip(): line for line in parts["report"].table(report).splitlines()}
    cells = [x.strip() for x in rows["**functional**"].split("|")[2:-1]]
    assert cells[:5] == ["200", "50", "13", "1", "0"]
    assert [x.split(" ")[0] for x in cells[5:]] == ["70.0%", "90.0%", "98.0%"]
    assert rows["`functional/ratio.py`"].split("|")[8].strip() == "–"


def test_the_interval_of_a_share(parts: dict[str, ModuleType]) -> None:
    """Wilson's, of 9 in 10: the roots of (p - 0.9)² = 1.96²·p(1 - p)/10."""
    low, high = parts["report"].wilson(9, 10)
    square = 1.959963984540054**2
    for p in (low, high):
        assert (p - 0.9) ** 2 == pytest.approx(square * p * (1 - p) / 10)
    assert low < 0.9 < high


def test_an_equivalent_mutant_has_a_reason(parts: dict[str, ModuleType]) -> None:
    """And its line stands in the module still, or the entry has no use any more."""
    report = parts["report"]
    for module, changes in report.equivalents().items():
        text = {line.strip() for line in (SOURCE / module).read_text().splitlines()}
        for (before, after), reason in changes.items():
            assert set(before.splitlines()) <= text, f"{module}: {before}"
            assert before != after
            assert len(reason.split()) >= 3, f"{module}: {before}"
