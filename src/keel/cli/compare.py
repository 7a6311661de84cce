"""`keel compare RUN…`: which is better, and how sure is that?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import Positional, arg

from keel.cli.arguments import read_options, split_flags, take_list
from keel.cli.strict_json import print_json
from keel.errors import InputError
from keel.printing import printable

if TYPE_CHECKING:
    from keel.compare import Comparison
    from keel.compare.page import Sections


@dataclass(frozen=True)
class Compare:
    """Compare groups of runs over their seeds: keep, roll back, or not distinguishable.

    Examples: keel compare runs/scalar runs/quantile
              keel compare runs --by tag --baseline no_norm --html compare.html
              keel compare runs/mine sb3=logs/PPO_1
    """

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN|FOLDER|LOG|LABEL=PATH …")]
    """Runs, folders of runs, or logs of SB3, CleanRL, TRL, verl, RLlib, rsl_rl and others;
    LABEL=PATH names a group."""
    by: Annotated[str, arg(metavar="name|tag|FIELD")] = "name"
    """Key of a group: the run's name, its tag, or a setting such as region.max_log_ratio."""
    baseline: Annotated[str | None, arg(metavar="GROUP")] = None
    """The group all others are compared with; by default the first."""
    metric: Annotated[str | None, arg(metavar="METRIC")] = None
    """Metric to compare; default: eval/return_mean if every run ends with it, else rollout/…."""
    steps: int | None = None
    """Compare up to this step; by default up to the end of the shortest run."""
    tail: float = 0.1
    """A run's score is its mean over this last share of the steps."""
    threshold: float | None = None
    """For steps to threshold; by default 90 % of the baseline's way."""
    drop: float = 0.1
    """Roll back if worse by more than this share."""
    slowdown: float = 2.0
    """Roll back if slower by more than this factor."""
    map: Annotated[tuple[str, ...], arg(metavar="METRIC=COLUMN …")] = ()
    """Meaning of the names in a log: step=timesteps rollout/return_mean=reward."""
    png: Annotated[Path | None, arg(metavar="FILE.png")] = None
    """Draw the comparison."""
    html: Annotated[Path | None, arg(metavar="FILE.html")] = None
    """Write it as one page that needs nothing else."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of text."""


def run(args: Sequence[str]) -> int:
    """Compare."""
    tags, rest = take_list(split_flags(args), "--tags")
    options = read_options(Compare, rest, "keel compare")
    if tags:
        options = _by_tag(options, tags)
    if not options.runs:
        raise InputError("compare what? keel compare runs/A runs/B")
    from keel.compare import as_json
    from keel.compare.api import compare_runs

    comparison = compare_runs(
        *options.runs,
        by=options.by,
        groups=tuple(tags),
        baseline=options.baseline,
        metric=options.metric,
        steps=options.steps,
        tail=options.tail,
        threshold=options.threshold,
        drop=options.drop,
        slowdown=options.slowdown,
        mapping=dict(_pair(assignment) for assignment in options.map),
    )
    if options.json:
        print_json(as_json(comparison))
    else:
        print_comparison(comparison)
    write_files(comparison, options.png, options.html, quiet=options.json)
    return 0


def _by_tag(options: Compare, tags: Sequence[str]) -> Compare:
    """Return options that compare tags with the first of them, in `runs` unless runs are named."""
    return replace(
        options,
        runs=options.runs or ("runs",),
        by="tag",
        baseline=options.baseline or tags[0],
    )


def write_files(
    comparison: Comparison,
    png: Path | None,
    html: Path | None,
    *,
    quiet: bool,
    sections: Sections = (),
) -> None:
    """Write the picture and the page that were asked for; `sections` go onto the page."""
    if png is not None:
        from keel.compare.picture import write_picture

        write_picture(comparison, png)
    if html is not None:
        from keel.compare.page import write_page

        write_page(comparison, html, sections)
    for kind, path in (("picture", png), ("page", html)):
        if path is not None and not quiet:
            print(printable(f"{kind}: {path}"))  # noqa: T201


def print_comparison(comparison: Comparison) -> None:
    """Print tables, verdicts, differences of the configurations, and notes."""
    from rich.text import Text

    from keel.cli.render import simple_table
    from keel.compare import tables
    from keel.compare.verdict import percent
    from keel.tracking.progress import PipedConsole

    console = PipedConsole(highlight=False)
    console.print(Text(tables.title(comparison), style="bold"))
    for table in (tables.scores(comparison), tables.costs(comparison)):
        console.print()
        console.print(simple_table(table.columns, table.rows))
    styles = {
        "keep": "bold green",
        "slightly worse": "bold magenta",
        "roll back": "bold red",
        "not distinguishable": "bold yellow",
    }
    for pair in comparison.pairs:
        console.print()
        verdict = pair.verdict
        line = Text(f"{pair.variant} against {pair.baseline}: ")
        console.print(line.append(verdict.decision, style=styles[verdict.decision]))
        better = percent(float(pair.better.estimate))
        for reason in (*verdict.reasons, f"better in {better} of pairs of runs"):
            console.print(Text(f"  {reason}"))
        if pair.changes:
            changes = tables.changes(pair)
            console.print(simple_table(changes.columns, changes.rows))
    for note in comparison.notes:
        console.print()
        console.print(Text(note, style="dim"))


def _pair(assignment: str) -> tuple[str, str]:
    name, equals, column = assignment.partition("=")
    if not (name and equals and column):
        raise InputError(f"--map {assignment}: expected METRIC=COLUMN")
    return name, column
