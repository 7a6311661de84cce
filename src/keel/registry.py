"""Registries: what can be plugged in, as a name, an object, or `module:attribute`.

A setting is always text: a name that the registry knows; the import path of what was passed from
Python; or, where that has none (lambdas, local functions, instances), a name that holds in this
process only. Nothing here decides whether code may be imported: `keel.trust` does.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar
from uuid import uuid4

from keel.errors import InputError, similar
from keel.imports import REFERENCE, ImportFailed, import_attribute

T = TypeVar("T")
Entry = TypeVar("Entry")

LOCAL = "<"
"""The first letter of names that hold in this process only: no name on the command line has it."""
_passed: dict[str, Any] = {}
"""Objects that were passed from Python, by the text that stands for them in settings."""


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
        elif value in _passed:
            entry = _passed[value]
        else:
            self.check(value)
            if is_local(value):
                raise InputError(f"{self.field}: {not_importable(value)}")
            try:
                entry = import_attribute(value)
            except ImportFailed as error:
                raise InputError(f"{self.field}: {error}") from error
        return entry  # type: ignore[no-any-return]

    def check(self, value: str) -> None:
        """Raise an `InputError` for a text that can be no entry; nothing is imported."""
        if value in self.names() or REFERENCE.fullmatch(value) or is_local(value):
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
            return passed(value if name is None else self._entries[name])
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


def passed(value: Any) -> str:
    """Return a text that stands for an object passed from Python, by its import path if it has one.

    The object itself is what the text means in this process; nothing is imported again.
    """
    for text, known in _passed.items():
        if known is value:
            return text
    text = reference(value) or f"{LOCAL}{_describe(value)} {uuid4().hex[:8]}>"
    _passed[text] = value
    return text


def was_passed(text: str) -> bool:
    """Return whether an object that was passed in this process is what a text stands for."""
    return text in _passed


def is_local(text: str) -> bool:
    """Return whether a text stands for an object without an import path."""
    return text.startswith(LOCAL)


def not_importable(text: str) -> str:
    """Return why an object without an import path cannot be had, and what to do."""
    return (
        f"{text} was passed from Python and has no import path, so that no other process can load "
        "it; define it at the top level of a module and pass that"
    )


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


def _describe(value: Any) -> str:
    """Return kind and place of an object, in few words."""
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    code = getattr(value, "__code__", None)
    words = name.rpartition(".")[2]
    if code is not None:
        words = f"{words} of {Path(code.co_filename).name}"
    return re.sub(r"[^\w. ]", "", words)


def texts(value: Any) -> Iterator[str]:
    """Yield the entries that a setting names: one, or several in a list or between commas.

    Weights (`name*0.5`) are left out.
    """
    parts = value.split(",") if isinstance(value, str) else value
    for part in parts if isinstance(parts, list | tuple) else ():
        for inner in str(part).split(","):
            if name := inner.partition("*")[0].strip():
                yield name
