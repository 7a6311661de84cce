"""Settings that come with Keel; `TASK.yaml` is what `--task TASK` starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keel.apps.language.config import Language, from_dict
from keel.apps.language.registries import ESTIMATORS, TASKS
from keel.config import read
from keel.errors import check_choice

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Return the names of all presets."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def path_of(name: str) -> Path:
    """Return the file of a preset."""
    return FOLDER / f"{check_choice('preset', name, names())}.yaml"


def preset(name: str) -> Language:
    """The preset of this name."""
    return from_dict(read(path_of(name)))


def name_for(task: str, algo: str | None) -> str | None:
    """Return the preset of a task: `TASK-ALGO`, `TASK`, or None where it has none."""
    return next((name for name in (f"{task}-{algo}", task) if name in names()), None)


def preset_for(task: Any, algo: Any) -> Language:
    """`TASK-ALGO`, `TASK`, or the defaults; with the task and the algorithm set.

    Args:
        task: As in settings: a name, `module:attribute` or an object.
        algo: The same; None leaves it to the preset.
    """
    task = TASKS.text(task)
    algo = None if algo is None else ESTIMATORS.text(algo)
    name = name_for(task, algo)
    chosen = {} if algo is None else {"algo": algo}
    return from_dict({"task": task, **chosen}, Language() if name is None else preset(name))
