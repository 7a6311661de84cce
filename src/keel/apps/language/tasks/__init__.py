"""Small tasks with verifiers, for language models that fit on a laptop; nothing is downloaded."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from keel.apps.language.registries import TASKS
from keel.apps.language.tasks.protocol import (
    CHARACTERS,
    TAGS,
    Example,
    FlawedTask,
    Task,
    ToolTask,
    true_score,
)
from keel.apps.language.tasks.streams import (
    held_out,
    is_held_out,
    prompts,
    segments,
    warmup_data,
)
from keel.errors import InputError, check_choice

__all__ = [
    "CHARACTERS",
    "TAGS",
    "TASKS",
    "Example",
    "FlawedTask",
    "Task",
    "ToolTask",
    "held_out",
    "is_held_out",
    "prompts",
    "segments",
    "task_named",
    "true_score",
    "warmup_data",
]

METHODS = ("name", "max_new_tokens", "stop", "example", "verify")
"""What a task must have."""


def task_named(name: str, /, **options: Any) -> Task:
    """Make the task of this name, with options of its own.

    Examples:
        >>> task_named("lookup", hops=2).max_new_tokens
        27
    """
    entry = TASKS.get(name)
    is_task = not isinstance(entry, type) and hasattr(entry, "verify")
    if is_task and options:
        raise InputError(f"task_options: task {name} is made already; it takes none")
    task = entry if is_task else _made(name, entry, options)
    missing = [method for method in METHODS if not hasattr(task, method)]
    if missing:
        raise InputError(
            f"task {name}: expected {', '.join(METHODS)}; {type(task).__name__} has no {missing[0]}"
        )
    return task  # type: ignore[no-any-return]


def _made(name: str, make: Any, options: Mapping[str, Any]) -> Any:
    if dataclasses.is_dataclass(make):
        fields = [field.name for field in dataclasses.fields(make)]
        for option in options:
            check_choice(f"option of task {name}", option, fields)
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise InputError(f"task {name}: expected a task, or what makes one ({error})") from error
    return make(**options)
