"""From a log to a diagnosis: rules in the order of thought, consequences set aside, one verdict."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

from keel.doctor.finding import LEVELS, Finding, plain
from keel.doctor.rule import FAMILIES, RULES, Rule
from keel.doctor.run_log import RunLog

Verdict = Literal["healthy", "watch", "sick", "cannot tell"]
SIGNS = {
    "trust region": "how far updates go (a KL, a clip fraction or ratios)",
    "reward": "what is earned (a return or a reward)",
}
"""Families of which a rule must have spoken before a run is called healthy, and what they read."""


@dataclass(frozen=True)
class Skipped:
    """A rule that could not speak."""

    rule: str
    missing: tuple[str, ...]
    """metrics or settings that would let it"""


@dataclass(frozen=True)
class Suppressed:
    """A finding that is the consequence of another one."""

    finding: Finding
    because: str
    """rule of the finding that explains it"""


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor says of one run."""

    verdict: Verdict
    sentence: str
    """the cause, or why there is none"""
    findings: tuple[Finding, ...]
    """sick and watch, the likeliest cause first"""
    usual: tuple[Finding, ...]
    """what looks odd and is healthy"""
    suppressed: tuple[Suppressed, ...]
    skipped: tuple[Skipped, ...]
    spoken: tuple[str, ...]
    """rules that could speak"""
    log: RunLog

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "verdict": self.verdict,
            "sentence": self.sentence,
            "framework": self.log.framework,
            "layout": self.log.layout,
            "path": None if self.log.path is None else str(self.log.path),
            "rows": self.log.rows,
            "findings": [self._with_patch(finding) for finding in self.findings],
            "usual": [finding.as_dict() for finding in self.usual],
            "suppressed": [{"because": s.because, **s.finding.as_dict()} for s in self.suppressed],
            "skipped": [{"rule": s.rule, "missing": list(s.missing)} for s in self.skipped],
            "notes": list(self.log.notes),
        }

    def _with_patch(self, finding: Finding) -> dict[str, Any]:
        """Return a finding with its fix in the words of the framework."""
        from keel.doctor.patches import patch

        data = finding.as_dict()
        patches = patch(finding.fix, self.log.framework, self.log.settings)
        data["fix"]["patch"] = [plain(one.as_dict()) for one in patches]
        return data

    def __str__(self) -> str:
        from keel.doctor.text import as_text

        return as_text(self)


def examine(log: RunLog, ignore: Collection[str] = ()) -> Diagnosis:
    """Diagnose one run.

    Args:
        log: The run.
        ignore: Rules that shall not speak.
    """
    import keel.doctor.rules  # noqa: F401  (fills the registry)

    rules = sorted(RULES.values(), key=lambda r: FAMILIES.index(r.family))
    found, skipped, spoken = [], [], []
    for entry in rules:
        if entry.id in ignore:
            continue
        if missing := entry.missing(log):
            skipped.append(Skipped(entry.id, tuple(missing)))
            continue
        spoken.append(entry.id)
        if (finding := entry.check(log)) is not None:
            found.append(_signed(finding, entry))
    findings, suppressed = _set_consequences_aside(sorted(found, key=_rank))
    usual = tuple(finding for finding in findings if finding.level == "usual")
    findings = [finding for finding in findings if finding.level != "usual"]
    verdict, sentence = _judge(log, findings, spoken)
    return Diagnosis(
        verdict, sentence, tuple(findings), usual, suppressed, tuple(skipped), tuple(spoken), log
    )


def _signed(finding: Finding, entry: Rule) -> Finding:
    """Return a finding with the fields of its rule."""
    return replace(
        finding,
        rule=entry.id,
        family=entry.family,
        source=finding.source or entry.source,
        suppresses=finding.suppresses or entry.suppresses,
    )


def _rank(finding: Finding) -> tuple[int, int, float]:
    """Order findings: level, then order of thought, then confidence."""
    level = LEVELS.index(finding.level)
    return level, FAMILIES.index(finding.family), -finding.confidence


def _set_consequences_aside(
    findings: list[Finding],
) -> tuple[list[Finding], tuple[Suppressed, ...]]:
    """Split findings into causes and consequences; what is a consequence explains nothing.

    What follows from no other finding is a cause, in whichever family it stands.
    """
    kept: list[Finding] = []
    suppressed = []
    follows = {rule for finding in findings for rule in finding.suppresses}
    for finding in sorted(
        findings, key=lambda f: (f.rule in follows, FAMILIES.index(f.family), _rank(f))
    ):
        because = next((f.rule for f in kept if finding.rule in f.suppresses), None)
        if because is None or finding.level == "usual":
            kept.append(finding)
            continue
        suppressed.append(Suppressed(finding, because))
        if finding.level == "sick":  # a cause is as bad as what follows from it
            kept = [_worsened(f) if f.rule == because else f for f in kept]
    return sorted(kept, key=_rank), tuple(suppressed)


def _worsened(cause: Finding) -> Finding:
    """Return a cause as sick as its consequence; a sick thermometer only hides what is so."""
    return cause if cause.family == "thermometer" else replace(cause, level="sick")


def _judge(log: RunLog, findings: list[Finding], spoken: list[str]) -> tuple[Verdict, str]:
    """Return the verdict and its sentence."""
    if findings:
        first = findings[0]
        return ("sick" if first.level == "sick" else "watch"), first.cause
    if log.rows == 0:
        return "cannot tell", "the log has no rows"
    families = {RULES[name].family for name in spoken}
    lacking = [sign for family, sign in SIGNS.items() if family not in families]
    if lacking:
        return "cannot tell", f"the log does not say {' or '.join(lacking)}"
    return "healthy", f"{len(spoken)} rules looked, none found anything"
