"""Registries of tasks, rewards and estimators of advantages: names, objects, `module:attribute`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from tyro.conf import arg

from keel.config.common import Pluggable
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

ESTIMATORS: Registry[Callable[..., Any]] = Registry(
    "algo",
    {
        "ppo": "keel.functional:token_gae",
        "grpo": "keel.functional:grpo",
        "rloo": "keel.functional:rloo",
        "reinforce_pp": "keel.apps.language.advantages:rewards_to_go",
        "remax": "keel.apps.language.advantages:over_likeliest",
        "dr_grpo": "keel.functional:dr_grpo",
    },
)
"""Estimators of advantages of tokens (`keel.apps.language.advantages.token_targets`)."""

Algo = Annotated[str, Pluggable(ESTIMATORS), arg(metavar=ESTIMATORS.choices)]
TaskName = Annotated[str, Pluggable(TASKS), arg(metavar=TASKS.choices)]
RewardNames = Annotated[
    tuple[str, ...], Pluggable(REWARDS), arg(metavar="[task|module:attribute …]")
]
