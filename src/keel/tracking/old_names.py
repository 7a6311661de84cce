"""Names that metrics had in older versions of Keel: read under the names of today."""

from __future__ import annotations

from typing import Any

OLD_PREFIX, PREFIX = "ledger/", "kl/"
"""The accounting of KL, in version 0.1 and now."""


def has_old_names(data: bytes) -> bool:
    """Return whether lines of metrics may hold a metric under an old name."""
    return f'"{OLD_PREFIX}'.encode() in data


def rename_metrics(record: dict[str, Any]) -> dict[str, Any]:
    """Return one line of metrics, with its flags, under the names of today."""
    renamed = {metric_name(name): value for name, value in record.items()}
    if isinstance(flags := record.get("flags"), dict):
        renamed["flags"] = {metric_name(name): flag for name, flag in flags.items()}
    return renamed


def metric_name(name: str) -> str:
    """Return the name of today of a metric.

    Examples:
        >>> metric_name("ledger/old_token"), metric_name("train/loss")
        ('kl/old_token', 'train/loss')
    """
    return PREFIX + name.removeprefix(OLD_PREFIX) if name.startswith(OLD_PREFIX) else name
