"""Values from outside: YAML text, small files, and how they are named in an error.

Mappings and lists among the settings are `name=value` and commas on the command line. Values are
YAML in its one-line form, of which JSON is a part: numbers, true and false, text, lists and
mappings, nested as deep as they need to be. Files may say the same in text.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tyro.constructors import PrimitiveConstructorSpec

from keel.errors import InputError

MOST_BYTES = 1 << 20
"""Size up to which a file of settings is read: larger ones, and devices without end, are none."""

DEEPEST = 100
"""Levels of lists and mappings within each other; PyYAML takes minutes for thousands."""

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 80, 80, 40


def describe(value: Any) -> str:
    """Return a short `repr` on one line, however large or deeply nested the value is."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # whole numbers of more digits than Python writes out
        return f"a {type(value).__name__} that is too large to be shown"


class _Loader(yaml.SafeLoader):
    """Plain data, at most `DEEPEST` levels of it."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError("nested too deeply")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML as plain data.

    Args:
        text: The document.
        where: Its file or field, for the error message.

    Raises:
        InputError: In one line, for everything that PyYAML cannot read. Values that do not fit
            their type (`!!int abc`, `2020-99-99`) end in errors of many kinds, not only its own.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        reason = error.problem or error.context or "no reason given"
        raise InputError(f"{where}{line}: not plain YAML ({describe_reason(reason)})") from None
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise InputError(f"{where}: not plain YAML ({describe_reason(reason)})") from None


def describe_reason(reason: str) -> str:
    """Return the first line of another library's message, cut where it is long."""
    first = next(iter(reason.splitlines()), "")
    return first if len(first) <= 160 else f"{first[:157]}…"


def read_text(path: Path) -> str:
    """Read a small UTF-8 file, or say in one line why it cannot be."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # a name with a null character
        raise InputError(f"{describe(str(path))}: cannot be read ({error})") from None
    if len(data) > MOST_BYTES:
        raise InputError(f"{path}: larger than {MOST_BYTES >> 20} MiB, no file of settings")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 text (byte {data[error.start]:#04x} at position {error.start}); "
            "save it as UTF-8"
        ) from None


OPTIONS = "envs.options"
"""The setting, as errors name it."""
OPENING = {"[": "]", "{": "}"}


def settle_texts(settings: Any, prefix: str = "") -> None:
    """Replace text and lists in the fields of a dataclass that hold mappings or names.

    Args:
        settings: Of a dataclass, in its `__post_init__`.
        prefix: Name of its section, with a dot.
    """
    for name in ("options", "task_options", "log", "functions"):
        value = getattr(settings, name, None)
        if isinstance(value, str) and name.endswith("options"):
            object.__setattr__(settings, name, named_values(value, f"{prefix}{name}"))
        elif isinstance(value, str | list | tuple):
            names = (value,) if isinstance(value, str) else value
            object.__setattr__(settings, name, tuple(x for part in names for x in listed(part)))


def in_text(name: str, value: Any) -> Any:
    """Return a mapping or a list of a stored configuration as one text, however it is written.

    Runs of version 0.1 have text where later ones have mappings and lists.

    Args:
        name: Dotted name of the setting; what is no mapping and no list of names stays as it is.
        value: Of a file that nobody has checked.

    Examples:
        >>> in_text("envs.options", "a=1,b=x"), in_text("log", ["wandb"]), in_text("seed", 3)
        ('a=1, b="x"', 'wandb', 3)
    """
    try:
        if name in ("envs.options", "task_options"):
            return options_text(named_values(value, name), name)
        if name in ("log", "reward.functions"):
            return ", ".join(listed(value) if isinstance(value, str) else value)
    except (InputError, TypeError):
        pass
    return value


def listed(text: str) -> tuple[str, ...]:
    """Return the parts of a text between its commas.

    Examples:
        >>> listed("tensorboard, wandb")
        ('tensorboard', 'wandb')
    """
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _values_of_words(words: Sequence[str]) -> dict[str, Any]:
    try:
        return named_values(words[0], "")
    except InputError as error:  # the command line names the flag by itself
        raise ValueError(str(error).removeprefix(": ")) from None


NAMED = PrimitiveConstructorSpec[Any](
    nargs=1,
    metavar="NAME=VALUE,…",
    instance_from_str=_values_of_words,
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda values: [options_text(values, "")],
)
"""How the command line reads a field that is a mapping."""
LISTED = PrimitiveConstructorSpec[Any](
    nargs=1,
    metavar="A,B,…",
    instance_from_str=lambda words: listed(words[0]),
    is_instance=lambda value: isinstance(value, tuple),
    str_from_instance=lambda names: [",".join(names)],
)
"""How the command line reads a field that is a list of names."""


class _OptionsLoader(yaml.SafeLoader):
    """Plain data only; 1e6 is a number, as in YAML 1.2 (PyYAML takes it for text).

    Aliases are refused: a few lines of them stand for more than any memory holds.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases are not allowed here")
        return super().compose_node(parent, index)


_OptionsLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def named_values(text: str | Mapping[Any, Any], field: str) -> dict[str, Any]:
    """Return the values that `text` names.

    Args:
        text: `name=value`, separated by commas; commas inside brackets or quotes separate nothing.
            Or a mapping, of which everything must be plain data.
        field: the setting that the text belongs to, for the error.

    Examples:
        >>> named_values('size=8, walls=[1, 2], goal={"x": 0.5}', "envs.options")
        {'size': 8, 'walls': [1, 2], 'goal': {'x': 0.5}}
    """
    if isinstance(text, Mapping):
        text = options_text(text, field)
    values: dict[str, Any] = {}
    for part in _parts(text, field):
        name, equals, value = (x.strip() for x in part.partition("="))
        if not (equals and name.isidentifier()):
            raise InputError(f"{field}: expected name=value, got {describe(part)}")
        if name in values:
            raise InputError(f"{field}: {name} is given twice")
        values[name] = _value(value, name, field)
    return values


def options_text(values: Mapping[Any, Any], field: str) -> str:
    """Return a mapping as the text that `named_values` reads back."""
    parts = []
    for name, value in values.items():
        if not (isinstance(name, str) and name.isidentifier()):
            raise InputError(f"{field}: {describe(name)} is no name of an option")
        try:
            parts.append(f"{name}={_dump(value)}")
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(
                f"{field}: {name} must be numbers, text, lists and mappings ({error})"
            ) from None
    return ", ".join(parts)


def _dump(value: Any) -> str:
    """Return a value as JSON; a `ValueError` if aliases make it larger than settings may be."""
    pieces, size = [], 0
    for piece in json.JSONEncoder(ensure_ascii=False, allow_nan=False).iterencode(value):
        pieces.append(piece)
        size += len(piece)
        if size > MOST_BYTES:
            raise ValueError(f"larger than {MOST_BYTES >> 20} MiB")
    return "".join(pieces)


def _parts(text: str, field: str) -> Iterator[str]:
    """Yield what stands between commas that are outside of brackets and quotes."""
    expected: list[str] = []
    quote, start = "", 0
    for at, letter in enumerate(text):
        if quote:
            # a backslash escapes only inside double quotes
            if letter == quote and not (quote == '"' and _escaped(text, at)):
                quote = ""
        elif letter in "\"'" and _begins_value(text[start:at]):
            quote = letter
        elif letter in OPENING:
            expected.append(OPENING[letter])
        elif letter in OPENING.values():
            if not expected or expected.pop() != letter:
                raise InputError(f"{field}: {letter!r} closes nothing in {describe(text)}")
        elif letter == "," and not expected:
            if text[start:at].strip():
                yield text[start:at].strip()
            start = at + 1
    if quote or expected:
        missing = quote or expected[-1]
        raise InputError(f"{field}: {missing!r} is missing at the end of {describe(text)}")
    if text[start:].strip():
        yield text[start:].strip()


def _begins_value(before: str) -> bool:
    """Return whether a quote after `before` opens a text; within a word it is an apostrophe."""
    return before.rstrip()[-1:] in ("", "=", "[", "{", ",", ":")


def _escaped(text: str, at: int) -> bool:
    """Return whether an odd number of backslashes stands before place `at`."""
    before = text[:at]
    return bool((len(before) - len(before.rstrip("\\"))) % 2)


def _value(text: str, name: str, field: str) -> Any:
    try:
        return yaml.load(text, _OptionsLoader)
    except Exception as error:  # PyYAML has errors of many kinds for values that break their type
        problem = describe_reason(getattr(error, "problem", None) or str(error))
        raise InputError(f"{field}: {name}={text} cannot be read ({problem})") from None
