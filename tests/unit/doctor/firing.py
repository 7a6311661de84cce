"""Cases of rules: a log in which a rule speaks, its healthy neighbour, and what it lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from logs import findings_of, make_log

from keel.doctor.finding import Finding
from keel.doctor.rule import RULES, SETTING
from keel.doctor.run_log import RunLog

Columns = Mapping[str, Sequence[float] | float]
RETURN, STD = "rollout/return_mean", "rollout/return_std"
FLAT: dict[str, Sequence[float] | float] = {RETURN: [20.0, 21.0] * 10, STD: 10.0}
"""A return that does not rise in 20 updates."""
RISING: dict[str, Sequence[float] | float] = {
    RETURN: np.linspace(20.0, 400.0, 20).tolist(),
    STD: 10.0,
}
"""A return that does."""


@dataclass(frozen=True)
class Case:
    """One rule, as a test sees it."""

    rule: str
    sick: Columns
    """a log in which it speaks"""
    healthy: Columns
    """the neighbour in which it does not: what differs from `sick`"""
    cause: str
    """part of its sentence, with the numbers"""
    level: str = "sick"
    value: float | None = None
    """value of its first evidence"""
    settings: Mapping[str, Any] = field(default_factory=dict)
    healthy_settings: Mapping[str, Any] | None = None
    framework: str = "keel"

    def log(self) -> RunLog:
        """Return the log in which the rule speaks."""
        return make_log(self.sick, framework=self.framework, settings=self.settings)

    def neighbour(self) -> RunLog:
        """Return the log in which it does not."""
        columns = dict(self.sick) | dict(self.healthy)
        settings = dict(self.settings) | dict(self.healthy_settings or {})
        return make_log(columns, framework=self.framework, settings=settings)


def check_fires(case: Case) -> Finding:
    """Check that the rule says what it should, and return it."""
    finding = findings_of(case.rule, case.log())
    assert finding is not None, f"{case.rule} is silent"
    assert case.cause in finding.cause, finding.cause
    assert finding.level == case.level, finding.cause
    assert finding.evidence, "no evidence"
    if case.value is not None:
        assert finding.evidence[0].value == case.value or np.isclose(
            finding.evidence[0].value, case.value, rtol=1e-3
        ), finding.evidence[0]
    if finding.level != "usual":
        assert finding.others, "no other cause"
        assert any(item.threshold_source for item in finding.evidence), "no source of a threshold"
    return finding


def check_silent(case: Case) -> None:
    """Check that the rule is silent in the healthy neighbour."""
    finding = findings_of(case.rule, case.neighbour())
    assert finding is None, finding.cause if finding else ""


def check_skipped(case: Case) -> None:
    """Check that the rule is skipped, by name, where the log has nothing of what it needs."""
    entry = RULES[case.rule]
    for need in entry.needs:
        names = need.split("|")
        columns = {k: v for k, v in case.sick.items() if k not in names} | {"train/other": 0.0}
        settings = {k: v for k, v in case.settings.items() if SETTING + k not in names}
        rows = max(
            (len(v) for v in case.sick.values() if not isinstance(v, int | float)), default=20
        )
        log = make_log(columns, rows, case.framework, settings)
        assert any(names[0].removeprefix(SETTING) in text for text in entry.missing(log)), need
