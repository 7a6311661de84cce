"""The resolver of `module:attribute`, and where a module would come from."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from keel.apps import land, serving
from keel.errors import InputError
from keel.registry import import_attribute, import_function, module_origin


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "resolver_toys.py").write_text("import sys\nsys.resolver_toys = 1\nvalue = 3\n")
    (tmp_path / "resolver_parts").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "resolver_toys", raising=False)
    monkeypatch.delattr(sys, "resolver_toys", raising=False)
    return tmp_path


def test_modules_of_the_working_directory_count(here: Path) -> None:
    assert import_attribute("resolver_toys:value") == 3
    with pytest.raises(InputError, match="resolver_toys:value: is no function"):
        import_function("resolver_toys:value")


@pytest.mark.parametrize("name", ["resolver_toys", "resolver_toys:", ":value"])
def test_half_a_name_is_refused(here: Path, name: str) -> None:
    with pytest.raises(InputError, match="expected module:attribute"):
        import_attribute(name)


def test_where_a_module_lies_is_found_without_importing_it(here: Path) -> None:
    assert module_origin("resolver_toys.inner") == str(here / "resolver_toys.py")
    assert module_origin("resolver_parts") == str(here / "resolver_parts")
    assert not hasattr(sys, "resolver_toys")
    assert "resolver_toys" not in sys.modules
    assert module_origin("no_such_module_anywhere") == ""
    assert module_origin("_imp") == "built-in"


@pytest.mark.parametrize("package", [land, serving], ids=["land", "serving"])
def test_all_public_names_of_a_package_can_be_had(package: ModuleType) -> None:
    """They are imported when they are first used, so a name without a module is told only then."""
    assert dir(package) == sorted(package.__all__)
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'x'"):
        getattr(package, "x")  # noqa: B009
