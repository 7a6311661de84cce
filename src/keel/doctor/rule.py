"""Rules: small pure functions over a log, with a declared list of what they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keel.doctor.finding import Finding
from keel.doctor.run_log import RunLog

FAMILIES = (
    "thermometer",
    "consistency",
    "numerics",
    "trust region",
    "critic",
    "exploration",
    "reward",
    "language",
    "statistics",
)
"""The order of thought: whether the numbers can be true comes before what they say."""
SETTING = "setting:"
Check = Callable[[RunLog], Finding | None]


@dataclass(frozen=True)
class Rule:
    """A rule and what it needs."""

    id: str
    """kebab-case, for people and for `--ignore`"""
    family: str
    check: Check
    needs: tuple[str, ...]
    """metrics by Keel's names, all of them; `a|b`: one of both; `setting:NAME`: a setting"""
    source: str
    """where the rule comes from: a paper, a guide, an issue, or "Keel" for what was calibrated"""
    rows: int = 1
    """rows that the log must have"""
    suppresses: tuple[str, ...] = ()
    """rules whose findings are consequences of this one"""
    number: int | None = None
    """number in the list that the rules began with"""

    def missing(self, log: RunLog) -> list[str]:
        """Return what this rule needs and the log does not have, as sentences."""
        lacking = [need for need in self.needs if not any(_has(log, n) for n in need.split("|"))]
        sentences = [need.replace("|", " or ").replace(SETTING, "") for need in lacking]
        if log.rows < self.rows:
            sentences.append(f"{self.rows} rows")
        return sentences


RULES: dict[str, Rule] = {}
"""Every rule, by its id; filled by the modules of `keel.doctor.rules`."""


def rule(
    id: str,
    family: str,
    *,
    needs: tuple[str, ...],
    source: str,
    rows: int = 1,
    suppresses: tuple[str, ...] = (),
    number: int | None = None,
) -> Callable[[Check], Check]:
    """Register a function as a rule.

    Args:
        id: Name of the rule, in kebab-case.
        family: One of `FAMILIES`.
        needs: Metrics it reads; see `Rule.needs`.
        source: Where it comes from.
        rows: Rows that the log must have.
        suppresses: Rules whose findings are consequences of this one.
        number: Number in the list that the rules began with.
    """
    assert family in FAMILIES, family

    def register(check: Check) -> Check:
        assert id not in RULES, f"{id} stands twice"
        quiet = np.errstate(all="ignore")(check)  # logs hold infinities
        RULES[id] = Rule(id, family, quiet, needs, source, rows, suppresses, number)
        return check

    return register


def _has(log: RunLog, need: str) -> bool:
    if need.startswith(SETTING):
        return need.removeprefix(SETTING) in log.settings
    return need in log
