"""A diagnosis as text: the verdict first, then what speaks for it and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from keel.doctor.examine import Diagnosis
from keel.doctor.finding import Finding


def as_text(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as lines; the first is the verdict."""
    lines = [f"{diagnosis.verdict}: {diagnosis.sentence}"]
    for number, finding in enumerate(diagnosis.findings, 1):
        lines += ["", f"{number}. {finding.cause} ({finding.level})", *_details(finding)]
    for finding in diagnosis.usual:
        lines += ["", f"usual: {finding.cause}"]
    for one in diagnosis.suppressed:
        lines += ["", f"follows from {one.because}: {one.finding.cause}"]
    return "\n".join(lines)


def _details(finding: Finding) -> Iterator[str]:
    for item in finding.evidence:
        since = "" if item.onset is None else f", since step {item.onset:,}"
        yield f"   {item.label}: {item.text}{since}"
        if item.threshold_source:
            yield f"   threshold: {item.threshold_source}"
    yield f"   fix: {finding.fix.text}"
    for suspect in finding.others:
        yield f"   or: {suspect.cause}; to tell: {suspect.test}"
    yield f"   rule {finding.rule}, confidence {finding.confidence:.0%}, source: {finding.source}"
