"""HTML from template files, with everything escaped that is not HTML already.

A package keeps its templates in a folder `templates`. A file of them begins each with a line
`<!-- name -->`; `$name` stands for a value (`string.Template`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files
from string import Template

from keel import look


class Markup(str):
    """Text that is HTML already."""


class Templates:
    """The templates of one file.

    Args:
        package: The package beside which the folder `templates` stands.
        file: Name of the file.
    """

    def __init__(self, package: str, file: str) -> None:
        parts = re.split(r"<!-- (\w+) -->\n", read(package, file))[1:]
        self._templates = {
            name: Template(text.removesuffix("\n"))
            for name, text in zip(parts[::2], parts[1::2], strict=True)
        }

    def fill(self, name: str, /, **values: object) -> Markup:
        """Return a template with its values, each of which is escaped unless it is `Markup`."""
        escaped = {key: as_markup(value) for key, value in values.items()}
        return Markup(self._templates[name].substitute(escaped))


def as_markup(value: object) -> Markup:
    """Return `value` as HTML: `Markup` as it is, anything else as escaped text."""
    return value if isinstance(value, Markup) else Markup(escape(str(value)))


def join(parts: Iterable[object], between: str = "") -> Markup:
    """Return parts behind each other, each escaped unless it is `Markup`.

    Examples:
        >>> join(["a < b", Markup("<b>c</b>")], "<br>")
        'a &lt; b<br><b>c</b>'
    """
    return Markup(between.join(map(as_markup, parts)))


def style(package: str, file: str) -> Markup:
    """Return a style sheet, in which `$ink`, `$blue`, … are Keel's colors."""
    colors = {name.lower(): color for name, color in vars(look).items() if type(color) is str}
    return Markup(Template(read(package, file)).substitute(colors))


@cache
def read(package: str, file: str) -> str:
    """Return the text of a file in the folder `templates` of a package."""
    return (files(package) / "templates" / file).read_text(encoding="utf-8")
