"""`keel ablate PLAN|ENV`: train a grid of settings over seeds, and compare."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional, arg

from keel.cli.arguments import read_known_options
from keel.cli.legacy_flags import settle, translate_train
from keel.cli.settings import Resolved
from keel.config import Config, parse_yaml
from keel.errors import InputError, KeelError

if TYPE_CHECKING:
    from keel.ablate import Plan, Task
    from keel.ablate.watch import Watched
    from keel.compare import Comparison
    from keel.compare.tables import Table

PLANS = "`keel ablate --plans` lists those that come with Keel"


@dataclass(frozen=True)
class Ablate:
    """Train every cell of a grid over the same seeds, and compare the cells with the first.

    Cells that are finished are never trained twice: the same command goes on where it stopped.
    Other flags are those of `keel train`, and hold for all cells.

    Examples: keel ablate log-ratio-clamp
              keel ablate Hopper-v5 --vary region.max_log_ratio=20,10,5 --total-steps 3e5
    """

    plan: Annotated[Positional[str], arg(metavar="PLAN|FILE.yaml|ENV")]
    """A plan, a file of one, or an environment with --vary."""
    vary: Annotated[tuple[str, ...], arg(metavar="FIELD=VALUE,VALUE …")] = ()
    """Settings and the values to try; several make a grid."""
    seeds: tuple[int, ...] = ()
    """In place of the plan's; 0 1 2 if there is none."""
    runs: Annotated[Path, arg(metavar="DIR")] = Path("runs")
    """Folder of the runs."""
    name: str | None = None
    """The folder of this ablation in DIR; by default the plan's name."""
    at_once: int | None = None
    """Runs at a time; by default as many as there are cores for."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Only say what would be trained."""
    trust_code: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Import code that the plan or a file names, also from outside of Keel."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the comparison as one JSON object."""


def run(args: Sequence[str]) -> int:
    """Plan, train what is missing, compare."""
    if "--plans" in args:
        from keel.ablate.plan import names

        print("\n".join(names()))  # noqa: T201
        return 0
    options, rest = read_known_options(Ablate, translate_train(args), "keel ablate")
    if options.at_once is not None and options.at_once < 1:
        raise InputError(f"--at-once: expected 1 or more, got {options.at_once}")
    plan = _plan(options, rest)
    from keel.ablate import check_code, tasks_of
    from keel.tracking.directory import hold_folder

    tasks = tasks_of(plan, options.runs)
    if options.dry_run:
        for task in tasks:
            print(f"{task.state:<9} {task.label}")  # noqa: T201
        return 0
    _require_trust(plan, options, rest)
    check_code(task for task in tasks if task.state != "finished")
    with hold_folder(options.runs / plan.name):
        failed = _train(plan, tasks, options)
        _compare(plan, options)
    return 1 if failed else 0


def _plan(options: Ablate, rest: list[str]) -> Plan:
    """Return the plan, with flags of `keel train` on top of what all cells share."""
    from keel.ablate.plan import Plan, checked, grid, names, plan_named
    from keel.cli.environments import parse

    plan = plan_named(options.plan)
    vary = dict(_split_values(assignment) for assignment in options.vary)
    if plan is None:
        if not vary:
            raise InputError(
                f"{options.plan}: no plan of that name ({', '.join(names())}); "
                "for an environment say what to vary: --vary region.max_kl=0.02,0.05"
            )
        base = parse([options.plan, *rest], options.trust_code).config
        plan = Plan(f"ablate-{base.env.replace('/', '-')}", base, grid(vary), (0, 1, 2))
    else:
        if rest:
            plan = dataclasses.replace(plan, base=_with_flags(plan.base, rest))
        if vary:
            plan = dataclasses.replace(plan, cells=grid(vary))
    if options.name is not None:
        from keel.tracking.directory import check_name

        plan = dataclasses.replace(plan, name=check_name(options.name))
    return checked(dataclasses.replace(plan, seeds=options.seeds or plan.seeds))


def _with_flags(base: Config, flags: list[str]) -> Config:
    """Return the settings of a plan with flags of `keel train` on top."""
    from keel.cli.environments import on_top

    def resolve(args: list[str]) -> Resolved:
        return Resolved(on_top(base, args, "keel ablate"), ())

    config: Config = resolve(settle([base.env, *flags], resolve)).options.config
    return config


def _require_trust(plan: Plan, options: Ablate, rest: list[str]) -> None:
    """Raise if a plan's file names code that is not trusted; what is typed is the user's own."""
    from keel.config import to_dict
    from keel.trust import require_trust

    if not options.plan.endswith((".yaml", ".yml")):
        return
    for cell in (*plan.cells, *plan.stops):
        config = to_dict(cell.config(plan.base, plan.seeds[0]))
        require_trust(config, options.plan, options.trust_code, typed=(*rest, *options.vary))


