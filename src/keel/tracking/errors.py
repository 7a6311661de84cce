"""Errors and warnings of runs on disk."""

from __future__ import annotations

from keel.errors import KeelError


class RunError(KeelError):
    """A run directory that cannot be used: taken, locked, read-only, vanished or damaged."""


class RunWarning(UserWarning):
    """Something of a run was lost (a metric line, a sink) while training goes on."""
