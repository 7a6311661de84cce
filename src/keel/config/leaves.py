"""Settings by the last part of their name, where only one has it: `max_kl` for `region.max_kl`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from keel.config.reading import FIRST
from keel.config.renamed import rename_settings
from keel.config.schema import Config
from keel.errors import InputError, similar

MEANT = {"loss": "region"}
"""Sections of names that several have, and by which one of them is meant: `loss` is PPO's."""


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
