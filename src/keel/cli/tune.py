"""`keel tune ENV`: search settings with Optuna."""

from __future__ import annotations

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

from keel.cli.arguments import read_known_options
from keel.cli.legacy_flags import translate_train
from keel.cli.strict_json import print_json
from keel.errors import InputError, KeelError

if TYPE_CHECKING:
    from keel.tracking.progress import PipedConsole
    from keel.tune import TrialResult, Tuning

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
    """Number of trials to finish, pruned ones included."""
    search: Annotated[tuple[str, ...], arg(metavar="FIELD=LOW..HIGH[:log]|FIELD=A,B …")] = ()
    """Settings to search; by default those that matter most for PPO."""
    runs: Annotated[Path, arg(metavar="DIR")] = Path("runs")
    """Folder of the runs."""
    name: str | None = None
    """The folder of the study in DIR; by default tune-ENV."""
    at_once: int | None = None
    """Trials at a time; by default as many as there are cores for."""
    worker: int | None = None
    """Take trials as one of several processes that share a study; started by the command itself."""
    end: int | None = None
    """Number of the first trial that is not to be taken; told by the command itself."""
    trust_code: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Import code that a --config file names, also from outside of Keel."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object at the end."""


def run(args: Sequence[str]) -> int:
    """Search."""
    options, rest = read_known_options(Tune, translate_train(args), "keel tune")
    for name, number in (("--trials", options.trials), ("--at-once", options.at_once)):
        if number is not None and number < 1:
            raise InputError(f"{name}: expected 1 or more, got {number}")
    from keel.cli.environments import parse
    from keel.tracking.directory import check_name, hold_folder
    from keel.tune import DEFAULT, Tuning, read_space, work

    base = parse([options.env, *rest], options.trust_code).config
    name = check_name(options.name or f"tune-{base.env.replace('/', '-')}")
    tuning = Tuning(
        folder=options.runs / name,
        base=base,
        space=read_space(options.search) or DEFAULT,
        trials=options.trials,
        # workers of one seed, and a command that is repeated, would all try the same
        seed=base.seed + (options.worker or 0) + 1009 * (options.end or 0),
    )
    if options.worker is not None:
        from keel.training.signals import graceful_stop

        with graceful_stop():
            work(tuning, end=options.end)
        return 0
    _check(tuning)
    with hold_folder(tuning.folder):
        _search(tuning, list(args), options)
        return _report(tuning, options.json)


def _check(tuning: Tuning) -> None:
    """Refuse what cannot be trained before anything is made."""
    from keel.experience.targets import group_function
    from keel.training.environments import make_run_envs
    from keel.tune.study import check_space

    check_space(tuning)
    group_function(tuning.base.advantage)
    make_run_envs(tuning.base, 1).close()


def _search(tuning: Tuning, args: list[str], options: Tune) -> None:
    """Run workers in processes of their own, which share the journal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from keel.ablate import Job, at_once, run_jobs
    from keel.tracking.progress import PipedConsole
    from keel.tune import best_of, end_of, open_study, take_over

    console = PipedConsole(stderr=True)
    study = take_over(tuning)
    first_new = len(study.trials)
    end = end_of(study, tuning.trials)
    limit = min(options.at_once or at_once(tuning.base), end - first_new)
    bars = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console,
        transient=True,
    )  # fmt: skip
    failed: list[str] = []
    reported: set[int] = set()

    def tick(_: list[int]) -> None:
        results = best_of(open_study(tuning))
        for result in sorted(results, key=lambda x: x.number):
            if result.number not in reported:
                reported.add(result.number)
                console.print(_line(result), highlight=False)
        best = next((x for x in results if x.allowed), None)
        best_text = "" if best is None else f", best {best.score:,.1f}"
        bars.update(bar, completed=len(results), description=f"{len(results)} trials{best_text}")

    def done(_: int, job: Job) -> None:
        if job.status != 0:
            failed.append(job.reason)

    reported |= {x.number for x in best_of(study)}
    with bars:
        bar = bars.add_task("trials", total=tuning.trials)
        workers = [(i, partial(_command, args, i, end)) for i in range(limit)]
        run_jobs(workers, limit, done, tick, pause=1.0)
        tick([])
    _report_failures(tuning, first_new, failed, console)


def _report_failures(
    tuning: Tuning, first_new: int, workers: list[str], console: PipedConsole
) -> None:
    """Say why trials of this call failed, each reason once; an error if no trial was trained.

    Args:
        tuning: what is searched.
        first_new: number of trials that the study had before.
        workers: why worker processes failed.
        console: where to say it.
    """
    from keel.ablate import failure_lines
    from keel.tune import best_of, open_study
    from keel.tune.study import remove_untrained

    trials = best_of(open_study(tuning))
    new = [x for x in trials if x.number >= first_new]
    failed = [(f"trial {x.number}", x.reason) for x in new if x.reason]
    failed = failed or [("a worker", reason) for reason in workers]
    if failed and all(x.state == "failed" for x in trials):
        if first_new == 0:
            remove_untrained(tuning)
        raise KeelError("; ".join(failure_lines(failed, len(failed))))
    for line in failure_lines(failed, len(new)):
        console.print(line, style="red", highlight=False)


def _command(args: list[str], worker: int, end: int) -> list[str]:
    options = ["--worker", str(worker), "--end", str(end)]
    return [sys.executable, "-m", "keel", "tune", *args, *options]


def _line(result: TrialResult) -> str:
    score = "–" if math.isnan(result.score) else f"{result.score:,.1f}"
    walked_back = (
        "" if result.violations == 0 else f", {result.violations:.0%} of updates walked back"
    )
    return f"trial {result.number}: {result.state}, return {score}{walked_back}"


def _report(tuning: Tuning, as_json: bool) -> int:
    """Write the best settings as a file for `keel train --config`, and print a table."""
    from keel.tracking.files import write_file
    from keel.tracking.resume import nested
    from keel.tune import best_of, open_study

    trials = best_of(open_study(tuning))
    allowed = [x for x in trials if x.allowed]
    path = tuning.folder / "best.yaml"
    if allowed:
        text = yaml.safe_dump(nested(allowed[0].settings), sort_keys=False)
        write_file(path, text.encode())
    if as_json:
        result: dict[str, Any] = {
            "best": allowed[0] if allowed else None,
            "config": str(path) if allowed else None,
            "trials": trials,
        }
        print_json(result)
    else:
        _print_table(trials[:SHOWN])
        if not allowed:
            print("no trial went to its end inside the trust region")  # noqa: T201
        else:
            train = f"keel train {tuning.base.env} --config {path}"
            print(f"best: trial {allowed[0].number}; train with it: {train}")  # noqa: T201
    return 0 if allowed else 1


def _print_table(results: list[TrialResult]) -> None:
    from keel.cli.render import print_table

    names = list(dict.fromkeys(name for x in results for name in x.settings))
    rows = []
    for x in results:
        score = x.state if math.isnan(x.score) or x.state != "complete" else f"{x.score:,.1f}"
        values = [x.settings.get(name, "–") for name in names]
        texts = [f"{v:.3g}" if isinstance(v, float) else str(v) for v in values]
        rows.append((str(x.number), score, f"{x.violations:.0%}", *texts))
    titles = ("trial", "return", "walked back", *(name.rpartition(".")[2] for name in names))
    print_table(titles, rows, left=())
