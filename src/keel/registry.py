"""What settings name: an entry of a registry, an object, or `module:attribute`.

What stands at the top level of a module is named by its import path. Any other object has a name
that holds in this process alone, `object:NAME`: no other process can find it again. A registry
knows entries of one kind by name, and takes objects and import paths as well. All of it is imported
when it is used, like the names of packages (`lazy_names`).

Nothing here decides whether code may be imported: `keel.trust` does, before a name gets here.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import inspect
import re
import secrets
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from keel.errors import InputError, similar

REFERENCE = re.compile(r"(?P<module>[^\s:,]+):(?P<attribute>[^\s:,]+)")
"""`module:attribute`, or `module:Name-v0`, which Gymnasium reads as an id of its registry."""

OBJECT = "object:"
"""Prefix of names of objects that were passed from Python and have no import path."""
_objects: dict[str, Any] = {}
"""Objects of this process by their names."""


def name_of(value: Any) -> str:
    """Return the text that stands for a function, a class or another object in a configuration.

    Args:
        value: named by its import path, if it has one; else by `object:NAME`. In this process the
            name means the very object.

    Examples:
        >>> from collections import OrderedDict
        >>> name_of(OrderedDict)
        'collections:OrderedDict'
        >>> name_of(lambda: None).startswith("object:lambda_")
        True
    """
    for known, other in _objects.items():
        if other is value:
            return known
    path = reference(value)
    if path is not None:
        return bind(path, value)
    name = str(getattr(value, "__qualname__", "") or type(value).__name__)
    label = re.sub(r"\W", "", name.rpartition(".")[2])
    return bind(f"{OBJECT}{label}_{secrets.token_hex(4)}", value)


def reference(value: Any) -> str | None:
    """Return the import path `module:attribute` of a class or a function.

    None for what has none: lambdas, functions within functions, partials, instances; and for what
    a script defines that would do its work again when it is imported.

    Examples:
        >>> import math
        >>> reference(math.sin), reference(lambda: 0)
        ('math:sin', None)
    """
    name = getattr(value, "__qualname__", None)
    module = getattr(value, "__module__", None)
    if not (isinstance(name, str) and isinstance(module, str) and name.isidentifier()):
        return None
    if getattr(sys.modules.get(module), name, None) is not value:
        return None
    if module == "__main__":
        module = _script_module() or ""
    return f"{module}:{name}" if module else None


def _script_module() -> str | None:
    """Return the name under which the running script can be imported without running its work."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:  # python -m package.module
        return main.__spec__.name
    path = Path(getattr(main, "__file__", None) or "")
    if path.suffix != ".py" or not path.stem.isidentifier():
        return None
    if str(path.resolve().parent) not in (str(Path(place).resolve()) for place in sys.path):
        return None
    tests = (node.test for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.If))
    return path.stem if any("__name__" in ast.unparse(test) for test in tests) else None


def bind(name: str, value: Any) -> str:
    """Let a name mean an object in this process; returns the name.

    Args:
        name: that a configuration has.
        value: what it means.
    """
    _objects[name] = value
    return name


def is_object(name: str) -> bool:
    """Return whether a name stands for an object that was passed from Python."""
    return name.startswith(OBJECT)


def was_passed(name: str) -> bool:
    """Return whether a name stands for an object that was passed in this process."""
    return name in _objects


def not_importable(name: str) -> str:
    """Return why an object without an import path cannot be had, and what to do."""
    return (
        f"{name}: was passed from Python and has no import path, so no other process can load it; "
        "pass it again (keel.resume(RUN, env=…), keel.evaluate(RUN, env=…)), or begin a run with a "
        "class or a function at the top level of a module"
    )


class ImportFailed(InputError):
    """Error of a module or an attribute that cannot be imported; `reason` says why."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


def import_module(module: str, name: str | None = None) -> ModuleType:
    """Import `module`; modules of the working directory count.

    Args:
        module: dotted name of the module.
        name: what to call it in an error, by default the module itself.

    Raises:
        ImportFailed: it is missing, or its own code fails.
    """
    name = name or module
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportFailed(f"{name}: cannot be imported ({error})", str(error)) from error
    except (Exception, SystemExit) as error:  # whatever the code of a module raises
        reason = " ".join(traceback.format_exception_only(error)[-1].split())[:200]
        raise ImportFailed(f"{name}: its module failed on import: {reason}", reason) from error


def import_attribute(name: str) -> Any:
    """Import the object that `module:attribute` names.

    Raises:
        ImportFailed: the module or the attribute does not exist, or it was an object of a process
            that has ended.
    """
    if name in _objects:
        return _objects[name]
    if is_object(name):
        raise ImportFailed(not_importable(name))
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ImportFailed(f"{name}: expected module:attribute")
    imported = import_module(module, name)
    if not hasattr(imported, attribute):
        raise ImportFailed(
            f"{name}: cannot be imported ({module!r} has no attribute {attribute!r})"
        )
    return getattr(imported, attribute)


def import_function(name: str, takes: Sequence[str] = ()) -> Callable[..., Any]:
    """Import the function that `module:function` names.

    Args:
        name: Where it lies.
        takes: What it is called with, one description an argument; nothing is checked without.

    Raises:
        InputError: It is no function, or cannot be called so.
    """
    return as_function(import_attribute(name), name, takes)


def as_function(function: Any, name: str, takes: Sequence[str] = ()) -> Callable[..., Any]:
    """Return `function`, if it is one that can be called with what it takes.

    Args:
        function: Any object.
        name: What to call it in an error.
        takes: What it is called with, one description an argument; nothing is checked without.

    Raises:
        InputError: It is no function, or cannot be called so.
    """
    if not callable(function):
        raise InputError(f"{name}: is no function")
    if takes:
        try:
            inspect.signature(function).bind(*takes)
        except TypeError as error:
            raise InputError(f"{name}: must take {' and '.join(takes)}; {error}") from error
        except ValueError:
            pass  # some functions in C do not tell
    result: Callable[..., Any] = function
    return result


def lazy_names(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports its names when they are first used.

    Args:
        package: `__name__` of the package.
        names: names by their module in the package, separated by spaces.

    Examples:
        >>> lazy_names("keel.tracking", {"integrity": "name_lines"})("name_lines")([4])
        'line 4'
    """
    modules = {name: module for module, line in names.items() for name in line.split()}

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return load


