"""Output of a run on the disk, iteration by iteration: metrics, a checkpoint, an evaluation.

In this order: what was learned is safe before an evaluation begins. An evaluation that was stopped
or killed is made by the run that is resumed, which ends with the same metrics as one that was never
interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from keel.envs.watchdog import FAILED, before_abrupt_exit
from keel.tracking.directory import DOCTOR, METRICS, RunDirectory
from keel.tracking.record import read_config
from keel.tracking.writer import MetricsWriter, last_record
from keel.training.checkpoint import mark_best
from keel.trust_region.gate import NumericError

if TYPE_CHECKING:
    from keel.tracking.sinks import Sinks

FAULT = "fault.safetensors"
"""File with minibatch and parameters of a run that was stopped by numbers not finite."""


class EvaluationStopped(KeyboardInterrupt):
    """Signal that an evaluation was left because the process was asked to stop."""


@dataclass(frozen=True)
class Progress:
    """One iteration of a run on disk."""

    iteration: Any
    """of environments, or of tokens: a state, a report, a session"""
    metrics: dict[str, float]
    """with `eval/…`, where an evaluation took place"""
    path: Path
    done: bool

    @property
    def steps(self) -> int:
        """Number of agent steps so far."""
        return int(self.iteration.steps)

    def set(self, **values: float) -> None:
        """Set hyperparameters, in force from the next update on.

        They are recorded in the metrics and in the next checkpoint. Schedules leave alone what was
        set by hand; adaptive rules go on from it.

        Args:
            **values: any of learning_rate, clip, entropy_coef, max_kl.
        """
        from keel.training.hyperparams import check_changes

        session = self.iteration.session
        session.changes.update(check_changes(session.config, values))


Watch = Callable[[Progress], None]
"""Callback for an iteration whose evaluation begins now."""


@dataclass(frozen=True)
class Restored:
    """The last iteration of an earlier process, whose evaluation was left to this one."""

    state: Any
    metrics: dict[str, float]
    session: Any
    report: None = None

    @property
    def steps(self) -> int:
        """Number of agent steps so far."""
        return int(self.state.steps)


SCORE = "eval/return_mean"
"""A metric that every evaluation has."""


def owes_evaluation(run: Path, step: int) -> bool:
    """Return whether `step`, at which a run ended, was never evaluated: stopped or killed in it."""
    line = last_record(run / METRICS)
    if line is None or line["step"] != step or SCORE in line:
        return False
    return bool(read_config(run).get("evaluation", {}).get("episodes", 1))


@contextmanager
def diagnosed(run: Path, config: Any) -> Iterator[None]:
    """Write the diagnosis of a run when it ends, however it ends.

    Args:
        run: Its folder.
        config: Its settings; `doctor` says whether anything is done.
    """
    if not config.doctor:
        yield
        return
    with suppress(OSError):  # that of an earlier part of a resumed run
        (run / DOCTOR).unlink()
    try:
        yield
    finally:
        from keel.doctor.watching import write_diagnosis  # not before: a run does not need it

        write_diagnosis(run)


def persist(
    loop: Generator[Any, None, Any],
    state: Any,
    directory: RunDirectory,
    config: Any,
    *,
    evaluate: Callable[[Any], tuple[Any, dict[str, float]]],
    save: Callable[[Any], None],
    close: Callable[[], None],
    session: Any,
    score: str = SCORE,
    evaluating: Watch | None = None,
) -> Generator[Progress, None, Any]:
    """Yield the iterations of `loop`, each when everything it leaves on the disk is there.

    Args:
        loop: the training loop.
        state: where the run stands; that of a checkpoint in a resumed run.
        directory: of the run.
        config: says how long, how often to evaluate and to save, and where copies of metrics go.
        evaluate: returns the state with its best return, and metrics, or raises EvaluationStopped.
        save: writes a checkpoint.
        close: releases what the loop and the evaluations use.
        session: that of the loop, for an iteration that an earlier process has made.
        score: the metric that makes a checkpoint the best.
        evaluating: called when an evaluation begins.
    """
    try:
        with (
            before_abrupt_exit(partial(_mark_ended, directory)),
            directory,
            diagnosed(directory.path, config),
            MetricsWriter(directory.metrics) as writer,
            closing(_open_sinks(config, directory.path)) if config.log else nullcontext() as sinks,
            _saved_faults(directory.path),
        ):
            writer.truncate_after(state.steps)
            recorder = _Recorder(
                directory.path, config, writer, sinks, evaluate, save, score,
                evaluating or (lambda _: None), state.steps, state.best_return,
            )  # fmt: skip
            pending = recorder.pending_evaluation(state, session)
            if pending is not None:
                progress = recorder.evaluated(pending)
                state = progress.iteration.state
                yield progress
            for iteration in loop:
                progress = recorder.record(iteration)
                state = progress.iteration.state
                try:
                    yield progress
                except GeneratorExit:  # left early: nothing that was learned is lost
                    recorder.store(state)
                    raise
            if recorder.evaluation_pending:
                directory.close("stopped")
    finally:
        loop.close()
        close()
    return state


@dataclass
class _Recorder:
    """Writer of metrics, checkpoints and evaluations of every iteration."""

    path: Path
    config: Any
    writer: MetricsWriter
    sinks: Sinks | None
    evaluate: Callable[[Any], tuple[Any, dict[str, float]]]
    save: Callable[[Any], None]
    score: str
    evaluating: Watch
    saved_at: int
    best: float
    evaluation_pending: bool = False
    """whether the last evaluation was stopped, and is left to a resumed run"""

    def record(self, iteration: Any) -> Progress:
        """Write the metrics of an iteration, a checkpoint if one is due, and only then evaluate."""
        # the loop knows nothing of evaluations: the best of them is remembered here
        state = iteration.state.replace(best_return=self.best)
        metrics, report = dict(iteration.metrics), iteration.report
        texts = {"train/verdict": report.verdict, "train/reason": report.reason}
        self.writer.write(state.steps, {**metrics, **texts})
        if self.sinks is not None:
            self.sinks.write(state.steps, metrics)
        done = state.steps >= self.config.total_steps
        if done or state.steps - self.saved_at >= self.config.checkpoints.every:
            self.store(state)
        progress = Progress(replace(iteration, state=state), metrics, self.path, done)
        return self.evaluated(progress) if self._is_due(state.steps) else progress

    def evaluated(self, progress: Progress) -> Progress:
        """Evaluate and add the result to the line of metrics; stopped, leave it to be done later.

        The line is completed last, after the best checkpoint is marked: as long as it is not, a
        resumed run evaluates again.
        """
        state = progress.iteration.state
        self.evaluating(progress)
        try:
            state, scores = self.evaluate(state)
        except EvaluationStopped:
            self.evaluation_pending = True
            return progress
        except BaseException:
            self.store(state)
            raise
        self.evaluation_pending, self.best = False, state.best_return
        if scores.get(self.score, math.nan) >= state.best_return:
            self.saved_at = -1  # the checkpoint of this step, if there is one, knows an older best
            self.store(state)
            mark_best(self.path, state.steps, state.best_return)
        self.writer.amend(state.steps, scores)
        if self.sinks is not None:
            self.sinks.write(state.steps, scores)
        iteration = replace(progress.iteration, state=state)
        return replace(progress, iteration=iteration, metrics=progress.metrics | scores)

    def store(self, state: Any) -> None:
        """Write a checkpoint, unless this step has one; the metrics are on the disk before it."""
        if state.steps > self.saved_at:
            self.saved_at = state.steps
            self.writer.sync()
            self.save(state)

    def pending_evaluation(self, state: Any, session: Any) -> Progress | None:
        """Return the last iteration of an earlier process if its evaluation is missing."""
        line = self.writer.last()
        if line is None or line["step"] != state.steps or self.score in line:
            return None
        if not self._is_due(state.steps):
            return None
        metrics = {k: v for k, v in line.items() if isinstance(v, float)}
        done = state.steps >= self.config.total_steps
        return Progress(Restored(state, metrics, session), metrics, self.path, done)

    def _is_due(self, steps: int) -> bool:
        """Return whether the iteration that ended here is evaluated; the same when resumed."""
        if getattr(self.config.evaluation, "episodes", 1) == 0:
            return False
        every: int = self.config.evaluation.every
        is_interval = every > 0 and steps // every > (steps - self.config.batch) // every
        return bool(is_interval or steps >= self.config.total_steps)


def _open_sinks(config: Any, path: Path) -> Sinks:
    from keel.tracking.sinks import open_sinks

    return open_sinks(config.log, path, asdict(config))


def _mark_ended(directory: RunDirectory, status: int) -> None:
    directory.close("failed" if status == FAILED else "stopped")


@contextmanager
def _saved_faults(path: Path) -> Iterator[None]:
    """Save the numbers that stop a run beside it, to be inspected."""
    try:
        yield
    except NumericError as error:
        file = path / FAULT
        try:
            save_file({k: x.detach().cpu().contiguous() for k, x in error.tensors.items()}, file)
        except Exception as reason:  # the disk may be full: what matters is the first error
            raise NumericError(f"{error} (the minibatch was not kept: {reason})", {}) from error
        raise NumericError(f"{error}. The minibatch: {file}", error.tensors) from error
