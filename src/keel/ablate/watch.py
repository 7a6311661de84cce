"""Tables of a plan beside the returns: metrics after some updates, and cells that must stop."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keel.ablate.jobs import Job, run_jobs
from keel.ablate.plan import Plan
from keel.ablate.work import Task, task_of
from keel.tracking.files import write_file
from keel.tracking.reader import read_metrics

STOPS = "stops.json"


@dataclass(frozen=True)
class Watched:
    """Means over seeds of some metrics, after one update."""

    update: int
    titles: tuple[str, ...]
    rows: Mapping[str, tuple[float, ...]]
    """Values of every cell; NaN for what no run has written."""
    expected: tuple[str, ...] = ()
    """values that were predicted; empty if there are none"""


def watched(plan: Plan, root: Path) -> list[Watched]:
    """Return the tables of a plan, from what its runs have written below `root`/NAME."""
    watch = plan.watch
    if watch is None:
        return []
    tables = []
    for update in watch.updates:
        rows = {
            cell.name: tuple(
                _mean([_value(run, name, update) for run in _runs(plan, root, cell.name)])
                for name in watch.metrics.values()
            )
            for cell in plan.cells
        }
        expectations = watch.expected if update == watch.expected_at else {}
        titles = tuple(watch.metrics)
        expected = tuple(str(expectations.get(title, "")) for title in titles if expectations)
        tables.append(Watched(update, titles, rows, expected))
    return tables


def _runs(plan: Plan, root: Path, cell: str) -> list[Path]:
    folders = [root / plan.name / cell / f"seed-{seed}" for seed in plan.seeds]
    return [folder for folder in folders if (folder / "metrics.jsonl").is_file()]


def _value(run: Path, name: str, update: int) -> float:
    """Return a metric after the update of this number; -1 is the last one."""
    column = read_metrics(run, [name]).columns.get(name)
    if column is None or update > len(column) or not len(column):
        return math.nan
    return float(column[update - 1 if update > 0 else update])


def _mean(values: list[float]) -> float:
    numbers = [x for x in values if not math.isnan(x)]
    return sum(numbers) / len(numbers) if numbers else math.nan


def stopped(plan: Plan, root: Path) -> dict[str, str]:
    """Return what stopped each of the cells that are meant to be stopped; they are run once.

    The reason of one that is not stopped says so: the plan was wrong about it.
    """
    file = root / plan.name / STOPS
    reasons: dict[str, str] = json.loads(file.read_text()) if file.is_file() else {}
    for cell in plan.stops:
        if cell.name in reasons:
            continue
        with tempfile.TemporaryDirectory() as folder:
            base = replace(plan.base, total_steps=plan.base.batch)
            task = task_of(Path(folder), cell.name, cell.config(base, plan.seeds[0]), plan.seeds[0])
            job = _run(task)
        reasons[cell.name] = job.reason if job.status else "nothing: its first update was taken"
        write_file(file, json.dumps(reasons, indent=1).encode())
    return {cell.name: reasons[cell.name] for cell in plan.stops}


def _run(task: Task) -> Job:
    """Run one task and return how it ended."""
    ended: list[Job] = []
    run_jobs([(task, task.command)], 1, lambda _, job: ended.append(job))
    return ended[0]


def as_json(tables: list[Watched], stops: Mapping[str, str]) -> dict[str, Any]:
    """Return plain data for `compare.json`; NaN is null, what is infinite is a word."""
    return {
        "watched": [
            {
                "update": table.update,
                "titles": table.titles,
                "rows": {name: [_number(x) for x in row] for name, row in table.rows.items()},
                "expected": table.expected,
            }
            for table in tables
        ],
        "stopped": dict(stops),
    }


def _number(x: float) -> float | str | None:
    if math.isinf(x):
        return "infinite"
    return None if math.isnan(x) else x
