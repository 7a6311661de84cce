"""Registries of tasks and rewards: names, objects, or `module:attribute`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from tyro.conf import arg

from keel.config.registries import Pluggable
from keel.registry import Registry

TASKS: Registry[Any] = Registry(
    "task",
    {
        "sort": "keel.apps.language.tasks.sort:Sort",
        "sort-flawed": "keel.apps.language.tasks.sort_flawed:FlawedSort",
        "reverse": "keel.apps.language.tasks.reverse:Reverse",
        "addition": "keel.apps.language.tasks.addition:Addition",
        "countdown": "keel.apps.language.tasks.countdown:Countdown",
        "parity": "keel.apps.language.tasks.parity:Parity",
        "lookup": "keel.apps.language.tasks.lookup:Lookup",
    },
)
"""Tasks (`keel.apps.language.tasks.Task`), and what makes them of `task_options`."""

REWARDS: Registry[Callable[..., Any]] = Registry("reward.functions", keywords=("task",))
"""Rewards: `(example, completion)` to a number; `task` is the task's own verifier."""

TaskName = Annotated[str, Pluggable(TASKS), arg(metavar=TASKS.choices)]
RewardNames = Annotated[
    tuple[str, ...], Pluggable(REWARDS), arg(metavar="[task|module:attribute …]")
]
