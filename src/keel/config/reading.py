"""Configurations from and to plain data.

An unknown or misspelt key, a wrong type or an impossible value is an error with a suggestion,
raised before anything is created. Settings may be named by the last part of their name, where only
one has it (`max_kl` for `region.max_kl`), and as older versions of Keel called them: such names are
read, never written.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from keel.config.checks import check
from keel.config.common import Pluggable
from keel.config.schema import Config
from keel.config.values import describe, listed, named_values, parse_yaml, read_text
from keel.errors import InputError, similar

T = TypeVar("T")
FIRST = {"network": "kind", "advantage": "estimator"}
"""Settings that a whole section may stand for: `network=make_network`, `network: module:make`."""
MINARI = "minari:"
"""Before the name of a data set that is not a folder."""
MEANT = {"loss": "region"}
"""Sections of names that several have, and by which one of them is meant: `loss` is PPO's."""
SECTIONS = {"bc": "demos", "stabiliser": "stabilizer"}
FIELDS = {
    "demos.demos": "path",
    "network.memory": "recurrent",
    "network.memory_size": "recurrent_size",
    "natural.land": "rescale_to_kl",
    "envs.normalise_obs": "normalize_obs",
    "envs.normalise_reward": "normalize_reward",
    "critic.normalise": "normalize",
    "advantage.normalise": "normalize",
}
"""The old name below the section of today, and the new one."""
VALUES = {("network.kind", "items"): "pointer"}


def to_dict(config: Any) -> dict[str, Any]:
    """Return a dataclass of settings as plain data, for YAML."""
    return {item.name: _plain(getattr(config, item.name)) for item in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    return list(value) if isinstance(value, tuple) else copy.deepcopy(value)


def from_dict(data: Mapping[str, Any], base: Config | None = None) -> Config:
    """Strictly: every key must exist and have its type; what is missing comes from `base`."""
    config = merged(base if base is not None else Config(), rename_settings(data), "")
    check(config)
    return config


def anchored(config: Config) -> Config:
    """Return `config` with absolute paths of demonstrations and of a recorded trace, so that a run
    can be resumed from anywhere."""
    demos = config.demos.path
    if demos and not demos.startswith(MINARI):
        cloning = dataclasses.replace(config.demos, path=str(Path(demos).resolve()))
        config = dataclasses.replace(config, demos=cloning)
    named = options(config) if config.env == "serving" else {}
    if isinstance(trace := named.get("trace"), str):
        named = {**named, "trace": str(Path(trace).resolve())}
        config = dataclasses.replace(config, envs=dataclasses.replace(config.envs, options=named))
    return with_import_paths(config)


def with_import_paths(config: T) -> T:
    """Return a dataclass of settings in which registered names of the user are import paths."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    changes: dict[str, Any] = {}
    for name, hint in hints.items():
        value, pluggable = getattr(config, name), _pluggable(hint)
        if dataclasses.is_dataclass(value):
            changes[name] = with_import_paths(value)
        elif pluggable is not None:
            changes[name] = _entries(pluggable, hint, value, name)
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def options(config: Config) -> dict[str, Any]:
    """What the environment is made with, of `envs.options`."""
    return copy.deepcopy(config.envs.options)


def load(path: Path, base: Config | None = None) -> Config:
    """A YAML file, read as data only."""
    return from_dict(read(path), base)


def read(path: Path) -> dict[str, Any]:
    """What a YAML file says, before any of it is checked."""
    data = parse_yaml(read_text(path), str(path))
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected keys and values, got {type(data).__name__}")
    return data


def merged(base: T, data: Mapping[str, Any], prefix: str = "") -> T:
    """A dataclass of settings with changes on top, each of which must exist and have its type."""
    hints = typing.get_type_hints(type(base), include_extras=True)
    changes: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_") if isinstance(key, str) else ""
        if name not in hints:
            near = similar(name, hints)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            written = name if name.isidentifier() and len(name) <= 80 else describe(key)
            raise InputError(f"unknown key {prefix}{written}{hint}")
        current = getattr(base, name)
        if dataclasses.is_dataclass(current):
            if name in FIRST and (callable(value) or isinstance(value, str)):
                value = {FIRST[name]: value}
            if not isinstance(value, Mapping):
                raise InputError(f"{prefix}{name}: expected keys and values, got {describe(value)}")
            changes[name] = merged(current, value, f"{prefix}{name}.")
        else:
            changes[name] = _convert(hints[name], value, f"{prefix}{name}")
    return dataclasses.replace(base, **changes)  # type: ignore[type-var]


def _convert(hint: Any, value: Any, name: str) -> Any:
    """`value` as the field's type; numbers may be written as integers, integers as 1e6."""
    pluggable = _pluggable(hint)
    if pluggable is not None:
        return _entries(pluggable, hint, value, name)
    if hasattr(hint, "__metadata__"):
        hint = typing.get_args(hint)[0]
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (option for option in typing.get_args(hint) if option is not type(None))
        return _convert(inner, value, name)
    if origin is Literal:
        return _choice(typing.get_args(hint), value, name)
    if origin is tuple:
        inner = typing.get_args(hint)[0]
        if isinstance(value, str) and inner is str:
            return listed(_one_line(value, name))
        if isinstance(value, list | tuple):
            return tuple(_convert(inner, item, name) for item in value)
    elif origin is dict:
        if isinstance(value, str | Mapping):
            return named_values(_one_line(value, name) if isinstance(value, str) else value, name)
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint in (int, float):
        number = _number(value)
        if number is not None and (hint is float or number == int(number)):
            return hint(number)
    elif isinstance(value, hint):
        return _one_line(value, name)
    raise InputError(f"{name}: expected {_name(hint)}, got {describe(value)}")


def _pluggable(hint: Any) -> Pluggable | None:
    marks = getattr(hint, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, Pluggable)), None)