def _split_values(assignment: str) -> tuple[str, list[Any]]:
    name, equals, values = assignment.partition("=")
    if not (name and equals and values):
        raise InputError(f"--vary {assignment}: expected FIELD=VALUE,VALUE")
    return name.replace("-", "_"), [
        parse_yaml(value, f"--vary {assignment}") for value in values.split(",")
    ]


def _train(plan: Plan, tasks: list[Task], options: Ablate) -> bool:
    """Train what is missing and return whether a run failed.

    A `KeelError` says why when there is nothing to compare; runs that never trained are removed.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from keel.ablate import Job, at_once, failure_lines, remove_untrained, run_jobs
    from keel.tracking.progress import PipedConsole

    console = PipedConsole(stderr=True)
    remaining = [task for task in tasks if task.state != "finished"]
    limit = options.at_once or at_once(plan.base)
    if plan.about:
        console.print(plan.about.strip(), style="dim", highlight=False)
    console.print(
        f"{plan.name}: {len(plan.cells)} cells × {len(plan.seeds)} seeds on {plan.base.env}, "
        f"{len(remaining)} of {len(tasks)} runs to go, {limit} at a time",
        highlight=False,
    )
    failed: dict[Task, str] = {}
    trained = [task for task in tasks if task.state == "finished"]
    first_seed = {task for task in tasks if task.seed == plan.seeds[0]}
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %")
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        total_bar = bars.add_task("all", total=float(len(tasks)))
        task_bars: dict[Task, Any] = {}

        def done(task: Task, job: Job) -> None:
            if task in task_bars:
                bars.remove_task(task_bars.pop(task))
            if (result := job.result) is None:
                failed[task] = job.reason
                console.print(f"{task.label}: failed", style="red", highlight=False)
                if not trained and failed.keys() >= first_seed:
                    raise _NothingTrained
                return
            trained.append(task)
            score = result.get("return_mean")
            outcome = "done" if score is None else f"evaluation {score:,.1f}"
            console.print(f"{task.label}: {outcome}", highlight=False)

        def tick(running: list[Task]) -> None:
            for task in running:
                if task not in task_bars:
                    task_bars[task] = bars.add_task(task.label, total=1.0)
                bars.update(task_bars[task], completed=task.progress())
            ended = len(trained) + len(failed)
            bars.update(total_bar, completed=ended + sum(task.progress() for task in running))

        with suppress(_NothingTrained):
            run_jobs([(task, task.command) for task in remaining], limit, done, tick)
    failures = [(task.label, reason) for task, reason in failed.items()]
    if not trained:
        remove_untrained(tasks)
        raise KeelError("; ".join(failure_lines(failures, len(failed))))
    for line in failure_lines(failures, len(tasks)):
        console.print(line, style="red", highlight=False)
    return bool(failed)


class _NothingTrained(Exception):
    """Signal that every cell failed with its first seed: the other seeds are not tried."""


def _compare(plan: Plan, options: Ablate) -> None:
    """Compare the cells on the terminal, and as picture, page and JSON in the folder."""
    from keel.ablate import watch
    from keel.ablate.watch import stopped, watched
    from keel.cli.compare import print_comparison, write_files
    from keel.compare import as_json, compare, load_runs
    from keel.tracking.files import write_file

    folder = options.runs / plan.name
    paths = [folder / cell.name for cell in plan.cells]
    runs = load_runs([str(path) for path in paths if path.is_dir()])
    comparison: Comparison = compare(runs)
    tables, stops = watched(plan, options.runs), stopped(plan, options.runs)
    result = as_json(comparison) | (watch.as_json(tables, stops) if tables or stops else {})
    text = json.dumps(result, allow_nan=False)
    sections = _sections(tables, stops)
    write_file(folder / "compare.json", f"{text}\n".encode())
    if options.json:
        print(text)  # noqa: T201
    else:
        print_comparison(comparison)
        _print_sections(sections)
    files = folder / "compare.png", folder / "compare.html"
    write_files(comparison, *files, quiet=options.json, sections=sections)


def _sections(tables: list[Watched], stops: Mapping[str, str]) -> list[tuple[str, Table]]:
    """Return the tables that a plan adds to the comparison."""
    from keel.compare.tables import Table, number

    sections = []
    for table in tables:
        rows = [(name, *map(number, values)) for name, values in table.rows.items()]
        if table.expected:
            rows.insert(0, ("expected", *table.expected))
        update = "the last update" if table.update < 0 else f"update {table.update}"
        sections.append((f"After {update}", Table(("group", *table.titles), tuple(rows))))
    if stops:
        sections.append(("Stopped", Table(("group", "by what"), tuple(stops.items()))))
    return sections


def _print_sections(sections: list[tuple[str, Table]]) -> None:
    from rich.text import Text

    from keel.cli.render import simple_table
    from keel.tracking.progress import PipedConsole

    console = PipedConsole(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a file has room
    for title, table in sections:
        console.print()
        console.print(Text(title, style="bold"))
        text_columns = (0, 1) if title == "Stopped" else (0,)
        console.print(simple_table(table.columns, table.rows, left=text_columns))
