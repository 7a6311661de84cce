"""What is written runs: docstrings' examples, the README, and a docstring on every public name."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import pkgutil
import re
from pathlib import Path

import pytest

import keel
from benchmarks import breakout
from benchmarks.results_page import render
from keel import functional
from keel.cli.arguments import translate
from keel.cli.train import parse
from keel.config import check

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


def test_the_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert "tensor(" in capsys.readouterr().out


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


GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
COMMANDS = [
    command
    for page in GUIDES
    for command in re.findall(r"`(keel train [A-Z][^`]+)`", page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("command", COMMANDS)
def test_training_commands_in_the_guides_are_understood(command: str) -> None:
    """Every flag exists, and together they are possible."""
    options = parse(translate(command.split()[2:]))
    check(options.config)


def test_the_remedies_of_note_002_are_there() -> None:
    remedies = [command for command in COMMANDS if "Breakout" in command]
    assert len(remedies) >= 4


def test_the_breakout_page_is_what_was_gathered() -> None:
    """docs/guide/breakout.md is written by `benchmarks.breakout`, never by hand."""
    page = ROOT / "docs" / "guide" / "breakout.md"
    assert page.read_text(encoding="utf-8") == breakout.render(breakout.load())