def _entries(pluggable: Pluggable, hint: Any, value: Any, name: str) -> Any:
    """Return what names entries of a registry as text: one, or several in a list."""
    several = typing.get_args(hint)[0] is not str
    parts = list(value) if isinstance(value, list | tuple) else [value]
    if several:
        parts = [x for part in parts for x in (listed(part) if isinstance(part, str) else [part])]
    if not several and len(parts) != 1:
        raise InputError(f"{name}: expected one, got {describe(value)}")
    named: list[str] = []
    for part in parts:
        if not isinstance(part, str) and not callable(part):
            raise InputError(
                f"{name}: expected a name, module:attribute or a function, got {describe(part)}"
            )
        entry, star, weight = part.partition("*") if isinstance(part, str) else (part, "", "")
        entry = entry.strip() if isinstance(entry, str) else entry
        named.append(_one_line(f"{pluggable.registry.text(entry)}{star}{weight}", name))
    return tuple(named) if several else named[0]


def _choice(options: tuple[str, ...], value: Any, name: str) -> str:
    if isinstance(value, bool) and "off" in options:
        value = "on" if value else "off"
    if isinstance(value, str) and value in options:
        return value
    near = similar(str(value), options) if isinstance(value, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InputError(f"{name}: {describe(value)} is not one of {', '.join(options)}{hint}")


def _one_line(text: str, name: str) -> str:
    """Return a text, or raise if it has line breaks, control or half characters."""
    text = text.strip()
    if not text.isprintable():
        raise InputError(f"{name}: expected text on one line, got {describe(text)}")
    return text


def _number(value: Any) -> float | int | None:
    """YAML reads 1e6 (without a dot) as text: it is a number all the same."""
    if isinstance(value, str):
        try:
            value = float(value) if set(value) & set(".eE") else int(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond every float
        return None


def _name(hint: Any) -> str:
    return {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        dict[str, Any]: "names and values",
        tuple[str, ...]: "a list of texts",
    }.get(hint, "a list of whole numbers")


def nested(settings: Mapping[str, Any], default: Any = None) -> dict[str, Any]:
    """Return settings in their sections.

    Args:
        settings: values by section (`region={"max_kl": 0.02}`), by their whole name
            (`{"region.max_kl": 0.02}`), or by a last part that only one setting has (`max_kl=…`).
        default: a configuration of this kind of run; by default one of environments.

    Raises:
        InputError: several settings end so, or none does.

    Examples:
        >>> nested({"max_kl": 0.02, "seed": 1, "region": {"clip": 0.1}})
        {'region': {'max_kl': 0.02, 'clip': 0.1}, 'seed': 1}
    """
    default = Config() if default is None else default
    top = {field.name: field for field in dataclasses.fields(default)}
    whole: dict[str, Any] = {}
    for key, value in rename_settings(settings).items():
        section, dot, leaf = key.partition(".")
        if not dot and key not in top:
            section, leaf = _place(key, leaves(default), top)
        if not leaf and not isinstance(value, Mapping):
            if section not in FIRST:
                whole[section] = value
                continue
            leaf = FIRST[section]
        part = whole.setdefault(section, {})
        inside = dict(value) if isinstance(value, Mapping) and not leaf else {leaf: value}
        twice = part.keys() & inside.keys()
        if twice:
            raise InputError(f"{section}.{min(twice)}: is given twice")
        part.update(inside)
    return whole


def _place(leaf: str, known: Mapping[str, list[str]], top: Mapping[str, Any]) -> tuple[str, str]:
    """Return the section of a setting that is named without it."""
    sections = known.get(leaf, [])
    if len(sections) == 1 or leaf in MEANT:
        return MEANT.get(leaf, sections[0]), leaf
    if sections:
        names = ", ".join(f"{section}.{leaf}" for section in sections)
        raise InputError(
            f"{leaf}: may be {names}; say which, for example {sections[0]}={{{leaf!r}: …}}"
        )
    near = similar(leaf, [*known, *top])
    hint = "" if not near else ".".join((*known.get(near[0], [])[:1], near[0]))
    raise InputError(f"unknown setting {leaf}" + (f"; did you mean {hint}?" if hint else ""))


def leaves(config: Any) -> dict[str, list[str]]:
    """Return the sections of a configuration that have a setting of each name."""
    sections: dict[str, list[str]] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            for inner in dataclasses.fields(value):
                sections.setdefault(inner.name, []).append(field.name)
    return sections


def setting_name(name: str) -> str:
    """Return the name of today of a setting.

    Args:
        name: Dotted, with underscores or hyphens, which it keeps.

    Examples:
        >>> setting_name("bc.demos"), setting_name("network.memory-size"), setting_name("seed")
        ('demos.path', 'network.recurrent-size', 'seed')
        >>> setting_name("natural.no-land")
        'natural.no-rescale-to-kl'
    """
    section, dot, leaf = name.partition(".")
    section = SECTIONS.get(section, section)
    negated = "no-" if leaf.startswith("no-") else "no_" if leaf.startswith("no_") else ""
    today = FIELDS.get(f"{section}.{leaf.removeprefix(negated).replace('-', '_')}")
    if today is None:
        return f"{section}{dot}{leaf}"
    return f"{section}.{negated}{today.replace('_', '-') if '-' in name else today}"


def setting_value(name: str, value: Any) -> Any:
    """Return the value of today of a setting.

    Args:
        name: Dotted, as it is called today.
        value: From a file or a flag.
    """
    return VALUES.get((name, value), value) if isinstance(value, str) else value


def rename_settings(settings: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return nested settings under the names of today; those that are unknown stay as they are.

    Args:
        settings: Sections as mappings; keys may be dotted. An `InputError` where a setting stands
            under both names.
        section: Name of today of the section that these are the settings of.
    """
    renamed: dict[str, Any] = {}
    prefix = f"{section}." if section else ""
    for key, value in settings.items():
        name = key
        if isinstance(key, str):
            name = setting_name(f"{prefix}{key}").removeprefix(prefix)
            if isinstance(value, Mapping) and not section and "." not in name:
                value = rename_settings(value, name)
            value = setting_value(f"{prefix}{name}", value)
        if name in renamed:
            raise InputError(
                f"{prefix}{key}: is called {prefix}{name} now, and both are given; say one of them"
            )
        renamed[name] = value
    return renamed
