"""Training in a few lines of Python."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

from keel.config import from_dict
from keel.presets import preset, preset_for
from keel.training.keeping import Progress
from keel.training.runner import start
from keel.training.state import TrainState


def train(
    env: str,
    *,
    runs: str | Path = "runs",
    name: str | None = None,
    preset_name: str | None = None,
    **settings: Any,
) -> Generator[Progress, None, TrainState]:
    """Train on `env` with its preset, changed by `settings`; yields after every iteration.

    Settings are those of `keel.config.Config`, nested as dictionaries. The run is written to
    `runs/NAME/seed-SEED` as by `keel train`; leaving the loop early saves a checkpoint.

        for progress in keel.train("CartPole-v1", total_steps=50_000, region={"max_kl": 0.02}):
            print(progress.steps, progress.metrics["rollout/return_mean"])
    """
    base = preset(preset_name) if preset_name else preset_for(env, settings.get("algo", "ppo"))[1]
    return start(from_dict({**settings, "env": env}, base), Path(runs), name)