def module_origin(module: str) -> str:
    """Return where the package of a module would be imported from, without importing it.

    Args:
        module: dotted name; the package at its beginning is looked up.

    Returns:
        The path of its file or folders, `built-in`, or an empty text where there is none.
    """
    package = module.partition(".")[0]
    loaded = sys.modules.get(package)
    spec = None if loaded is None else loaded.__spec__
    if spec is None:
        if package in sys.builtin_module_names:
            return "built-in"
        spec = importlib.machinery.PathFinder.find_spec(package, [str(Path.cwd()), *sys.path])
    if spec is None:
        return ""
    if spec.origin is not None:
        return spec.origin if not spec.has_location else str(Path(spec.origin).resolve())
    return ":".join(str(Path(place).resolve()) for place in spec.submodule_search_locations or ())


T = TypeVar("T")
Entry = TypeVar("Entry")


class Registry(Generic[T]):
    """Entries of one kind by name; `get` resolves names, objects and `module:attribute` alike.

    Args:
        field: the setting that names an entry, for error messages.
        builtin: where Keel's own entries are, `module:attribute` by name; imported when used.
        keywords: names that the setting may have beside those of entries.

    Examples:
        >>> shapes = Registry("shape", {"tau": "math:tau"})
        >>> shapes.register("five")(5.0)
        5.0
        >>> shapes.names(), shapes.get("five"), shapes.get("math:pi") > shapes.get("tau")
        (('tau', 'five'), 5.0, False)
    """

    def __init__(
        self, field: str, builtin: Mapping[str, str] | None = None, keywords: Iterable[str] = ()
    ) -> None:
        self.field = field
        self.keywords = tuple(keywords)
        self._builtin = dict(builtin or {})
        self._entries: dict[str, Any] = {}

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Return a decorator that enters a function or a class under `name`.

        A name of Keel's own cannot be taken; one of your own may be given again, which replaces it.
        """
        if not name.isidentifier():
            raise InputError(f"{self.field}: cannot register {name!r}; a name is letters and _")
        if name in self._builtin or name in self.keywords:
            raise InputError(f"{self.field}: {name!r} is Keel's own; register another name")

        def enter(entry: Entry) -> Entry:
            self._entries[name] = entry
            return entry

        return enter

    def names(self) -> tuple[str, ...]:
        """Return all names: keywords, Keel's own, registered ones."""
        return (*self.keywords, *self._builtin, *self._entries)

    def is_builtin(self, name: str) -> bool:
        """Return whether Keel has an entry of this name."""
        return name in self._builtin

    def get(self, value: Any) -> T:
        """Return the entry that a name, `module:attribute` or the object itself means."""
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]
        entry: Any
        if value in self._builtin:
            entry = import_attribute(self._builtin[value])
        elif value in self._entries:
            entry = self._entries[value]
        else:
            self.check(value)
            try:
                entry = import_attribute(value)
            except ImportFailed as error:
                raise InputError(f"{self.field}: {error}") from error
        return entry  # type: ignore[no-any-return]

    def check(self, value: str) -> None:
        """Raise an `InputError` for a text that can be no entry; nothing is imported."""
        if value in self.names() or REFERENCE.fullmatch(value) or is_object(value):
            return
        near = similar(value, self.names())
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = "".join(f"{name}, " for name in self.names())
        raise InputError(f"{self.field}: {value!r} is not one of {known}module:attribute{hint}")

    def text(self, value: Any) -> str:
        """Return the text that stands for a name or an object in settings.

        Names that code registered become import paths, which other processes understand.
        """
        name = value if isinstance(value, str) else self._name_of(value)
        if name is None or (name in self._entries and reference(self._entries[name])):
            return name_of(value if name is None else self._entries[name])
        return name

    @property
    def choices(self) -> str:
        """What the setting may be, for help texts."""
        return "|".join((*self.keywords, *self._builtin, "module:attribute"))

    def _name_of(self, value: Any) -> str | None:
        for name, entry in self._entries.items():
            if entry is value:
                return name
        path = reference(value)
        return next((name for name, own in self._builtin.items() if own == path), None)


def texts(value: Any) -> Iterator[str]:
    """Yield the entries that a setting names: one, or several in a list or between commas.

    Weights (`name*0.5`) are left out.
    """
    parts = value.split(",") if isinstance(value, str) else value
    for part in parts if isinstance(parts, list | tuple) else ():
        for inner in str(part).split(","):
            if name := inner.partition("*")[0].strip():
                yield name
