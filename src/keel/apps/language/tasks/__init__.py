"""Small tasks with verifiers, for language models that fit on a laptop; nothing is downloaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from keel.apps.language.tasks.addition import Addition
from keel.apps.language.tasks.countdown import Countdown
from keel.apps.language.tasks.lookup import Lookup
from keel.apps.language.tasks.parity import Parity
from keel.apps.language.tasks.protocol import (
    CHARACTERS,
    TAGS,
    Example,
    FlawedTask,
    Task,
    ToolTask,
    true_score,
)
from keel.apps.language.tasks.reverse import Reverse
from keel.apps.language.tasks.sort import Sort
from keel.apps.language.tasks.sort_flawed import FlawedSort
from keel.apps.language.tasks.streams import (
    held_out,
    is_held_out,
    prompts,
    segments,
    warmup_data,
)
from keel.errors import check_choice

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

TASKS: Mapping[str, Callable[..., Task]] = {
    kind.name: kind for kind in (Sort, FlawedSort, Reverse, Addition, Countdown, Parity, Lookup)
}
"""Constructors of tasks, by name."""


def task_named(name: str, /, **options: Any) -> Task:
    """Make the task of this name, with options of its own.

    Examples:
        >>> task_named("lookup", hops=2).max_new_tokens
        27
    """
    make = TASKS[check_choice("task", name, TASKS)]
    fields = [field.name for field in dataclasses.fields(make)]  # type: ignore[arg-type]
    for option in options:
        check_choice(f"option of task {name}", option, fields)
    return make(**options)
