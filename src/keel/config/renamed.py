"""Names that settings had in older versions of Keel: still read, never written.

Files, keyword arguments and flags with an old name mean the setting of today, so that runs, configs
and scripts of version 0.1 keep working.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keel.errors import InputError

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


def rename_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings under the names of today; those that are unknown stay as they are.

    Args:
        settings: Sections as mappings; keys may be dotted. An `InputError` where a setting stands
            under both names.
    """
    renamed: dict[str, Any] = {}
    for key, value in settings.items():
        name = setting_name(key) if isinstance(key, str) else key
        if name in renamed:
            raise InputError(f"{key}: is called {name} now, and both are given; say one of them")
        if isinstance(value, Mapping) and isinstance(name, str) and "." not in name:
            value = _rename_section(name, value)
        renamed[name] = setting_value(name, value) if isinstance(name, str) else value
    return renamed


def _rename_section(section: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for key, value in settings.items():
        leaf = key
        if isinstance(key, str):
            leaf = setting_name(f"{section}.{key}").partition(".")[2]
            value = setting_value(f"{section}.{leaf}", value)
        if leaf in renamed:
            raise InputError(
                f"{section}.{key}: is called {section}.{leaf} now, and both are given; say one"
            )
        renamed[leaf] = value
    return renamed
