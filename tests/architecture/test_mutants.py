"""`make mutants` knows every module of the mathematics, and tests that are there."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "keel"


@pytest.fixture(scope="module")
def run() -> ModuleType:
    spec = spec_from_file_location("mutants_run", ROOT / "tests" / "mutants" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_module_of_the_mathematics_has_tests_of_its_own(run: ModuleType) -> None:
    patterns = ("functional/*.py", "regions/*.py", "apps/serving/kernels*.py")
    expected = {
        path.relative_to(SOURCE).as_posix()
        for pattern in patterns
        for path in SOURCE.glob(pattern)
        if path.name != "__init__.py"
    }
    assert expected <= set(run.MODULES)
    assert all((SOURCE / module).is_file() for module in run.MODULES)
    named = {test for tests in run.MODULES.values() for test in tests}
    assert not {test for test in named if not (ROOT / test).is_file()}


def test_annotations_are_no_mutants(run: ModuleType, tmp_path: Path) -> None:
    """`float | None` stands from column 9 to 21 of the first line, `int` is what is returned."""
    path = tmp_path / "some.py"
    path.write_text("def f(x: float | None) -> int:\n    y = 1 | 2\n")
    assert set(run.annotations(path)) == {((1, 9), (1, 21)), ((1, 26), (1, 29))}
