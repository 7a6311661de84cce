"""Tasks of a plan: finished runs are never trained twice, begun ones go on."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from keel.ablate.plan import Plan
from keel.config import Config, from_dict, to_dict
from keel.errors import InputError
from keel.experience.targets import group_function
from keel.tracking import RunError, config_changes, read_config
from keel.tracking.directory import has_trained
from keel.tracking.files import write_file
from keel.tracking.reader import last_step
from keel.tracking.resume import allowed
from keel.training.environments import make_run_envs
from keel.training.runner import MAY_CHANGE
from keel.trust import code_in

PLANS = "plan"
"""Folder of the cells' configurations."""


@dataclass(frozen=True)
class Task:
    """A run of a cell."""

    cell: str
    seed: int
    path: Path
    config: Config
    state: Literal["new", "begun", "finished"]

    @property
    def label(self) -> str:
        """Name of the task for people."""
        return f"{self.cell}, seed {self.seed}"

    @property
    def settings_file(self) -> Path:
        """File that a new run reads its configuration from; one for all seeds of a cell."""
        return self.path.parents[1] / PLANS / f"{self.cell}.yaml"

    def command(self) -> list[str]:
        """Return the command that trains it, or the rest of it."""
        keel = [sys.executable, "-m", "keel"]
        # the user who started the plan has been asked already whether its code is trusted
        trust = ["--trust-code"] if code_in(to_dict(self.config)) else []
        if self.state == "begun":
            steps = str(self.config.total_steps)
            return [*keel, "resume", str(self.path), "--total-steps", steps, *trust, "--json"]
        file = self.settings_file
        write_file(file, yaml.safe_dump(to_dict(self.config), sort_keys=False).encode())
        root = str(self.path.parents[1])
        options = ["--runs", root, "--name", self.cell, "--seed", str(self.seed), *trust, "--json"]
        preset = ["--preset", "default"]  # the file says everything
        return [*keel, "train", self.config.env, *preset, "--config", str(file), *options]

    def progress(self) -> float:
        """Return the share of its steps that is done."""
        try:
            step = last_step(self.path)
        except (RunError, OSError):
            return 0.0
        return min(1.0, step / self.config.total_steps)


def tasks_of(plan: Plan, root: Path) -> list[Task]:
    """Return all runs of a plan, seed by seed, so that complete comparisons come early.

    Args:
        plan: the ablation.
        root: folder of all runs; those of the plan are in `root`/NAME.
    """
    return [
        task_of(root / plan.name, cell.name, cell.config(plan.base, seed), seed)
        for seed in plan.seeds
        for cell in plan.cells
    ]


def task_of(folder: Path, cell: str, config: Config, seed: int) -> Task:
    """Return one run of a cell below `folder`, with its state."""
    path = folder / cell / f"seed-{seed}"
    if not path.exists():
        return Task(cell, seed, path, config, "new")
    stored = to_dict(from_dict(read_config(path)))
    changes = [
        c for c in config_changes(stored, to_dict(config)) if not allowed(c.field, MAY_CHANGE)
    ]
    if changes:
        differences = "; ".join(map(str, changes[:3]))
        raise InputError(f"{path}: was trained otherwise ({differences}); choose another --name")
    finished = last_step(path) >= config.total_steps
    return Task(cell, seed, path, config, "finished" if finished else "begun")


def check_code(tasks: Iterable[Task]) -> None:
    """Make every environment of the tasks for a moment, and import every function that they name.

    An error is raised before any training.

    Args:
        tasks: of a plan.
    """
    configs = [task.config for task in tasks]
    for advantage in {config.advantage for config in configs}:
        group_function(advantage)
    for config in {(c.env, c.envs, c.atari): c for c in configs}.values():
        make_run_envs(config, 1).close()


def remove_untrained(tasks: Iterable[Task]) -> None:
    """Remove what new runs left that failed before they had written any metrics.

    A run that has trained, or has kept the numbers that stopped it, stays as it is.

    Args:
        tasks: of a plan, with the state that they had before the training.
    """
    for task in tasks:
        if task.state != "new":
            continue
        if not has_trained(task.path):
            shutil.rmtree(task.path, ignore_errors=True)
            task.settings_file.unlink(missing_ok=True)
            for folder in (task.path.parent, task.settings_file.parent):
                with suppress(OSError):  # not empty, or gone already
                    folder.rmdir()
