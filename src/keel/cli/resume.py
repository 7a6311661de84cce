"""`keel resume RUN`: go on where a run stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from keel.cli.arguments import read_options, translate
from keel.cli.strict_json import print_json
from keel.errors import InputError
from keel.printing import printable


@dataclass(frozen=True)
class Resume:
    """Go on with a run from its newest good checkpoint, exactly as if it had never stopped."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The folder of the run, such as runs/NAME/seed-0, or runs/NAME if it has one seed."""
    total_steps: int | None = None
    """Train to this many steps, in place of what was configured."""
    trust_code: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Import code that the run's file names, also from outside of Keel; it can do anything."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object at the end, and nothing else."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show no progress."""


def run(args: Sequence[str]) -> int:
    """Resume."""
    options = read_options(Resume, translate(args), "keel resume")
    from keel.tracking.directory import find_run
    from keel.tracking.record import read_config

    path = find_run(options.run)
    stored = read_config(path)
    if options.total_steps is not None and options.total_steps < 1:
        raise InputError(f"--total-steps: expected 1 or more, got {options.total_steps}")
    total_steps = options.total_steps or stored.get("total_steps")
    if isinstance(total_steps, int) and (steps := _finished_at(path, total_steps)) is not None:
        return _report_finished(path, steps, options)
    from keel.cli.kinds import grammar_of
    from keel.cli.train import drive
    from keel.training.kinds import kind_of
    from keel.training.runner import resume

    env = stored.get("env")
    config = kind_of(env).read(stored)
    if options.total_steps is not None:
        config = dataclasses.replace(config, total_steps=options.total_steps)
    run = partial(resume, path, config, trust_code=options.trust_code)
    return drive(run, grammar_of(env), config, options.json, options.quiet)


def _finished_at(path: Path, total_steps: int) -> int | None:
    """Return the step of the last good checkpoint if nothing is left to train or to evaluate."""
    from keel.training.checkpoint import load, newest_step
    from keel.training.persist import owes_evaluation

    newest = newest_step(path)
    if newest is None or newest < total_steps:
        return None
    step = load(path).step
    return step if step >= total_steps and not owes_evaluation(path, step) else None


def _report_finished(path: Path, steps: int, options: Resume) -> int:
    from keel.tracking import last_values
    from keel.training.runner import finished_message

    if options.json:
        (score,) = last_values(path, "eval/return_mean").values
        result = {"run": str(path), "steps": steps, "return_mean": score, "finished": True}
        print_json(result)
    elif not options.quiet:
        print(printable(finished_message(path, steps)))  # noqa: T201
    return 0
