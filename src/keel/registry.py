"""Registries: what can be plugged in, as a name, an object, or `module:attribute`.

A setting is always text: a name that the registry knows; the import path of what was passed from
Python; or, where that has none (lambdas, local functions, instances), a name that holds in this
process only. Nothing here decides whether code may be imported: `keel.trust` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from keel.errors import InputError, similar
from keel.imports import (
    REFERENCE,
    ImportFailed,
    import_attribute,
    is_object,
    name_of,
    reference,
)

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
