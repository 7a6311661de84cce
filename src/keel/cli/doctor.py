"""`keel doctor PATH… | -`: what is wrong with a run, why, and what to do, from its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from tyro.conf import FlagCreatePairsOff, Positional, arg

from keel.cli.arguments import read_options, split_flags
from keel.cli.strict_json import print_json
from keel.errors import InputError
from keel.printing import printable

if TYPE_CHECKING:
    from keel.doctor.examine import Diagnosis
    from keel.doctor.text import Line

FIX = "--fix"
DOCUMENTS = (".yaml", ".yml", ".py", ".sh", ".md")
"""Ends of a word after `--fix` that names the file to write; others are logs."""
SHOW = "show"


@dataclass(frozen=True)
class Doctor:
    """Say whether a run is healthy, or what its cause is, with the evidence and the fix.

    Examples: keel doctor runs/NAME
              keel doctor logs/progress.csv --html report.html
              keel doctor runs --fail-on sick
    """

    paths: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN|FOLDER|LOG|- …")] = ()
    """Runs of Keel, folders of runs, or logs of other libraries; `-` reads the standard input."""
    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print one JSON object (of several runs a list of them) in place of text."""
    html: Annotated[Path | None, arg(metavar="FILE.html")] = None
    """Write it as one page with charts, which needs nothing else."""
    fail_on: Literal["never", "sick", "watch"] = "never"
    """Exit status 1 if a run is sick, or worth watching: for continuous integration."""
    fix: Annotated[str | None, arg(metavar="[FILE]")] = None
    """Write the settings with the fix of the first finding (fixed.yaml), and print the command;
    for logs of others, show what to change."""
    format: Annotated[str | None, arg(metavar="LAYOUT")] = None
    """How the log is laid out; by default it is recognized."""
    framework: Annotated[str | None, arg(metavar="NAME")] = None
    """Who wrote it (sb3, cleanrl, trl, verl, …); by default it is recognized."""
    map: Annotated[tuple[str, ...], arg(metavar="METRIC=COLUMN …")] = ()
    """Meaning of columns: step=timesteps train/approx_kl=my_kl."""
    set: Annotated[tuple[str, ...], arg(metavar="SETTING=VALUE …")] = ()
    """Facts that the log does not say: gamma=0.9 region.target_kl=0.02 facts.actions=4."""
    ignore: Annotated[tuple[str, ...], arg(metavar="RULE …")] = ()
    """Rules that shall not speak."""
    rules: Annotated[bool, FlagCreatePairsOff] = False
    """List all rules: family, what they read, where they come from."""
    all: Annotated[bool, FlagCreatePairsOff] = False
    """List the rules that could not speak, with what would let them."""


def run(args: Sequence[str]) -> int:
    """Diagnose."""
    options = read_options(Doctor, _with_file(split_flags(args)), "keel doctor")
    if options.rules:
        _print_rules(options.json)
        return 0
    if not options.paths:
        raise InputError("doctor: of what? keel doctor runs/NAME, or a log, or - for stdin")
    diagnoses = _diagnose(options)
    if options.fix is not None and len(diagnoses) > 1:
        raise InputError(f"--fix: of one run at a time, these are {len(diagnoses)}")
    if options.json:
        print_json([d.as_dict() for d in diagnoses] if len(diagnoses) > 1 else _one(diagnoses))
    else:
        _print(diagnoses, options.all)
    if options.html is not None:
        from keel.doctor.page import write_page

        write_page(diagnoses, options.html)
        if not options.json:
            print(printable(f"page: {options.html}"))  # noqa: T201
    if options.fix is not None:
        from keel.cli.doctor_fix import write_fix

        write_fix(diagnoses[0], None if options.fix == SHOW else Path(options.fix), options.json)
    return _status(diagnoses, options.fail_on)


def _with_file(words: Sequence[str]) -> list[str]:
    """Return words in which `--fix` has a value, which the user may leave out."""
    given: list[str] = []
    for word in words:
        if given[-1:] == [FIX] and not word.endswith(DOCUMENTS):
            given.append(SHOW)
        given.append(word)
    return [*given, SHOW] if given[-1:] == [FIX] else given


def _diagnose(options: Doctor) -> list[Diagnosis]:
    from keel.doctor.api import diagnose

    found = diagnose(
        *options.paths,
        layout=options.format,
        framework=options.framework,
        mapping=dict(_pair(text, "--map", "METRIC=COLUMN") for text in options.map) or None,
        settings={
            name: _value(value)
            for name, value in (_pair(text, "--set", "SETTING=VALUE") for text in options.set)
        },
        ignore=options.ignore,
    )
    return found if isinstance(found, list) else [found]


def _one(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    return diagnoses[0].as_dict()


def _pair(assignment: str, flag: str, form: str) -> tuple[str, str]:
    name, equals, value = assignment.partition("=")
    if not (name and equals and value):
        raise InputError(f"{flag} {assignment}: expected {form}")
    return name, value


def _value(text: str) -> Any:
    """Return a number, a truth value or a word; 1e-3 is a number, which YAML takes for a word."""
    try:
        return float(text) if "e" in text.lower() else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return text


def _print(diagnoses: Sequence[Diagnosis], everything: bool) -> None:
    """Print a table of verdicts where there are several, then each run, the worst first."""
    from rich.text import Text

    from keel.cli.render import simple_table
    from keel.doctor.text import STYLES, lines, table, worst_first
    from keel.tracking.progress import PipedConsole

    console = PipedConsole(highlight=False, soft_wrap=True)
    several = len(diagnoses) > 1
    if several:
        rows = [
            (Text(verdict, style=STYLES[verdict]), name, cause)
            for verdict, name, cause in table(diagnoses)
        ]
        console.print(simple_table(("verdict", "run", "cause"), rows, left=(0, 1, 2)))
    for diagnosis in worst_first(diagnoses):
        if several:
            console.print()
        for line in lines(diagnosis, everything=everything):
            console.print(_colored(line))


def _colored(line: Line) -> Any:
    from rich.text import Text

    return Text(line.text, style=line.style)


def _print_rules(as_json: bool) -> None:
    from keel.doctor.tables import rule_rows

    columns = ("rule", "family", "reads", "source")
    rows = rule_rows()
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    from keel.cli.render import simple_table
    from keel.tracking.progress import PipedConsole

    PipedConsole(highlight=False).print(simple_table(columns, rows, left=range(4)))


def _status(diagnoses: Sequence[Diagnosis], fail_on: str) -> int:
    failing = {"never": (), "sick": ("sick",), "watch": ("sick", "watch")}[fail_on]
    return int(any(diagnosis.verdict in failing for diagnosis in diagnoses))
