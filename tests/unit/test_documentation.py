"""Docstrings: examples that run, one for every public name; and pages that programs write.

Commands and examples of README and pages are run by `tests/documentation`.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import doctest
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import keel
from benchmarks import ablations, breakout, collapse
from benchmarks.results_page import render
from keel import functional
from keel.cli.legacy_flags import ALIASES, LANGUAGE_ALIASES
from keel.compare.intervals import score_interval

ROOT = Path(__file__).parents[2]
MODULES = [
    module.name
    for module in pkgutil.walk_packages(keel.__path__, "keel.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_some_examples_ran() -> None:
    ran = (doctest.testmod(importlib.import_module(name)).attempted for name in MODULES)
    assert sum(ran) >= 10


REST = re.compile(r"\.\. [a-z]+::|:[a-z]+:`")


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_are_markdown(name: str) -> None:
    """The reference shows reStructuredText as it stands; formulas are indented Unicode."""
    tree = ast.parse(inspect.getsource(importlib.import_module(name)))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    assert [match[0] for text in texts for match in REST.finditer(text)] == []


@pytest.mark.parametrize("name", functional.__all__)
def test_every_public_function_is_documented(name: str) -> None:
    thing = getattr(functional, name)
    text = inspect.getdoc(thing) or ""
    assert len(text) > 20
    assert not text.startswith(f"{name}("), "a NamedTuple's own signature is no documentation"


def test_the_results_page_is_what_the_figures_say() -> None:
    """docs/results.md is written by `benchmarks.results`, never by hand."""
    data = json.loads((ROOT / "docs" / "data" / "results.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == render(data)


def test_the_intervals_of_the_results_are_students() -> None:
    data = json.loads((ROOT / "docs" / "data" / "results.json").read_text(encoding="utf-8"))
    for name, told in data["learning"].items():
        returns = torch.tensor([run["return"] for run in told["runs"]], dtype=torch.float64)
        expected = [float(x) for x in score_interval([returns])]
        assert [told["iqm"], *told["interval"]] == pytest.approx(expected), name


@pytest.mark.parametrize("path", sorted(ablations.DATA.glob("*.json")), ids=lambda x: x.stem)
def test_the_verdicts_of_published_ablations_follow_from_their_scores(path: Path) -> None:
    """`python -m benchmarks.ablations page` would change nothing."""
    told = json.loads(path.read_text(encoding="utf-8"))
    again = copy.deepcopy(told)
    ablations.judge_again(again)
    for then, now in zip(told["pairs"], again["pairs"], strict=True):
        assert (now["verdict"], now["reasons"]) == (then["verdict"], then["reasons"])
    table = path.with_suffix(".md").read_text(encoding="utf-8")
    assert table == ablations.table(path.stem, told) + "\n"


def test_the_remedies_of_a_sick_line_search_are_there() -> None:
    page = (ROOT / "docs" / "guide" / "trpo.md").read_text(encoding="utf-8")
    assert (
        len(re.findall(r"`keel train Breakout --preset breakout-trpo-stabilized [^`]+`", page)) >= 4
    )


def test_the_breakout_page_is_what_was_gathered() -> None:
    """docs/guide/breakout.md is written by `benchmarks.breakout`, never by hand."""
    page = ROOT / "docs" / "guide" / "breakout.md"
    assert page.read_text(encoding="utf-8") == breakout.render(breakout.load())


def test_milestones_after_the_end_of_a_run_are_not_run() -> None:
    """V1 went to 1.0 M, and its note expects a mean of 10 at 3 M: nothing is known about that."""
    rows = [{"step": 12_000, "return": 0.4}, {"step": 1_001_472, "return": 4.8}]
    unknown = "not run past 1.00 M"
    assert breakout.measured("V1 seed-0", rows) == ["12 k", unknown, unknown, unknown]
    assert breakout.measured("V2 seed-0", rows) == ["12 k", "not reached", unknown, unknown]
    longer = [*rows, {"step": 6_000_000, "return": 12.0}]
    unknown = "not run past 6.00 M"
    assert breakout.measured("V1 seed-0", longer) == ["12 k", "6.00 M", unknown, unknown]
    assert breakout.measured("ours seed-0", longer) == ["12 k", "6.00 M", "not reached", unknown]


def test_the_tables_of_the_collapse_are_what_was_recorded() -> None:
    """docs/data/collapse.md is written by `benchmarks.collapse`, never by hand."""
    assert collapse.TABLES.read_text(encoding="utf-8") == collapse.render(collapse.load())


def test_a_rejected_step_is_a_kl_of_zero_only_in_the_column_of_the_original() -> None:
    """Second half of eight updates: rejected, 0.01, rejected, 0.02."""
    run: collapse.Run = {
        "return": [None, 10.0, 40.0, 30.0, 30.0, 30.0, 30.0, 20.0],
        "accepted": [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0],
        "kl": [0.02, None, None, None, None, 0.01, None, 0.02],
        "entropy": [0.6] * 8,
    }
    found = collapse.measure(run)
    assert found.success == 0.5
    assert (found.peak, found.end) == (40.0, 20.0)
    assert found.kl_as_zero == pytest.approx(0.0075)
    assert found.kl == pytest.approx(0.015)
    assert found.longest == 4


def test_the_intervals_of_the_collapse_are_students() -> None:
    """Mean 2, s/√n = 1/√3, t of two degrees of freedom 4.303: 2 ± 2.484."""
    assert collapse.interval([1.0, 2.0, 3.0], ".2f") == "2.00 (-0.48 to 4.48)"


def test_both_arms_of_the_collapse_differ_in_the_fault_alone() -> None:
    for coef in ("0.05", "0.01"):
        two, one = (collapse.config_of(collapse.ARMS[f"{x}-{coef}"], 3) for x in ("two", "one"))
        assert two.faults.entropy_outside_acceptance
        assert dataclasses.replace(two, faults=one.faults) == one


def test_the_names_of_the_notes_are_hidden_flags() -> None:
    """Rows of docs/origins/the-five-notes.md with one name on each side."""
    page = (ROOT / "docs" / "origins" / "the-five-notes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w.]+\.[\w.]+)` \|$", page, re.MULTILINE)
    assert len(rows) >= 20
    for row in rows:
        old, new = (f"--{name.replace('_', '-')}" for name in row)
        assert new in (ALIASES.get(old), LANGUAGE_ALIASES.get(old)), old


def _blocks() -> Iterator[tuple[str, list[str]]]:
    """Yield what the reference shows: a name, and the members that are picked of it."""
    block = re.compile(r"^::: (\S+)$(?:\n    options:\n      members: \[(.+)\]$)?", re.MULTILINE)
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for match in block.finditer(page.read_text(encoding="utf-8")):
            yield match[1], match[2].split(", ") if match[2] else []


@pytest.mark.parametrize(("name", "members"), _blocks())
def test_the_reference_shows_public_names_only(name: str, members: list[str]) -> None:
    """Packages by their `__all__`, modules by what their package exports, and single names."""
    parent, _, last = name.rpartition(".")
    package = importlib.import_module(parent or name)
    if name not in MODULES:
        assert hasattr(package, last)
        assert not last.startswith("_")
        return
    module = importlib.import_module(name)
    if hasattr(module, "__all__") or last in package.__all__:
        return
    own = [x for x, y in vars(module).items() if getattr(y, "__module__", "") == name]
    assert {*members} <= {*own}
    assert {x for x in members or own if not x.startswith("_")} <= {*package.__all__}
