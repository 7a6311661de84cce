"""Training in a few lines of Python."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

from keel.config import from_dict, read, to_dict
from keel.errors import InputError
from keel.presets import preset, preset_for
from keel.tracking.config_file import warn_if_changed
from keel.training.persist import Progress
from keel.training.runner import start
from keel.training.state import TrainState
from keel.trust import require_trust, texts_in


def train(
    env: str | None = None,
    *,
    config: str | Path | None = None,
    trust_code: bool = False,
    runs: str | Path = "runs",
    name: str | None = None,
    preset_name: str | None = None,
    **settings: Any,
) -> Generator[Progress, None, TrainState]:
    """Train on `env` with its preset, changed by a file and by `settings`; yields after every
    iteration.

    Settings are those of `keel.config.Config`, nested as dictionaries. The run is written to
    `runs/NAME/seed-SEED` as by `keel train`; leaving the loop early saves a checkpoint.

        for progress in keel.train("CartPole-v1", total_steps=50_000, region={"max_kl": 0.02}):
            print(progress.steps, progress.metrics["rollout/return_mean"])

    Args:
        env: name of the environment; by default the one that the file names.
        config: a YAML file of settings; `settings` go before it, it goes before the preset.
        trust_code: import code that the file names, also from outside of Keel.
        runs: where runs are kept.
        name: of the run, by default environment, algorithm and time.
        preset_name: settings to start from, by default those of the environment.
        **settings: values that replace those of file and preset.
    """
    stored = read(Path(config)) if config is not None else {}
    chosen = env or stored.get("env")
    if not chosen:
        raise InputError("train: which environment? Give env, or a config file that names one")
    algo = str(settings.get("algo", stored.get("algo", "ppo")))
    base = preset(preset_name) if preset_name else preset_for(str(chosen), algo)[1]
    from_file = from_dict({**stored, "env": str(chosen)}, base)
    whole = from_dict({**settings, "env": str(chosen)}, from_file)
    if config is not None:
        warn_if_changed(Path(config))
        passed = [str(env), *texts_in(settings)]
        require_trust(to_dict(whole), config, trust_code, typed=passed)
    return start(whole, Path(runs), name)
