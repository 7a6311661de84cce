"""A study: trials that train, are pruned early, and are held to the trust region."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.config import Config, from_dict
from keel.errors import InputError, KeelError, import_extra
from keel.tracking import RunError
from keel.tracking.directory import has_trained
from keel.tracking.files import exclusive
from keel.tracking.resume import nested
from keel.tracking.writer import cut_half_line
from keel.training.runner import start
from keel.training.signals import stop_requested
from keel.tune.space import Range, Space

JOURNAL = "study.jsonl"
VIOLATIONS, UPDATES = "violations", "updates"
ALLOWED = 0.10
"""Share of updates that may be walked back or rejected."""
REASON = "reason"
HOPELESS = 3
"""Trials that fail alike before the search is given up."""
TAIL = 0.1
"""A trial's score is its mean return over this last share of its steps."""


@dataclass(frozen=True)
class Tuning:
    """Search space, base settings and number of trials of a study."""

    folder: Path
    base: Config
    space: Space
    trials: int
    seed: int = 0


@dataclass(frozen=True)
class TrialResult:
    """Result of one trial."""

    number: int
    score: float
    settings: Mapping[str, Any]
    violations: float
    """share of updates that were walked back or rejected"""
    state: str
    """complete, pruned, or failed"""
    reason: str = ""
    """why it failed; empty if it was interrupted"""

    @property
    def allowed(self) -> bool:
        """True if the trial kept to the trust region."""
        return self.state == "complete" and self.violations <= ALLOWED


def open_study(tuning: Tuning) -> Any:
    """Open the study in its folder, which goes on where it stopped; a file of JSON lines.

    Args:
        tuning: what is searched.
    """
    optuna = import_extra("optuna", "tune")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    check_space(tuning)
    journal = tuning.folder / JOURNAL
    try:
        tuning.folder.mkdir(parents=True, exist_ok=True)
        backend = optuna.storages.journal.JournalFileBackend(str(journal))
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
    except Exception as error:  # a damaged journal fails in whatever way Optuna meets it
        raise RunError(f"{journal}: no study can be kept there: {error}") from error


def take_over(tuning: Tuning) -> Any:
    """Open the study for the one process that leads it, and repair what a killed one left.

    Half a line at the end of the journal is cut off, its lock is removed, and trials that no
    process trains any more count as failed.

    Args:
        tuning: what is searched.
    """
    optuna = import_extra("optuna", "tune")
    check_space(tuning)
    journal = tuning.folder / JOURNAL
    try:
        cut_half_line(journal)
        Path(f"{journal}.lock").unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"{journal}: cannot be written: {error.strerror or error}") from error
    study = open_study(tuning)
    for trial in study.trials:
        if not trial.state.is_finished():
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)
    return study


def _sampler(optuna: Any, seed: int) -> Any:
    """Return the sampler; before Optuna 5 it computes the constraint of a trial itself."""
    if hasattr(optuna.trial.Trial, "set_constraint"):
        return optuna.samplers.TPESampler(seed=seed)
    return optuna.samplers.TPESampler(
        seed=seed, constraints_func=lambda trial: (_share(trial) - ALLOWED,)
    )


def check_space(tuning: Tuning) -> None:
    """Refuse what cannot be searched before anything is trained."""
    for name, domain in tuning.space.items():
        values = (domain.low, domain.high) if isinstance(domain, Range) else domain
        for value in values:
            try:
                from_dict(nested({name: value}), tuning.base)
            except InputError as error:
                raise InputError(f"--search {name}: {error}") from None


def end_of(study: Any, trials: int) -> int:
    """Return the number below which trials may be taken, so that `trials` of them are finished.

    A trial that fails is not replaced: the same command tries again.

    Args:
        study: as `open_study` returns it.
        trials: number of trials to finish.
    """
    finished = sum(_result_of(trial).state != "failed" for trial in study.trials)
    return len(study.trials) + max(0, trials - finished)


def work(
    tuning: Tuning, on_trial: Callable[[TrialResult], None] = lambda _: None, end: int | None = None
) -> None:
    """Take trials until the study has enough; several processes may do so at once.

    Args:
        tuning: what is searched.
        on_trial: is called with every trial that this process has finished.
        end: number below which trials may be taken, by all processes together; by default what
            `end_of` says now.
    """
    study = open_study(tuning)
    last = end_of(study, tuning.trials) if end is None else end
    while not stop_requested() and (trial := _take(study, tuning.folder, last)) is not None:
        on_trial(_result_of(_finish(study, tuning, trial)))


def _take(study: Any, folder: Path, end: int) -> Any:
    """Take the next trial; None if there are enough, or all that were tried fail alike.

    Other processes are excluded meanwhile: two that count at once would both take the last one.
    """
    with exclusive(folder):
        trials = study.trials
        if len(trials) >= end or is_hopeless([_result_of(trial) for trial in trials]):
            return None
        return study.ask()


