"""Sources of the settings of a run: default, preset, file or flag."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from keel.config.reading import setting_name

DEFAULT = "default"


class Layer(NamedTuple):
    """Settings from one place; later layers go before earlier ones."""

    source: str
    """as it is shown, for example `preset CartPole`"""
    fields: frozenset[str]
    """dotted names of what it sets"""


class Setting(NamedTuple):
    """One setting in force."""

    name: str
    """dotted, for example `region.max_kl`"""
    value: Any
    source: str


def dotted(settings: Mapping[str, Any], prefix: str = "") -> frozenset[str]:
    """Return the dotted names of nested settings, with underscores for hyphens.

    Examples:
        >>> sorted(dotted({"seed": 1, "region": {"max-kl": 0.1}}))
        ['region.max_kl', 'seed']
    """
    names: set[str] = set()
    for key, value in settings.items():
        name = setting_name(f"{prefix}{key}".replace("-", "_"))
        names |= dotted(value, f"{name}.") if isinstance(value, Mapping) else {name}
    return frozenset(names)


def flagged(args: Sequence[str], known: Collection[str]) -> frozenset[str]:
    """Return the settings that words of a command line name, `--no-…` included.

    Examples:
        >>> sorted(flagged(["--seed", "1", "--region.no-gate"], {"seed", "algo", "region.gate"}))
        ['region.gate', 'seed']
    """
    names = set()
    for word in args:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        parent, dot, last = name.rpartition(".")
        names |= {name, f"{parent}{dot}{last.removeprefix('no_')}"} if word[:2] == "--" else set()
    return frozenset(names & set(known))


def settings_of(config: Any, layers: Sequence[Layer]) -> list[Setting]:
    """Return every setting of a configuration, with the last layer that sets it.

    Args:
        config: A dataclass of settings, of environments or of tokens.
        layers: From the weakest to the strongest; what none of them sets is a default.
    """
    return [
        Setting(name, value, next((x.source for x in reversed(layers) if _sets(x, name)), DEFAULT))
        for name, value in leaves(config)
    ]


def _sets(layer: Layer, name: str) -> bool:
    """Return whether a layer sets a field, or a part of it (those of a mapping have names)."""
    return any(field == name or field.startswith(f"{name}.") for field in layer.fields)


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every field."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{name}.")
        else:
            yield name, list(value) if isinstance(value, tuple) else value


def one_line_yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    text: str = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10_000
    )
    return text.removesuffix("...\n").strip()


def as_yaml(settings: Sequence[Setting]) -> str:
    """Return settings as a YAML file that `--config` reads, with the source behind each value.

    Args:
        settings: What to write, those of one section next to each other.
    """
    lines: list[tuple[str, str]] = []
    section = ""
    for name, value, source in settings:
        parent, _, last = name.rpartition(".")
        if parent != section and parent:
            lines.append((f"{parent}:", ""))
        section = parent
        lines.append((f"{'  ' if parent else ''}{last}: {one_line_yaml(value)}", source))
    width = min(44, max(len(text) for text, _ in lines))
    return "\n".join(f"{text:<{width}}  # {source}" if source else text for text, source in lines)
