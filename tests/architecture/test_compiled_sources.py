"""Compiled loops are kept on disk by what all of their sources hold, and none is forgotten."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from keel import kernels as core
from keel.apps.land import compiling as land
from keel.apps.serving import compiling as serving

PACKAGES = {"core": core, "land": land, "serving": serving}
MATHEMATICS = {"LOG_2PI"}
"""Constants that no edit changes."""


def imported(path: Path) -> set[tuple[Path, str]]:
    """Names that a file takes from other modules of Keel, with the file that each stands in."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("keel"):
            continue
        spec = find_spec(str(node.module))
        assert spec is not None
        assert spec.origin is not None
        for name in node.names:
            beside = Path(spec.origin).with_name(f"{name.name}.py")
            is_module = spec.submodule_search_locations is not None and beside.is_file()
            found.add((beside if is_module else Path(spec.origin), name.name))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_what_loops_are_compiled_from_names_the_folder_they_are_kept_in(package: str) -> None:
    """numba keeps a loop until the file of the loop itself changes: an edit to a constant that it
    imports would change nothing."""
    sources = {path.resolve() for path in PACKAGES[package].SOURCES}
    kernels = [path for path in sources if "kernels" in path.as_posix().rpartition("/keel/")[2]]
    assert kernels
    forgotten = {
        f"{path.name}: {name} of {origin.name}"
        for path in kernels
        for origin, name in imported(path)
        if origin.resolve() not in sources and name not in MATHEMATICS
    }
    assert not forgotten