def is_hopeless(trials: Sequence[TrialResult]) -> bool:
    """Return whether the first trials all failed for one reason, which more would repeat."""
    reasons = {x.reason for x in trials if x.reason}
    failed = sum(bool(x.reason) for x in trials)
    trained = any(x.state != "failed" for x in trials)
    return not trained and failed >= HOPELESS and len(reasons) == 1


def _finish(study: Any, tuning: Tuning, trial: Any) -> Any:
    """Train a trial and record how it ended."""
    optuna = import_extra("optuna", "tune")
    states = optuna.trial.TrialState
    try:
        score = _train(tuning, trial)
    except optuna.TrialPruned:
        return study.tell(trial, state=states.PRUNED)
    except KeelError as error:
        trial.set_user_attr(REASON, str(error))
        return study.tell(trial, state=states.FAIL)
    except BaseException as error:
        if isinstance(error, Exception):  # else it was interrupted
            trial.set_user_attr(REASON, f"{type(error).__name__}: {error}")
        study.tell(trial, state=states.FAIL)
        raise
    if score is None:  # stopped on request: nothing is wrong with its settings
        return study.tell(trial, state=states.FAIL)
    return study.tell(trial, score)


def best_of(study: Any) -> list[TrialResult]:
    """Return all finished trials, the best that kept to the trust region first.

    Args:
        study: as `open_study` returns it.
    """
    results = [_result_of(trial) for trial in study.trials if trial.state.is_finished()]
    return sorted(results, key=lambda x: (not x.allowed, x.state != "complete", -_order(x.score)))


def _order(score: float) -> float:
    return score if math.isfinite(score) else -math.inf


def _train(tuning: Tuning, trial: Any) -> float | None:
    """Return the score of one trial, None if it was stopped on request.

    Raises `TrialPruned` where it is not worth going on.
    """
    optuna = import_extra("optuna", "tune")
    settings = {name: _suggest(trial, name, domain) for name, domain in tuning.space.items()}
    trial.set_user_attr("settings", settings)
    config = from_dict(nested(settings), tuning.base)
    tail_returns: list[float] = []
    progress = start(config, tuning.folder, f"trial-{trial.number:04d}")
    with closing(progress):
        for update in progress:
            if stop_requested():
                return None
            state = update.iteration.state
            value = update.metrics["rollout/return_mean"]
            prune = False
            if math.isfinite(value):
                trial.report(value, update.steps)
                prune = not update.done and trial.should_prune()
            if update.done or prune:
                _hold_to_region(trial, state.rollbacks, state.iteration)
            if prune:
                raise optuna.TrialPruned
            if math.isfinite(value) and update.steps > (1.0 - TAIL) * config.total_steps:
                tail_returns.append(value)
    if not tail_returns:
        raise KeelError("no episode ended; train for longer with --total-steps")
    return sum(tail_returns) / len(tail_returns)


def _suggest(trial: Any, name: str, domain: Range | tuple[Any, ...]) -> Any:
    if not isinstance(domain, Range):
        return trial.suggest_categorical(name, list(domain))
    if domain.whole:
        return trial.suggest_int(name, int(domain.low), int(domain.high), log=domain.log)
    return trial.suggest_float(name, domain.low, domain.high, log=domain.log)


def _share(trial: Any) -> float:
    updates = trial.user_attrs.get(UPDATES, 0)
    return trial.user_attrs.get(VIOLATIONS, 0) / updates if updates else 0.0


def _hold_to_region(trial: Any, violations: int, updates: int) -> None:
    trial.set_user_attr(VIOLATIONS, violations)
    trial.set_user_attr(UPDATES, updates)
    if hasattr(trial, "set_constraint"):  # above 0 is not allowed
        trial.set_constraint("trust region", violations / updates - ALLOWED)


def _result_of(trial: Any) -> TrialResult:
    state = {"complete": "complete", "pruned": "pruned"}.get(trial.state.name.lower(), "failed")
    score = math.nan if trial.value is None else float(trial.value)
    settings = trial.user_attrs.get("settings", trial.params)
    reason = str(trial.user_attrs.get(REASON, "")) if state == "failed" else ""
    return TrialResult(trial.number, score, settings, _share(trial), state, reason)


def remove_untrained(tuning: Tuning) -> None:
    """Remove a study none of whose trials has trained; one that holds a trained run stays."""
    runs = list(tuning.folder.glob("trial-*/seed-*"))
    if any(map(has_trained, runs)):
        return
    for run in runs:
        shutil.rmtree(run.parent, ignore_errors=True)
    (tuning.folder / JOURNAL).unlink(missing_ok=True)
