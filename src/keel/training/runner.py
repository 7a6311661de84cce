"""A run on disk: the loop with metrics, evaluations and checkpoints, from scratch or resumed."""

from __future__ import annotations

import atexit
import os
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.config import to_dict
from keel.tracking.directory import RunDirectory, find_run, run_name
from keel.tracking.record import read_config
from keel.tracking.writer import set_metrics_aside
from keel.training.checkpoint import Checkpoint, check_shapes, load, newest_step, save
from keel.training.environments import ResumeWarning
from keel.training.kinds import MAY_CHANGE, kind_of
from keel.training.loop import Iteration, TrainState, pack, run, unpack
from keel.training.persist import Progress, Watch, owes_evaluation, persist
from keel.training.session import Session, initial_state
from keel.trust import remember, require_importable, require_trust

if TYPE_CHECKING:
    from keel.training.source import ProgressCallback

__all__ = ["MAY_CHANGE", "Progress", "ResumeWarning", "finished_message", "resume", "start"]


def start(
    config: Any,
    root: Path,
    name: str | None = None,
    evaluating: Watch | None = None,
    announce: Callable[[Mapping[str, object]], None] | None = None,
    on_progress: ProgressCallback | None = None,
    start_from: Checkpoint | None = None,
) -> Generator[Progress, None, TrainState]:
    """Train into a new run directory; nothing is created unless the source can be opened.

    Args:
        config: of any kind of run.
        root: folder of all runs.
        name: of the run, by default what it trains on, algorithm and time.
        evaluating: told of every iteration whose evaluation begins.
        announce: called with what was decided when everything is ready; if it raises, no run is
            left behind.
        on_progress: called with metrics of work before the first update, or after the last.
        start_from: weights and normalizers to begin with, of another run.
    """
    kind = kind_of(config.env)
    kind.check(config)
    if config.log:
        from keel.tracking.sinks import require_sinks

        require_sinks(config.log)
    config = kind.anchored(config)
    session = kind.open(config, start_from)
    try:
        state = initial_state(session)
        if start_from is not None:
            state = _warm_start(session, state, start_from)
        directory = RunDirectory.create(
            root,
            name or run_name(kind.title(config), config.algo, root),
            config.seed,
            config=to_dict(config),
            tag=config.tag or None,
            choices=session.choices,
        )
        _announce(directory, session, announce)
    except BaseException:
        session.source.close()
        raise
    remember(to_dict(config))
    return _close_at_exit(_begin(session, state, directory, evaluating, on_progress))


def resume(
    path: Path | str,
    changes: Any = None,
    evaluating: Watch | None = None,
    *,
    trust_code: bool = False,
    on_progress: ProgressCallback | None = None,
) -> Generator[Progress, None, TrainState]:
    """Go on with a run from its newest good checkpoint; the run is locked before anything else.

    A run that ended before its first checkpoint starts anew from its configuration, and one that
    was stopped or killed in its last evaluation makes that.

    Args:
        path: the folder of the run, or the one above it if that has a single seed.
        changes: the configuration to go on with; by default the run's own.
        evaluating: told of every iteration whose evaluation begins.
        trust_code: import code that the run's file names, also from outside of Keel.
        on_progress: called with metrics of work before the first update, or after the last.
    """
    path = find_run(Path(path))
    data = read_config(path)
    kind = kind_of(data.get("env"))
    config = changes or kind.read(data)
    kind.check(config)
    # with the defaults of fields that were added since
    stored = to_dict(kind.read(read_config(path, strict=True)))
    require_importable(stored, path)
    require_trust(stored, path, trust_code)
    directory = RunDirectory.resume(
        path, config=to_dict(config), stored=stored, may_change=MAY_CHANGE
    )
    try:
        checkpoint = _load_for_resume(path, config.total_steps)
        session = kind.reopen(config, path, checkpoint)
        try:
            state = None if checkpoint is None else _restore(session, checkpoint)
        except BaseException:
            session.source.close()
            raise
    except BaseException:
        directory.close("failed")
        raise
    if state is None:
        fresh = initial_state(session)
        return _close_at_exit(_begin(session, fresh, directory, evaluating, on_progress))
    return _close_at_exit(_drive(session, state, directory, evaluating, on_progress))


def finished_message(path: Path, steps: int) -> str:
    """Say that a run has nothing left to train, and what to do."""
    return f"{path}: finished already at {steps:,} steps; a larger total_steps trains further"


def _announce(
    directory: RunDirectory,
    session: Session,
    announce: Callable[[Mapping[str, object]], None] | None,
) -> None:
    """Announce a run that was just made; what cannot be announced is removed again."""
    try:
        if announce is not None:
            announce(session.choices)
    except BaseException:
        directory.discard()
        raise


