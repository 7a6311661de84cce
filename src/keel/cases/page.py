"""A case as one self-contained page: before, finding, fix, after, and what was believed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from keel.cases.figures import Compared, compare
from keel.doctor.chart import compare_chart
from keel.doctor.page import finding_card
from keel.doctor.text import verdict_line
from keel.printing import printable
from keel.templates import Markup, Templates, join, style
from keel.tracking.files import write_file

if TYPE_CHECKING:
    from keel.cases.running import Arm, Outcome

HTML = Templates(__package__, "case.html")
DOCTOR = "keel.doctor"
"""Package of the style sheet that findings are shown with."""


def write_page(outcome: Outcome, path: Path) -> None:
    """Write the page of a case to `path`."""
    write_file(path, page(outcome).encode(errors="replace"))


def page(outcome: Outcome) -> str:
    """Return the page as HTML; everything that comes from outside is escaped."""
    case = outcome.case
    rows = compare(case.shown, outcome.sick.path, outcome.cured.path)
    return HTML.fill(
        "page",
        title=f"Case {case.name}: {case.title}",
        heading=f"{case.title[0].upper()}{case.title[1:]}",
        style=Markup(style(DOCTOR, "doctor.css") + style(__package__, "case.css")),
        symptom=case.symptom,
        belief=case.belief,
        note=case.note,
        cause=printable(outcome.finding.cause),
        lesson=case.lesson,
        rounds=join(_round(outcome, number) for number in range(len(outcome.rounds))),
        after=_verdict(outcome.cured),
        next=HTML.fill("next") if outcome.cured.diagnosis.findings else Markup(),
        table=join(_row(row) for row in rows),
        charts=join(_chart(row) for row in rows),
        again=_commands(outcome),
        form=outcome.form,
        seed=outcome.seed,
    )


def _round(outcome: Outcome, number: int) -> Markup:
    visit = outcome.rounds[number]
    return HTML.fill(
        "round",
        heading="Without it, the next cause" if number else "Before",
        verdict=_verdict(visit.arm),
        finding=finding_card(visit.finding, visit.arm.diagnosis.log),
        repair=Markup() if number else _repair(outcome),
    )


def _verdict(arm: Arm) -> Markup:
    diagnosis = arm.diagnosis
    return HTML.fill(
        "verdict",
        kind=diagnosis.verdict.partition(" ")[0],
        line=printable(verdict_line(diagnosis)),
        run=printable(str(arm.path)),
    )


def _repair(outcome: Outcome) -> Markup:
    case = outcome.case
    if not case.repair:
        return Markup()
    settings = ", ".join(f"{name}: {value}" for name, value in case.repair.items())
    said = HTML.fill("stopped", text=printable(outcome.stopped)) if outcome.stopped else Markup()
    return HTML.fill("repair", stopped=said, text=case.repaired, settings=settings)


def _row(row: Compared) -> Markup:
    before, after = row.texts
    return HTML.fill(
        "row",
        label=row.shown.label,
        metric=row.shown.metric,
        over="median of the last fifth" if row.shown.over == "end" else "mean of the whole run",
        before=before,
        after=after,
        kind="healthy" if row.improved else "watch",
        word="better" if row.improved else "not better",
    )


def _chart(row: Compared) -> Markup:
    drawn = compare_chart(f"{row.shown.label}, before and after", row.before, row.after)
    return HTML.fill("chart", label=row.shown.label, chart=drawn) if drawn else Markup()


def _commands(outcome: Outcome) -> str:
    form = "" if outcome.form == "usual" else f" --{outcome.form}"
    seed = f" --seed {outcome.seed}" if outcome.seed else ""
    lines = [f"keel case {outcome.case.name}{form}{seed}"]
    lines += [f"keel doctor {arm.path}" for arm in (outcome.sick, outcome.cured)]
    lines.append(f"keel compare {outcome.sick.path.parent} {outcome.cured.path.parent}")
    return printable("\n".join(lines))
