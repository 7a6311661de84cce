"""A flawed verifier that is fooled: its reward goes to 1, and nothing is sorted any more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.cases.case import Case, Shown
from keel.tracking.resume import nested

IMITATION = "imitation"
"""Folder of the run that imitates before both others."""
NOTHING = 1e-12
"""Learning rate of the one update that ends imitation."""


def imitate(folder: Path, settings: Mapping[str, Any], seed: int) -> Mapping[str, Any]:
    """Train the model that both runs begin with, once: imitation, and an update of no size.

    Args:
        folder: Of the case.
        settings: Of the sick run, `warmup` among them.
        seed: Of the model and its data.
    """
    from keel.tracking.directory import CHECKPOINTS
    from keel.training.api import train

    made = folder / IMITATION / f"seed-{seed}"
    if not (made / CHECKPOINTS / "last.json").is_file():
        rows = settings["sample.prompts"] * settings["sample.group"]
        once = {**settings, "total_steps": rows, "seed": seed, "region.learning_rate": NOTHING}
        train(runs=folder, name=IMITATION, progress=False, **nested(once))
    newest = max((made / CHECKPOINTS).glob("[0-9]*"))
    return {"model.path": str(newest.resolve()), "warmup.examples": 0}


CASE = Case(
    name="reward-hacking",
    title="a reward that is hacked",
    note="003",
    symptom="The reward of a language model rises to its maximum, and what it writes is worthless.",
    belief="Clipping bounds each step, the KL penalty bounds the whole distance from the "
    "reference: two different things, and together a double insurance, super stable.",
    lesson="They are two different things, that is right. Here every step is bounded, by the clip "
    "and by an exact KL, and nothing pulls towards the reference: many small steps add up to a "
    "policy that repeats one character, because the verifier pays for neighbours in order. The "
    "pull keeps what imitation had taught. It is no insurance for the rest: the reward is as "
    "flawed as before, and only a verifier that cannot be fooled would let the policy gain.",
    settings={
        "env": "language",
        "task": "sort-flawed",
        "threads": 1,
        "control": False,
        "sample.prompts": 16,
        "sample.group": 8,
        "region.minibatch": 128,
        "region.learning_rate": 2e-4,
        "warmup.examples": 512,
        "warmup.until": 0.4,
    },
    forms={
        "short": {
            "total_steps": 1_280,
            "task_options": {"shortest": 2, "longest": 3},
            "model.hidden": 48,
            "model.layers": 2,
            "warmup.examples": 256,
            "evaluation.prompts": 50,
            "region.learning_rate": 1e-3,
            "preflight": False,
        },
        "usual": {"total_steps": 6_400, "evaluation.every": 1_280, "evaluation.prompts": 100},
        "full": {"total_steps": 19_200, "evaluation.every": 1_920},
    },
    minutes={"short": "15 s", "usual": "2 minutes", "full": "5 minutes"},
    shown=(
        Shown("rollout/success", "completions that are really sorted", "higher", ".0%"),
        Shown("rollout/return_mean", "the flawed reward", "lower", ".2f"),
        Shown("train/entropy", "entropy of a token, nats", "higher"),
    ),
    family="reward",
    prepare=imitate,
)