def _load_for_resume(path: Path, total_steps: int) -> Checkpoint | None:
    """Load the checkpoint that a run goes on from; None if it has to start anew.

    A `ResumeWarning` says so, or that nothing is left to train.
    """
    if newest_step(path) is None:
        aside = set_metrics_aside(path)
        note = f"; its metrics so far are in {aside}" if aside else ""
        message = f"{path}: has no checkpoint yet and starts anew from its config{note}"
        warnings.warn(message, ResumeWarning, stacklevel=3)
        return None
    from keel.tracking.reader import last_step

    checkpoint = load(path)
    logged = last_step(path)
    if logged < checkpoint.step:
        message = (
            f"{path}: has no metrics from step {logged:,} to {checkpoint.step:,}, its checkpoint"
        )
        warnings.warn(message, ResumeWarning, stacklevel=3)
    if checkpoint.step >= total_steps and not owes_evaluation(path, checkpoint.step):
        warnings.warn(finished_message(path, checkpoint.step), ResumeWarning, stacklevel=3)
    return checkpoint


def _warm_start(session: Session, state: TrainState, checkpoint: Checkpoint) -> TrainState:
    """Return the first state of a run with the weights of another; the rest begins anew."""
    params = session.source.warm_start(checkpoint).to(state.opt_state.params.device, copy=True)
    session.choices["start_from"] = str(checkpoint.path.resolve())
    return state.replace(opt_state=state.opt_state._replace(params=params))


def _begin(
    session: Session,
    state: TrainState,
    directory: RunDirectory,
    evaluating: Watch | None,
    on_progress: ProgressCallback | None,
) -> Generator[Progress, None, TrainState]:
    """Prepare the source, then go on as every run does; what fails on the way ends the run."""
    try:
        state = session.source.prepare(state, on_progress)
    except BaseException as error:
        session.source.close()
        directory.close("stopped" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    return (yield from _drive(session, state, directory, evaluating, on_progress))


def _drive(
    session: Session,
    state: TrainState,
    directory: RunDirectory,
    evaluating: Watch | None,
    on_progress: ProgressCallback | None,
) -> Generator[Progress, None, TrainState]:
    """The loop, kept on the disk."""
    source, path, total = session.source, directory.path, session.config.total_steps

    def watched() -> Generator[Iteration, None, TrainState]:
        for iteration in run(session, state):
            if iteration.steps >= total:
                source.draw_last_update(iteration.state, path)
            yield iteration
        return state

    def evaluate(now: TrainState) -> tuple[TrainState, dict[str, float]]:
        scores = source.evaluate(now.opt_state.params)
        if now.steps >= total:
            scores |= source.conclude(now.opt_state.params, scores, path, on_progress)
        return now.replace(best_return=max(now.best_return, scores[source.score])), scores

    ended: TrainState = yield from persist(
        watched(),
        state,
        directory,
        session.config,
        evaluate=evaluate,
        save=lambda now: _save(session, now, path),
        close=source.close,
        session=session,
        score=source.score,
        evaluating=evaluating,
    )
    return ended


def _save(session: Session, state: TrainState, path: Path) -> None:
    source, params = session.source, state.opt_state.params
    tensors, data = pack(state, session.shuffle)
    own_tensors, own_data = source.state_dict()
    save(
        path,
        state.steps,
        {**tensors, **own_tensors},
        source.weights(params.cpu()),
        {**data, **own_data, "saved": time.time()},
        keep=session.config.checkpoints.keep,
        more=source.files(params),
    )


def _restore(session: Session, checkpoint: Checkpoint) -> TrainState:
    """Return the state of a checkpoint; source and random streams are put back in place."""
    fresh = initial_state(session)
    session.source.load_state_dict(checkpoint.tensors, checkpoint.data)
    check_shapes(
        str(checkpoint.path),
        {"params": checkpoint.tensors["opt_state/params"]},
        {"params": fresh.opt_state.params},
    )
    return unpack(fresh, session.shuffle, checkpoint.tensors, checkpoint.data)


_OPEN: weakref.WeakKeyDictionary[Generator[Any, Any, Any], int] = weakref.WeakKeyDictionary()
"""Loops that hold a run, and the process that made each."""


def _close_at_exit(
    loop: Generator[Progress, None, TrainState],
) -> Generator[Progress, None, TrainState]:
    """Return `loop`, which is closed at exit if nothing else has done so: its checkpoint is saved.

    That is before the interpreter takes itself apart; closing a loop a second time does nothing.
    """
    _OPEN[loop] = os.getpid()
    return loop


@atexit.register
def _close_all() -> None:
    for loop, process in list(_OPEN.items()):
        if process == os.getpid() and not loop.gi_running:  # type: ignore[attr-defined]
            loop.close()
