"""`keel resume RUN`: go on where a run stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from keel.cli.arguments import read_options, translate
from keel.config import from_dict


@dataclass(frozen=True)
class Resume:
    """Go on with a run from its newest good checkpoint, exactly as if it had never stopped."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The folder of the run, such as runs/NAME/seed-0."""
    total_steps: int | None = None
    """Train to this many steps, in place of what was configured."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object at the end, and nothing else."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show no progress."""


def run(args: Sequence[str]) -> int:
    """Resume."""
    options = read_options(Resume, translate(args), "keel resume")
    from keel.cli.train import drive
    from keel.runs.directory import read_config
    from keel.training.runner import resume

    stored = read_config(options.run)
    if stored.get("env") == "language":
        from keel.cli import language

        return language.resume(options.run, options.total_steps, options.json, options.quiet)
    config = from_dict(stored)
    if options.total_steps is not None:
        config = dataclasses.replace(config, total_steps=options.total_steps)
    return drive(resume(options.run, config), config, options.json, options.quiet)
