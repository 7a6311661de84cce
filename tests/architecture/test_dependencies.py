"""What the source imports is what pyproject.toml declares, and nothing is required in vain."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import keel
from keel.resources import cores

tomllib = pytest.importorskip("tomllib")

SOURCE = Path(keel.__file__).parent
ROOT = SOURCE.parent.parent
IMPORT_NAMES = {"pillow": "PIL", "pyyaml": "yaml"}
"""Distributions whose package has another name than hyphens turned into underscores."""


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)["project"]
    return table


def distribution(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return match[0].lower()


def packages(requirements: list[str]) -> set[str]:
    names = map(distribution, requirements)
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}


def extras() -> dict[str, set[str]]:
    groups = project()["optional-dependencies"]
    return {name: packages(group) - {"keel_rl"} for name, group in groups.items()}


def imported(tree: ast.AST) -> set[str]:
    """Top-level names of all absolute imports, those inside of functions included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return {name.split(".")[0] for name in names}


def extras_asked_for(tree: ast.AST) -> set[tuple[str, str]]:
    """Pairs (package, extra) of the calls `import_extra("package.module", "extra")`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    words = [
        [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
        for call in calls
        if ast.unparse(call.func) == "import_extra"
    ]
    return {(str(pair[0]).split(".")[0], str(pair[1])) for pair in words if len(pair) == 2}


TREES = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))]
THIRD_PARTY = set().union(*map(imported, TREES)) - set(sys.stdlib_module_names) - {"keel"}
ASKED_FOR = set().union(*map(extras_asked_for, TREES))


def test_every_import_is_declared() -> None:
    declared = packages(project()["dependencies"]).union(*extras().values())
    assert "torch" in THIRD_PARTY
    assert sorted(THIRD_PARTY - declared) == []


def test_every_required_distribution_is_imported() -> None:
    assert sorted(packages(project()["dependencies"]) - THIRD_PARTY) == []


@pytest.mark.parametrize(("package", "extra"), sorted(ASKED_FOR))
def test_the_extra_that_an_error_names_brings_the_package(package: str, extra: str) -> None:
    assert package in extras()[extra] | packages(project()["dependencies"])


def test_every_declared_distribution_of_development_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    groups = project()["optional-dependencies"]
    used = re.findall(r"[\w-]+", " ".join(x for x in groups["dev"] if x.startswith("keel-rl[")))
    wanted = [*project()["dependencies"], *groups["dev"]]
    wanted += [x for name in used if name in groups for x in groups[name]]
    names = {distribution(x).replace("_", "-") for x in wanted} - {"keel-rl"}
    assert sorted(names - pinned) == []
    assert "torch==2.13.0" in lines


def test_cores_are_those_of_the_affinity_mask_or_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7}, raising=False)
    assert cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores() == 1


def test_cores_are_counted_in_one_place() -> None:
    users = [
        str(path.relative_to(SOURCE))
        for path in sorted(SOURCE.rglob("*.py"))
        if "sched_getaffinity" in path.read_text(encoding="utf-8")
    ]
    assert users == ["resources.py"]


def test_language_models_need_no_numba(tmp_path: Path) -> None:
    """Sampling, learning, certificate and evaluation: what compiled loops cost, others pay."""
    pytest.importorskip("transformers")
    words = [
        *("train", "language", "--task", "lookup", "--algo", "grpo", "--total-steps", "4"),
        *("--model.hidden", "16", "--model.layers", "1", "--model.heads", "2", "--no-control"),
        *("--sample.prompts", "2", "--sample.group", "2", "--region.minibatch", "4"),
        *("--sample.max-new-tokens", "4", "--warmup.examples", "8", "--warmup.epochs", "1"),
        *("--evaluation.prompts", "2", "--threads", "1", "--quiet", "--runs", str(tmp_path)),
    ]
    code = (
        "import sys; sys.modules['numba'] = None; "
        f"from keel.cli import main; sys.exit(main({words!r}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
