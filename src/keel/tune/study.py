"""A study: trials that train, are pruned early, and are held to the trust region."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.config import Config, from_dict
from keel.errors import InputError, KeelError, need
from keel.runs.resume import nested
from keel.training.runner import start
from keel.tune.space import Range, Space

JOURNAL = "study.jsonl"
VIOLATIONS, UPDATES = "violations", "updates"
ALLOWED = 0.10
"""The share of updates that may be walked back or rejected."""
TAIL = 0.1
"""A trial's score is its mean return over this last share of its steps."""


@dataclass(frozen=True)
class Tuning:
    """What is searched, and for how long."""

    folder: Path
    base: Config
    space: Space
    trials: int
    seed: int = 0


@dataclass(frozen=True)
class Found:
    """One trial."""

    number: int
    score: float
    settings: Mapping[str, Any]
    violations: float
    """share of updates that were walked back or rejected"""
    state: str
    """complete, pruned, or failed"""

    @property
    def allowed(self) -> bool:
        """Whether it kept to the trust region."""
        return self.state == "complete" and self.violations <= ALLOWED


def open_study(tuning: Tuning) -> Any:
    """The study in its folder, which goes on where it stopped; a file of plain JSON lines."""
    optuna = need("optuna", "tune")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    check_space(tuning)
    tuning.folder.mkdir(parents=True, exist_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(str(tuning.folder / JOURNAL))
    return optuna.create_study(
        study_name=tuning.folder.name,
        storage=optuna.storages.JournalStorage(backend),
        direction="maximize",
        load_if_exists=True,
        sampler=_sampler(optuna, tuning.seed),
        pruner=optuna.pruners.MedianPruner(
            n_startup_trials=5, n_warmup_steps=tuning.base.total_steps // 4
        ),
    )


def _sampler(optuna: Any, seed: int) -> Any:
    """Since Optuna 5 a trial is told its constraint, before the sampler asked for it."""
    if hasattr(optuna.trial.Trial, "set_constraint"):
        return optuna.samplers.TPESampler(seed=seed)
    return optuna.samplers.TPESampler(
        seed=seed, constraints_func=lambda trial: (_share(trial) - ALLOWED,)
    )


def check_space(tuning: Tuning) -> None:
    """Refuse what cannot be searched before anything is trained."""
    for name, place in tuning.space.items():
        values = (place.low, place.high) if isinstance(place, Range) else place
        for value in values:
            try:
                from_dict(nested({name: value}), tuning.base)
            except InputError as error:
                raise InputError(f"--search {name}: {error}") from None


def work(tuning: Tuning, told: Callable[[Found], None] = lambda _: None) -> None:
    """Take trials until the study has enough; several processes may do so at once."""
    optuna = need("optuna", "tune")
    study = open_study(tuning)
    over = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    enough = optuna.study.MaxTrialsCallback(tuning.trials, states=over)
    if sum(trial.state in over for trial in study.trials) >= tuning.trials:
        return
    study.optimize(
        lambda trial: _train(tuning, trial),
        callbacks=[enough, lambda _, trial: told(_found(trial))],
        catch=(KeelError,),
        n_trials=tuning.trials,
    )


def best_of(study: Any) -> list[Found]:
    """All trials, the best that kept to the trust region first."""
    found = [_found(trial) for trial in study.trials if trial.state.is_finished()]
    return sorted(found, key=lambda x: (not x.allowed, x.state != "complete", -_order(x.score)))


def _order(score: float) -> float:
    return score if math.isfinite(score) else -math.inf


def _train(tuning: Tuning, trial: Any) -> float:
    """The score of one trial; raises `TrialPruned` where it is not worth going on."""
    optuna = need("optuna", "tune")
    settings = {name: _suggest(trial, name, place) for name, place in tuning.space.items()}
    trial.set_user_attr("settings", settings)
    config = from_dict(nested(settings), tuning.base)
    late: list[float] = []
    progress = start(config, tuning.folder, f"trial-{trial.number:04d}")
    with closing(progress):
        for now in progress:
            state = now.iteration.state
            value = now.metrics["rollout/return_mean"]
            prune = False
            if math.isfinite(value):
                trial.report(value, now.steps)
                prune = not now.done and trial.should_prune()
            if now.done or prune:
                _hold_to_region(trial, state.rollbacks, state.iteration)
            if prune:
                raise optuna.TrialPruned
            if math.isfinite(value) and now.steps > (1.0 - TAIL) * config.total_steps:
                late.append(value)
    if not late:
        raise KeelError(f"trial {trial.number}: no episode ended; train for longer")
    return sum(late) / len(late)


def _suggest(trial: Any, name: str, place: Range | tuple[Any, ...]) -> Any:
    if not isinstance(place, Range):
        return trial.suggest_categorical(name, list(place))
    if place.whole:
        return trial.suggest_int(name, int(place.low), int(place.high), log=place.log)
    return trial.suggest_float(name, place.low, place.high, log=place.log)


def _share(trial: Any) -> float:
    updates = trial.user_attrs.get(UPDATES, 0)
    return trial.user_attrs.get(VIOLATIONS, 0) / updates if updates else 0.0


def _hold_to_region(trial: Any, violations: int, updates: int) -> None:
    trial.set_user_attr(VIOLATIONS, violations)
    trial.set_user_attr(UPDATES, updates)
    if hasattr(trial, "set_constraint"):  # above 0 is not allowed
        trial.set_constraint("trust region", violations / updates - ALLOWED)


def _found(trial: Any) -> Found:
    state = {"complete": "complete", "pruned": "pruned"}.get(trial.state.name.lower(), "failed")
    score = math.nan if trial.value is None else float(trial.value)
    settings = trial.user_attrs.get("settings", trial.params)
    return Found(trial.number, score, settings, _share(trial), state)
