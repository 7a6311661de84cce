"""Changes of settings that fixes propose, relative to what is set."""

from __future__ import annotations

from keel.doctor.finding import Change
from keel.doctor.run_log import RunLog

PULL = 1.0
"""Coefficient that held a hacked model of Keel's at its reference; 0.05 did not."""


def scaled(log: RunLog, setting: str, factor: float, instead_of: str = "") -> Change:
    """Return a change of a setting by a factor: to a value where the present one is known.

    Args:
        log: The run.
        setting: Keel's dotted name.
        factor: What it is multiplied by.
        instead_of: Setting that holds where this one is not set.
    """
    value = log.setting(setting)
    if value is None and instead_of:
        value = log.setting(instead_of)
    if value is None or value == 0.0:
        return Change(setting, times=factor)
    return Change(setting, to=float(f"{factor * value:.3g}"))


def pull_to_reference(log: RunLog) -> tuple[Change, ...]:
    """Return what pulls a language model harder to its reference; nothing for other runs.

    A coefficient that nothing used has no size that could be scaled.

    Args:
        log: The run.
    """
    if not log.is_language:
        return ()
    unused = log.settings.get("kl.place") == "none"
    coef = Change("kl.coef", to=PULL) if unused else scaled(log, "kl.coef", 5.0)
    return Change("kl.place", to="loss"), coef
