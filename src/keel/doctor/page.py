"""Diagnoses as one self-contained page: verdicts, evidence with charts, fixes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from keel.doctor.chart import chart
from keel.doctor.examine import Diagnosis
from keel.doctor.finding import Evidence, Finding
from keel.doctor.patches import Patch, patch
from keel.doctor.run_log import RunLog
from keel.doctor.text import (
    name_of,
    shortened,
    since,
    threshold_of,
    verdict_line,
    what_was_read,
    worst_first,
)
from keel.printing import printable
from keel.templates import Markup, Templates, join, style
from keel.tracking.files import write_file

HTML = Templates(__package__, "doctor.html")
FOOT = (
    "Evidence is the median or the newest values of a series; red dashes are the threshold, the "
    "orange area begins where it was first broken, ✕ marks values that are not finite. One value "
    "proves nothing: a breach is 3 of the last 5 values, or a quarter of the run."
)


def write_page(diagnoses: Sequence[Diagnosis], path: Path) -> None:
    """Write the page of diagnoses to `path`."""
    write_file(path, page(diagnoses).encode(errors="replace"))


def page(diagnoses: Sequence[Diagnosis]) -> str:
    """Return the page as HTML; everything that comes from outside is escaped."""
    ordered = worst_first(diagnoses)
    title = printable(verdict_line(ordered[0]))
    if len(ordered) > 1:
        title = f"{len(ordered)} runs, the worst {title}"
    return HTML.fill(
        "page",
        title=title,
        heading="What the doctor says",
        style=style(__package__, "doctor.css"),
        summary=_summary(ordered) if len(ordered) > 1 else Markup(),
        runs=join(_run(number, d) for number, d in enumerate(ordered)),
        foot=FOOT,
    )


def _summary(diagnoses: Sequence[Diagnosis]) -> Markup:
    rows = (
        HTML.fill(
            "row",
            kind=_kind(d.verdict),
            verdict=d.verdict,
            number=number,
            name=printable(name_of(d)),
            cause=printable(d.sentence),
        )
        for number, d in enumerate(diagnoses)
    )
    return HTML.fill("summary", rows=join(rows))


def _run(number: int, diagnosis: Diagnosis) -> Markup:
    log = diagnosis.log
    follows = (f"{s.finding.cause} (from {s.because})" for s in diagnosis.suppressed)
    usual = (f"{finding.cause}. {finding.fix.text}" for finding in diagnosis.usual)
    return HTML.fill(
        "run",
        number=number,
        kind=_kind(diagnosis.verdict),
        verdict=diagnosis.verdict,
        sentence=printable(diagnosis.sentence),
        read=printable(what_was_read(log)),
        findings=join(finding_card(finding, log) for finding in diagnosis.findings),
        usual=_list("usual", usual),
        follows=_list("follows", follows),
        skipped=_skipped(diagnosis),
        notes=_list("notes", log.notes),
    )


def finding_card(finding: Finding, log: RunLog) -> Markup:
    """Return one finding as HTML: evidence with charts, fix, other causes.

    Args:
        finding: Of a diagnosis.
        log: The log it was found in.
    """
    return HTML.fill(
        "finding",
        kind=finding.level,
        level=finding.level,
        cause=printable(finding.cause),
        evidence=join(_evidence(item, log) for item in finding.evidence),
        fix=printable(finding.fix.text),
        patch=_patch(patch(finding.fix, log.framework, log.settings)),
        others=_others(finding),
        rule=finding.rule,
        family=finding.family,
        confidence=f"{finding.confidence:.0%}",
        source=printable(finding.source),
    )


def _evidence(item: Evidence, log: RunLog) -> Markup:
    series = log.get(item.metric)
    threshold = printable(threshold_of(item))
    return HTML.fill(
        "evidence",
        label=printable(item.label),
        text=printable(f"{item.text}{since(item, series)}"),
        chart=chart(item, series),
        threshold=HTML.fill("threshold", text=threshold) if threshold else Markup(),
    )


def _patch(patches: Sequence[Patch]) -> Markup:
    lines = [line for change in patches for line in change.lines()]
    if not lines:
        return Markup()
    kinds = {"-": "removed", "+": "added"}
    return HTML.fill(
        "patch",
        lines=join(HTML.fill(kinds.get(line[0], "line"), text=printable(line)) for line in lines),
    )


def _others(finding: Finding) -> Markup:
    if not finding.others:
        return Markup()
    rows = (
        HTML.fill("other", cause=printable(s.cause), test=printable(s.test)) for s in finding.others
    )
    return HTML.fill("others", rows=join(rows))


def _list(template: str, items: Iterable[str]) -> Markup:
    entries = [HTML.fill("item", text=printable(item)) for item in items]
    return HTML.fill(template, items=join(entries)) if entries else Markup()


def _skipped(diagnosis: Diagnosis) -> Markup:
    if not diagnosis.skipped:
        return Markup()
    rows = (
        HTML.fill("skip", rule=one.rule, missing=", ".join(map(shortened, one.missing)))
        for one in diagnosis.skipped
    )
    count = len(diagnosis.skipped)
    said = f"{count} rule{'s' * (count != 1)} could not speak, and what would let them"
    return HTML.fill("skipped", count=said, rows=join(rows))


def _kind(verdict: str) -> str:
    """Return the verdict as the name of a class of styles."""
    return verdict.partition(" ")[0]
