"""Differences that are allowed between a run and its continuation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from keel.errors import RunError


class Change(NamedTuple):
    """A field of a config, before and now; `ABSENT` where it did not or does not exist."""

    field: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.before!r} → {self.now!r}"


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


def config_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the fields that differ, with dotted names.

    Args:
        before: the configuration of the run.
        now: the new configuration.

    Examples:
        >>> before, after = {"region": {"max_kl": 0.02}}, {"region": {"max_kl": 0.05}}
        >>> [str(change) for change in config_changes(before, after)]
        ['region.max_kl: 0.02 → 0.05']
    """
    old, new = dict(flat(before)), dict(flat(now))
    pairs = ((name, old.get(name, ABSENT), new.get(name, ABSENT)) for name in {**old, **new})
    return [Change(*pair) for pair in pairs if pair[1] != pair[2]]


def check_config(
    before: Mapping[str, Any], now: Mapping[str, Any], may_change: Collection[str] = ()
) -> list[Change]:
    """Return the changes if all are allowed, else raise a `RunError` that shows the others.

    Args:
        before: the configuration of the run.
        now: the new configuration.
        may_change: dotted names or their beginnings: `"eval"` allows `eval.episodes`.
    """
    changes = config_changes(before, now)
    refused = [c for c in changes if not allowed(c.field, may_change)]
    if refused:
        lines = "\n  ".join(map(str, refused))
        raise RunError(
            f"the config differs from the run's:\n  {lines}\n"
            f"a resumed run may change: {', '.join(sorted(may_change)) or 'nothing'}; "
            f"leave the other fields as they were, or start a new run"
        )
    return changes


def allowed(field: str, may_change: Collection[str]) -> bool:
    """Return whether a field, or a part it belongs to, is one of `may_change`."""
    parts = field.split(".")
    return any(".".join(parts[:length]) in may_change for length in range(1, len(parts) + 1))


def flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return fields with dotted names, and their values."""
    fields: list[tuple[str, Any]] = []
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            fields += flat(value, f"{name}.")
        else:
            fields.append((name, value))
    return fields


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted names as mappings in mappings, the inverse of `flat`.

    Examples:
        >>> nested({"region.max_kl": 0.02, "region": {"clip": 0.1}})
        {'region': {'max_kl': 0.02, 'clip': 0.1}}
    """
    result: dict[str, Any] = {}
    for name, value in settings.items():
        *folders, last = str(name).split(".")
        section = result
        for folder in folders:
            section = section.setdefault(folder, {})
        if isinstance(value, Mapping) and isinstance(section.get(last), dict):
            section[last].update(value)
        else:
            section[last] = dict(value) if isinstance(value, Mapping) else value
    return result
