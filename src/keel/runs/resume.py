"""What may differ between a run and its continuation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from keel.runs.errors import RunError


class Change(NamedTuple):
    """One field of a config, before and now; `ABSENT` where it did not or does not exist."""

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
    """The fields that differ, with dotted names.

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
    """The changes, if all are allowed; a `RunError` that shows the others, if not.

    `may_change` holds dotted names or their beginnings: `"eval"` allows `eval.episodes`.
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
    """Whether a field, or a part it belongs to, is one of `may_change`."""
    parts = field.split(".")
    return any(".".join(parts[:length]) in may_change for length in range(1, len(parts) + 1))


def flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Fields with dotted names, and their values."""
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found += flat(value, f"{name}.")
        else:
            found.append((name, value))
    return found


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The opposite of `flat`: dotted names as mappings in mappings.

    Examples:
        >>> nested({"region.max_kl": 0.02, "region": {"clip": 0.1}})
        {'region': {'max_kl': 0.02, 'clip': 0.1}}
    """
    result: dict[str, Any] = {}
    for name, value in settings.items():
        *folders, last = str(name).split(".")
        place = result
        for folder in folders:
            place = place.setdefault(folder, {})
        if isinstance(value, Mapping) and isinstance(place.get(last), dict):
            place[last].update(value)
        else:
            place[last] = dict(value) if isinstance(value, Mapping) else value
    return result
