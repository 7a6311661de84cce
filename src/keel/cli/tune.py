"""`keel tune ENV`: search settings with Optuna."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
import yaml
from tyro.conf import Positional, arg

from keel.cli.arguments import read_known_options, translate
from keel.errors import InputError

if TYPE_CHECKING:
    from keel.tune import Found, Tuning

SHOWN = 8


@dataclass(frozen=True)
class Tune:
    """Search the settings that give the highest return, among those that keep to the trust region.

    The same command goes on where it stopped. Other flags are those of `keel train`, and hold for
    all trials: --total-steps says how long each trains.

    Example: keel tune CartPole-v1 --trials 30 --total-steps 5e4
             keel tune Hopper-v5 --search region.learning_rate=1e-4..3e-3:log region.epochs=4,8
    """

    env: Annotated[Positional[str], arg(metavar="ENV")]
    """A Gymnasium id, or an alias."""
    trials: int = 20
    """How many to finish, pruned ones included."""
    search: Annotated[tuple[str, ...], arg(metavar="FIELD=LOW..HIGH[:log]|FIELD=A,B …")] = ()
    """What to search; by default what matters most for PPO."""
    runs: Annotated[Path, arg(metavar="DIR")] = Path("runs")
    """Where runs are kept."""
    name: str | None = None
    """The folder of the study in DIR; by default tune-ENV."""
    at_once: int | None = None
    """Trials at a time; by default as many as there are cores for."""
    worker: int | None = None
    """Take trials as one of several processes that share a study; started by the command itself."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object at the end."""


def run(args: Sequence[str]) -> int:
    """Search."""
    options, rest = read_known_options(Tune, translate(args), "keel tune")
    for name, number in (("--trials", options.trials), ("--at-once", options.at_once)):
        if number is not None and number < 1:
            raise InputError(f"{name}: expected 1 or more, got {number}")
    from keel.cli.train import parse
    from keel.runs.directory import check_name
    from keel.tune import DEFAULT, Tuning, open_study, read_space, work

    base = parse([options.env, *rest]).config
    name = check_name(options.name or f"tune-{base.env.replace('/', '-')}")
    tuning = Tuning(
        folder=options.runs / name,
        base=base,
        space=read_space(options.search) or DEFAULT,
        trials=options.trials,
        seed=base.seed + (options.worker or 0),  # workers of one seed would all try the same
    )
    if options.worker is not None:
        from keel.training.signals import graceful_stop

        with graceful_stop():
            work(tuning)
        return 0
    open_study(tuning)  # what is wrong shows here, once
    _search(tuning, list(args), options)
    return _report(tuning, options.json)


def _search(tuning: Tuning, args: list[str], options: Tune) -> None:
    """Workers in processes of their own, which share the journal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from keel.ablate import Job, at_once, run_jobs
    from keel.tune import best_of, open_study

    console = Console(stderr=True)
    limit = min(options.at_once or at_once(tuning.base), tuning.trials)
    bars = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console,
        transient=True,
    )  # fmt: skip
    failed: list[str] = []
    seen: set[int] = set()

    def tick(_: list[int]) -> None:
        found = best_of(open_study(tuning))
        for one in sorted(found, key=lambda x: x.number):
            if one.number not in seen:
                seen.add(one.number)
                console.print(_line(one), highlight=False)
        best = next((x for x in found if x.allowed), None)
        said = "" if best is None else f", best {best.score:,.1f}"
        bars.update(bar, completed=len(found), description=f"{len(found)} trials{said}")

    def done(_: int, job: Job) -> None:
        if job.status != 0:
            failed.append(job.reason)

    seen |= {x.number for x in best_of(open_study(tuning))}
    with bars:
        bar = bars.add_task("trials", total=tuning.trials)
        workers = [(i, partial(_command, args, i)) for i in range(limit)]
        run_jobs(workers, limit, done, tick, pause=1.0)
        tick([])
    if failed:
        console.print(f"a worker failed: {failed[0]}", style="red", highlight=False)


def _command(args: list[str], worker: int) -> list[str]:
    return [sys.executable, "-m", "keel", "tune", *args, "--worker", str(worker)]


def _line(found: Found) -> str:
    score = "–" if math.isnan(found.score) else f"{found.score:,.1f}"
    off = "" if found.violations == 0 else f", {found.violations:.0%} of updates walked back"
    return f"trial {found.number}: {found.state}, return {score}{off}"


def _report(tuning: Tuning, as_json: bool) -> int:
    """The best settings as a file for `keel train --config`, and a table."""
    from keel.runs.files import replace_file
    from keel.runs.resume import nested
    from keel.tune import best_of, open_study

    found = best_of(open_study(tuning))
    good = [x for x in found if x.allowed]
    path = tuning.folder / "best.yaml"
    if good:
        text = yaml.safe_dump(nested(good[0].settings), sort_keys=False)
        replace_file(path, text.encode())
    if as_json:
        result: dict[str, Any] = {
            "best": None if not good else _plain(good[0]),
            "config": str(path) if good else None,
            "trials": [_plain(x) for x in found],
        }
        print(json.dumps(result, allow_nan=False))  # noqa: T201
    else:
        _print_table(found[:SHOWN])
        if good:
            train = f"keel train {tuning.base.env} --config {path}"
            print(f"best: trial {good[0].number}; train with it: {train}")  # noqa: T201
    return 0 if good else 1


def _plain(found: Found) -> dict[str, Any]:
    plain = dataclasses.asdict(found)
    return plain | {"score": found.score if math.isfinite(found.score) else None}


def _print_table(found: list[Found]) -> None:
    from keel.cli.render import PipedConsole, simple_table

    names = list(dict.fromkeys(name for x in found for name in x.settings))
    rows = []
    for x in found:
        score = x.state if math.isnan(x.score) or x.state != "complete" else f"{x.score:,.1f}"
        values = [x.settings.get(name, "–") for name in names]
        words = [f"{v:.3g}" if isinstance(v, float) else str(v) for v in values]
        rows.append((str(x.number), score, f"{x.violations:.0%}", *words))
    titles = ("trial", "return", "walked back", *(name.rpartition(".")[2] for name in names))
    PipedConsole(highlight=False).print(simple_table(titles, rows, left=()))
