"""Demonstrations that rule: the expert is wrong, and its weight never yields."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.cases.case import Case, Shown

EPISODES = 10


def record(folder: Path, settings: Mapping[str, Any], seed: int) -> Mapping[str, Any]:
    """Record the wrong expert, once.

    Args:
        folder: Of the case.
        settings: Of the sick run.
        seed: Of the episodes.
    """
    from keel.apps.demonstrations import record_function, save_demos
    from keel.apps.demonstrations.experts import lean_away

    demos = (folder / "demos").resolve()
    if not (demos / "demos.json").is_file():
        save_demos(record_function(str(settings["env"]), lean_away, EPISODES, seed=seed), demos)
    return {"demos.path": str(demos)}


CASE = Case(
    name="demos-dominate",
    title="demonstrations that rule",
    note="001",
    symptom="A PPO with a loss on demonstrations does not behave: the return stays where it began, "
    "whatever the reward says.",
    belief="The log-ratio is clamped too loosely, the KL is only estimated, advantages are not "
    "normalized within groups; and the loss on demonstrations may outweigh that of PPO, which the "
    "ratio of the two losses would show: above 2, lower the coefficient.",
    lesson="The last suspicion is right, its measure is not: with normalized advantages PPO's loss "
    "begins near 0, so a ratio of losses says little. What moves parameters are gradients. Here "
    "ten episodes push the cart away from where the pole falls, at a coefficient of 10 that "
    "nothing changes.",
    settings={
        "env": "CartPole-v1",
        "threads": 1,
        "demos.coef": 10.0,
        "demos.control": "fixed",
    },
    forms={
        "short": {"total_steps": 30_000, "evaluation.episodes": 0},
        "usual": {"total_steps": 100_000},
        "full": {"total_steps": 300_000, "evaluation.episodes": 100},
    },
    minutes={"short": "10 s", "usual": "½ minute", "full": "1 minute"},
    shown=(
        Shown("rollout/return_mean", "return of an episode", "higher", ".4g"),
        Shown(
            "train/bc_gradient_ratio", "gradient of the demonstrations over the reward's", "lower"
        ),
        Shown("train/bc_coef", "coefficient of the demonstrations", "lower"),
    ),
    family="reward",
    prepare=record,
)
