"""`keel case NAME`: a sick run, its diagnosis, the cure and the run after it, on one page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import FlagCreatePairsOff, Positional, arg

from keel.cli.arguments import read_options
from keel.cli.strict_json import print_json
from keel.errors import InputError

if TYPE_CHECKING:
    from keel.cases.running import Outcome

INTERRUPTED = 130


@dataclass(frozen=True)
class CaseOptions:
    """Train a run that was sick for somebody, let the doctor find the cause from its log alone,
    apply the fix, train again, and write one page: before, finding, after, and what was believed.

    Runs that are finished are not trained again: the same command goes on where it stopped.

    Examples: keel case --list
              keel case kl-explosion
              keel case line-search-collapse --full
    """

    name: Annotated[Positional[str], arg(metavar="NAME")] = ""
    """Of the case."""
    list: Annotated[bool, FlagCreatePairsOff] = False
    """List the cases, with how long each takes."""
    short: Annotated[bool, FlagCreatePairsOff] = False
    """The shortened form, of seconds: the finding is the same, the cure shows less."""
    full: Annotated[bool, FlagCreatePairsOff] = False
    """The long form."""
    seed: int = 0
    """Random seed of both runs."""
    runs: Annotated[Path, arg(metavar="DIR")] = Path("runs")
    """Where runs are kept; those of a case are in DIR/case-NAME."""
    overwrite: Annotated[bool, FlagCreatePairsOff] = False
    """Train again what is there already."""
    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print one JSON object in place of text."""


def run(args: Sequence[str]) -> int:
    """Run a case, or list them."""
    options = read_options(CaseOptions, args, "keel case")
    if options.list:
        _print_cases(options.json)
        return 0
    if not options.name:
        raise InputError("case: which one? `keel case --list` lists them")
    if options.short and options.full:
        raise InputError("case: --short or --full, not both")
    if options.seed < 0:
        raise InputError(f"--seed: expected 0 or more, got {options.seed}")
    from keel.cases.catalogue import case_named

    case = case_named(options.name)
    try:
        outcome = _run(options, 1.0 + (1 if options.short else case.rounds))
    except (KeyboardInterrupt, SystemExit) as stop:  # the latter after SIGTERM
        words = " ".join(["keel case", *args]).replace(" --overwrite", "")
        print(f"keel: interrupted; what is finished stays, go on with: {words}", file=sys.stderr)  # noqa: T201
        return INTERRUPTED if isinstance(stop, KeyboardInterrupt) else int(stop.code or 0)
    if options.json:
        print_json(as_dict(outcome))
    else:
        _print_summary(outcome)
    return 0


def _run(options: CaseOptions, parts: float) -> Outcome:
    """Run a case of so many runs, and show how far it is."""
    from keel.cases.running import run_case
    from keel.tracking.progress import PipedConsole, WorkProgress

    form = "short" if options.short else "full" if options.full else "usual"
    console = PipedConsole(highlight=False, soft_wrap=True)
    done: dict[str, float] = {}
    with WorkProgress(f"keel case {options.name}", parts, "sick run") as progress:

        def advance(part: str, share: float) -> None:
            progress.advance(max(0.0, share - done.get(part, 0.0)), part)
            done[part] = share

        def tell(line: str) -> None:
            if not options.json:
                console.print(line)

        return run_case(
            options.name,
            runs=options.runs,
            form=form,
            seed=options.seed,
            overwrite=options.overwrite,
            tell=tell,
            advance=advance,
        )


def _print_cases(as_json: bool) -> None:
    """Print the cases with what they show and how long they take."""
    from keel.cases.catalogue import CASES

    columns = ("case", "shows", "note", "usual", "full")
    rows = [
        (case.name, case.title, case.note, case.minutes["usual"], case.minutes["full"])
        for case in CASES.values()
    ]
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    from keel.cli.render import simple_table
    from keel.tracking.progress import PipedConsole

    PipedConsole(highlight=False).print(simple_table(columns, rows, left=range(5)))


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """Return what a case came to as plain data.

    Args:
        outcome: Of a case.
    """
    from keel.cases.figures import compare
    from keel.doctor.finding import plain

    rows = compare(outcome.case.shown, outcome.sick.path, outcome.cured.path)
    data = {
        "case": outcome.case.name,
        "form": outcome.form,
        "seed": outcome.seed,
        "findings": [
            {
                "rule": visit.finding.rule,
                "family": visit.finding.family,
                "cause": visit.finding.cause,
            }
            for visit in outcome.rounds
        ],
        "changes": {one.setting: one.new for one in outcome.patches},
        "stopped": outcome.stopped or None,
        "repair": dict(outcome.case.repair),
        "verdicts": {arm.name: arm.diagnosis.verdict for arm in (outcome.sick, outcome.cured)},
        "runs": {arm.name: str(arm.path) for arm in (outcome.sick, outcome.cured)},
        "metrics": {
            row.shown.metric: dict(zip(("before", "after"), row.values, strict=True))
            for row in rows
        },
        "html": str(outcome.html),
        "png": str(outcome.png),
    }
    readable: dict[str, Any] = plain(data)
    return readable


def _print_summary(outcome: Outcome) -> None:
    """Print before and after, and where the page is."""
    from keel.cases.figures import compare
    from keel.cli.render import simple_table
    from keel.tracking.progress import PipedConsole

    console = PipedConsole(highlight=False, soft_wrap=True)
    rows = [
        (row.shown.label, *row.texts)
        for row in compare(outcome.case.shown, outcome.sick.path, outcome.cured.path)
    ]
    console.print()
    console.print(simple_table(("", "before", "after"), rows, left=(0,)))
    console.print(f"the author believed: {outcome.case.belief}", style="dim")
    console.print(f"what it was: {outcome.case.lesson}")
    console.print(f"page: {outcome.html}")
    console.print(f"picture: {outcome.png}")
