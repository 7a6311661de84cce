"""A diagnosis as text: the verdict first, then what speaks for it and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from keel.doctor.examine import Diagnosis, Verdict
from keel.doctor.finding import Evidence, Finding
from keel.doctor.patches import patch
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series
from keel.printing import printable
from keel.tracking.live import sparkline

WORST_FIRST: tuple[Verdict, ...] = ("sick", "watch", "cannot tell", "healthy")
STYLES = {
    "sick": "bold red",
    "watch": "bold yellow",
    "cannot tell": "bold magenta",
    "healthy": "bold green",
    "usual": "green",
}
"""Colors on a terminal, by verdict and level."""
MANY = 4
"""Metrics of which a rule needs one; from more than these on only the first are named."""
WIDTH = 40
"""Characters of a sparkline."""


class Line(NamedTuple):
    """One line, and its color on a terminal."""

    text: str
    style: str = ""


def as_text(diagnosis: Diagnosis, *, everything: bool = False) -> str:
    """Return a diagnosis as lines; the first is the verdict.

    Args:
        diagnosis: Of one run.
        everything: List the rules that could not speak, too, with what would let them.
    """
    return "\n".join(printable(line.text) for line in lines(diagnosis, everything=everything))


def lines(diagnosis: Diagnosis, *, everything: bool = False) -> Iterator[Line]:
    """Yield the lines of a diagnosis with their colors.

    Args:
        diagnosis: Of one run.
        everything: As for `as_text`.
    """
    yield Line(verdict_line(diagnosis), STYLES[diagnosis.verdict])
    yield Line(what_was_read(diagnosis.log), "dim")
    for number, finding in enumerate(diagnosis.findings, 1):
        yield Line("")
        yield Line(f"{number}. {finding.level}: {finding.cause}", STYLES[finding.level])
        yield from _details(finding, diagnosis.log)
    if diagnosis.usual:
        yield Line("")
    for finding in diagnosis.usual:
        yield Line(f"usual: {finding.cause}", STYLES["usual"])
        yield Line(f"   {finding.fix.text}", "dim")
    if diagnosis.suppressed:
        yield Line("")
    for one in diagnosis.suppressed:
        yield Line(f"follows from {one.because}: {one.finding.cause}", "dim")
    yield from _skipped(diagnosis, everything)
    for note in diagnosis.log.notes:
        yield Line(f"note: {note}", "dim")


def verdict_line(diagnosis: Diagnosis) -> str:
    """Return the verdict and its sentence on one line."""
    return f"{diagnosis.verdict}: {' '.join(diagnosis.sentence.split())}"


def what_was_read(log: RunLog) -> str:
    """Say what was read, whose it is and how much there is of it."""
    rows = f"{log.rows:,} row{'s' * (log.rows != 1)}"
    name = "" if log.path is None else f"{log.path}: "
    return f"{name}{log.framework}, {log.layout}, {rows}, {len(log.series):,} known metrics"


def table(diagnoses: Sequence[Diagnosis]) -> list[tuple[str, str, str]]:
    """Return verdict, run and cause of several runs, the worst first."""
    return [(d.verdict, name_of(d), d.sentence) for d in worst_first(diagnoses)]


def worst_first(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Sort diagnoses by their verdicts; equal ones stay in their order."""
    return sorted(diagnoses, key=lambda d: WORST_FIRST.index(d.verdict))


def name_of(diagnosis: Diagnosis) -> str:
    """Return the path of a run, or what was read where there is none."""
    return diagnosis.log.layout if diagnosis.log.path is None else str(diagnosis.log.path)


def chart_of(evidence: Evidence, log: RunLog) -> str:
    """Return the series of evidence as a line of blocks; a constant one tells nothing."""
    series = log.get(evidence.metric)
    if series is None or len(series) < 2 or bool((series.values == series.values[0]).all()):
        return ""
    return sparkline(series.values.tolist(), WIDTH)


def since(evidence: Evidence, series: Series | None) -> str:
    """Say since when, where a series does not break its threshold from the beginning."""
    if evidence.onset is None:
        return ""
    if series is not None and evidence.onset <= int(series.step[0]):
        return ", from the beginning"
    return f", since step {evidence.onset:,}"


def threshold_of(evidence: Evidence) -> str:
    """Return the threshold and where it comes from; empty where there is neither."""
    value = evidence.threshold
    number = "" if value is None or not math.isfinite(value) else f"{value:.4g}"
    return " — ".join(part for part in (number, evidence.threshold_source) if part)


def shortened(need: str) -> str:
    """Return a need of a rule without the rest of many alternatives.

    Examples:
        >>> shortened("a or b"), shortened("a or b or c or d or e")
        ('a or b', 'a or b or 3 others')
    """
    names = need.split(" or ")
    shown = names[:2] if len(names) > MANY else names
    rest = [f"{len(names) - 2} others"] if len(names) > MANY else []
    return " or ".join([*shown, *rest])


def _details(finding: Finding, log: RunLog) -> Iterator[Line]:
    for item in finding.evidence:
        yield Line(f"   {item.label}: {item.text}{since(item, log.get(item.metric))}")
        if chart := chart_of(item, log):
            yield Line(f"     {chart}", "cyan")
        if threshold := threshold_of(item):
            yield Line(f"     threshold: {threshold}", "dim")
    yield Line(f"   fix: {finding.fix.text}", "bold")
    for change in patch(finding.fix, log.framework, log.settings):
        for text in change.lines():
            yield Line(f"     {text}", {"-": "red", "+": "green"}.get(text[0], ""))
    for suspect in finding.others:
        yield Line(f"   or: {suspect.cause}")
        yield Line(f"     to tell: {suspect.test}", "dim")
    yield Line(
        f"   rule {finding.rule}, confidence {finding.confidence:.0%}, source: {finding.source}",
        "dim",
    )


def _skipped(diagnosis: Diagnosis, everything: bool) -> Iterator[Line]:
    count = len(diagnosis.skipped)
    if not count:
        return
    yield Line("")
    rules = f"{count} rule{'s' * (count != 1)} could not speak"
    if not everything:
        yield Line(f"{rules}: the log lacks what they read (--all lists it)", "dim")
        return
    yield Line(f"{rules}, and what would let them:")
    for one in diagnosis.skipped:
        yield Line(f"   {one.rule}: {', '.join(map(shortened, one.missing))}", "dim")
    if diagnosis.log.unmatched:
        yield Line(f"names that mean nothing to Keel: {', '.join(diagnosis.log.unmatched)}", "dim")
