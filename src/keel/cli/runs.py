"""`keel runs`: what was trained here, and its metrics as CSV."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional, arg

from keel.cli.arguments import Actions, default_action, run_action
from keel.cli.strict_json import print_json
from keel.errors import InputError, KeelError
from keel.printing import printable

if TYPE_CHECKING:
    from keel.tracking import RunInfo

USAGE = """\
usage: keel runs [list] [--runs DIR] [--json]
       keel runs export RUN --csv FILE.csv [--json]

What was trained here, and its metrics as CSV."""
COLORS = {"running": "cyan", "failed": "red", "crashed": "red", "unreadable": "red"}


@dataclass(frozen=True)
class List:
    """List the runs of a folder, oldest first."""

    runs: Annotated[Path, arg(metavar="DIR")] = Path("runs")
    """Folder of the runs."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON list in place of a table."""


@dataclass(frozen=True)
class Export:
    """Write the metrics of a run as CSV: one line an iteration, one column a metric."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The folder of the run, such as runs/NAME/seed-0, or runs/NAME if it has one seed."""
    csv: Annotated[Path, arg(metavar="FILE.csv")]
    """The file to write."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of text."""


def run(args: Sequence[str]) -> int:
    """List or export."""
    actions: Actions = {"list": (List, _list), "export": (Export, _export)}
    return run_action("runs", default_action(args, "list"), actions, USAGE)


def _list(options: List) -> int:
    from keel.tracking import list_runs

    if not options.runs.is_dir():
        raise InputError(f"--runs: there is no folder {str(options.runs)!r}")
    rows = [_describe(info) for info in list_runs(options.runs)]
    if options.json:
        print_json(rows)
    elif not rows:
        print(f"no runs in {options.runs}; `keel train ENV` makes one")  # noqa: T201
    else:
        _print_table(rows)
    return 0


def _describe(info: RunInfo) -> dict[str, Any]:
    from keel.tracking import read_config

    problem = info.problem
    try:
        env = read_config(info.path).get("env")
    except Exception as error:  # one strange run must not hide all others
        env = None
        problem = problem or (str(error) if isinstance(error, KeelError) else repr(error))
    return {
        "name": info.name,
        "env": None if env is None else str(env),
        "seed": info.seed if info.seed >= 0 else None,
        "tag": info.tag,
        "steps": info.step,
        "return_mean": info.return_mean if math.isfinite(info.return_mean) else None,
        "status": info.status,
        "path": str(info.path),
        "created": info.created,
        "problem": problem or None,
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.text import Text

    from keel.cli.render import simple_table
    from keel.tracking.progress import PipedConsole

    table_rows: list[tuple[str | Text, ...]] = []
    for row in rows:
        steps, value = row["steps"], row["return_mean"]
        cells = (
            row["name"],
            row["env"] or "–",
            "–" if row["seed"] is None else str(row["seed"]),
            row["tag"] or "",
            "–" if steps is None else f"{steps:,}",
            "–" if value is None else f"{value:,.1f}",
        )
        status = Text(row["status"], style=COLORS.get(row["status"], ""))
        table_rows.append((*map(str, cells), status))
    titles = ("name", "env", "seed", "tag", "steps", "last return", "status")
    table = simple_table(titles, table_rows, left=(0, 1, 3, 6))
    console = PipedConsole(highlight=False, soft_wrap=True)
    console.print(table)
    for row in rows:
        if row["problem"]:
            console.print(f"{row['name']}: {' '.join(row['problem'].split())}", style="dim")


def _export(options: Export) -> int:
    from keel.tracking import export_csv
    from keel.tracking.directory import find_run

    path = find_run(options.run)
    table = export_csv(path, options.csv)
    columns = 1 + len(table.columns) + len(table.texts)
    if options.json:
        result = {"run": str(path), "csv": str(options.csv), "rows": len(table), "columns": columns}
        print_json(result | {"damage": table.damage})
    else:
        lines = [f"{options.csv}: {len(table)} iterations, {columns} columns"]
        lines += [f"{path}: {sentence}" for sentence in table.damage]
        print(printable("\n".join(lines)))  # noqa: T201
    return 0
