"""A run on disk: the loop with metrics, evaluations and checkpoints, from scratch or resumed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import numpy as np

from keel.config import Backend, Config, anchored, check, from_dict, options, to_dict
from keel.envs import Envs, make_envs
from keel.envs.space_data import Interface, describe_space
from keel.errors import InputError
from keel.keys import ENCODING, FIRST_ENCODING, MASK
from keel.tracking.config_file import read_config
from keel.tracking.directory import RunDirectory, find_run, run_name
from keel.tracking.environment import read_choices
from keel.tracking.reader import last_step
from keel.tracking.sinks import require_sinks
from keel.tracking.writer import set_metrics_aside
from keel.training.at_exit import close_at_exit
from keel.training.checkpoint import (
    Checkpoint,
    check_same,
    check_shapes,
    load,
    newest_step,
    save,
)
from keel.training.evaluation import evaluate, longest_episode
from keel.training.loop import run
from keel.training.persist import Progress, Watch, owes_evaluation, persist
from keel.training.session import Session, atari_options, initial_state, open_session
from keel.training.state import TrainState, arrays, pack, unpack
from keel.trust import remember, require_trust

EVALUATION_ENVS = 10
BACKENDS: dict[str, Backend] = {
    "gymnasium vector": "vector",
    "gymnasium sync": "sync",
    "gymnasium async": "async",
    "envpool": "envpool",
    "ale": "ale",
}
"""What environments call themselves, as `envs.backend` takes it."""
INTERFACE = "interface"
"""Key in a checkpoint of the spaces and agents of its environment, which need not be made."""
SAVED_STARTS = "starts"
"""Key in a checkpoint of the environments that begin an episode, for recurrent networks."""
MAY_CHANGE = (
    "total_steps",
    "checkpoints",
    "evaluation",
    "tag",
    "log",
    "threads",
    "compile",
    "device",
)
"""What a resumed run may set anew."""


class ResumeWarning(UserWarning):
    """Something of an interrupted run could not be restored exactly."""


def start(
    config: Config,
    root: Path,
    name: str | None = None,
    evaluating: Watch | None = None,
    announce: Callable[[], None] | None = None,
) -> Generator[Progress, None, TrainState]:
    """Train into a new run directory; nothing is created unless the environments start.

    Args:
        evaluating: told of every iteration whose evaluation begins.
        announce: called when everything is ready; if it raises, no run is left behind.
    """
    check(config)
    require_sinks(config.sinks)
    config = anchored(config)
    session = open_session(config)
    try:
        directory = RunDirectory.create(
            root,
            name or run_name(config.env, config.algo, root),
            config.seed,
            config=to_dict(config),
            tag=config.tag or None,
            choices=session.choices,
        )
        announced(directory, announce)
    except BaseException:
        session.envs.close()
        raise
    remember(to_dict(config))
    return close_at_exit(_drive(session, initial_state(session), directory, evaluating))


def announced(directory: RunDirectory, announce: Callable[[], None] | None) -> None:
    """Announce a run that was just made; what cannot be announced is removed again."""
    try:
        if announce is not None:
            announce()
    except BaseException:
        directory.discard()
        raise


def resume(
    path: Path | str,
    changes: Config | None = None,
    evaluating: Watch | None = None,
    *,
    trust_code: bool = False,
) -> Generator[Progress, None, TrainState]:
    """Go on with a run from its newest good checkpoint; the run is locked before anything else.

    A run that ended before its first checkpoint starts anew from its configuration, and one that
    was stopped or killed in its last evaluation makes that.

    Args:
        path: the folder of the run, or the one above it if that has a single seed.
        changes: the configuration to go on with; by default the run's own.
        evaluating: told of every iteration whose evaluation begins.
        trust_code: import code that the run's file names, also from outside of Keel.
    """
    path = find_run(Path(path))
    config = changes or from_dict(read_config(path))
    check(config)
    # with the defaults of fields that were added since
    stored = to_dict(from_dict(read_config(path, strict=True)))
    require_trust(stored, path, trust_code)
    directory = RunDirectory.resume(
        path, config=to_dict(config), stored=stored, may_change=MAY_CHANGE
    )
    try:
        checkpoint = load_for_resume(path, config.total_steps)
        encoding = ENCODING if checkpoint is None else saved_encoding(checkpoint)
        session = open_session(_as_chosen(config, path), encoding)
        try:
            _check_demos(session, path)
            state = initial_state(session) if checkpoint is None else _restore(session, checkpoint)
        except BaseException:
            session.envs.close()
            raise
    except BaseException:
        directory.close("failed")
        raise
    return close_at_exit(_drive(session, state, directory, evaluating))


def load_for_resume(path: Path, total_steps: int) -> Checkpoint | None:
    """Load the checkpoint that a run goes on from; None if it has to start anew.

    A `ResumeWarning` says so, or that nothing is left to train.
    """
    if newest_step(path) is None:
        aside = set_metrics_aside(path)
        note = f"; its metrics so far are in {aside}" if aside else ""
        message = f"{path}: has no checkpoint yet and starts anew from its config{note}"
        warnings.warn(message, ResumeWarning, stacklevel=3)
        return None
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


def saved_encoding(checkpoint: Checkpoint) -> int:
    """Return how observations become numbers in a checkpoint; those of version 0.1 do not say."""
    if INTERFACE not in checkpoint.data:
        return FIRST_ENCODING
    return Interface.from_data(checkpoint.data[INTERFACE]).encoding


def finished_message(path: Path, steps: int) -> str:
    """Say that a run has nothing left to train, and what to do."""
    return f"{path}: finished already at {steps:,} steps; a larger total_steps trains further"


def _as_chosen(config: Config, path: Path) -> Config:
    """What was decided automatically stays decided: another backend would be another run."""
    chosen = read_choices(path)
    backend = BACKENDS.get(str(chosen.get("backend")), config.envs.backend)
    if config.envs.backend == "auto":
        config = replace(config, envs=replace(config.envs, backend=backend))
    if config.compile == "auto" and "compile" in chosen:
        config = replace(config, compile="on" if chosen["compile"] else "off")
    if config.threads == 0:
        config = replace(config, threads=int(str(chosen.get("threads", 0))))
    return config


def _check_demos(session: Session, path: Path) -> None:
    """What the run learned from must be what it goes on with."""
    before, now = read_choices(path).get("demos"), session.choices.get("demos")
    if before is not None and before != now:
        raise InputError(
            f"demos.path: {session.config.demos.path} has changed since {path} began; put back "
            "what was there, or start a new run"
        )


def _drive(
    session: Session, state: TrainState, directory: RunDirectory, evaluating: Watch | None
) -> Generator[Progress, None, TrainState]:
    """The loop over environments, kept on the disk."""
    config = session.config
    evaluators: list[Envs] = []

    def close() -> None:
        for envs in (session.envs, *evaluators):
            envs.close()

    return persist(
        run(session, state),
        state,
        directory,
        config,
        evaluate=lambda now: _evaluate(session, now, evaluators),
        save=lambda now: _save(session, now, directory.path),
        close=close,
        session=session,
        evaluating=evaluating,
    )


def _evaluate(
    session: Session, state: TrainState, evaluators: list[Envs]
) -> tuple[TrainState, dict[str, float]]:
    config = session.config
    if not evaluators:
        evaluators.append(
            make_envs(
                config.env,
                min(config.evaluation.episodes, EVALUATION_ENVS),
                backend=config.envs.backend,
                seed=session.seeds.evaluation,
                guard=config.envs.guard,
                timeout=config.envs.timeout,
                atari=atari_options(config),
                env_kwargs=options(config),
            )
        )
    score = evaluate(
        session.agent,
        state.opt_state.params,
        evaluators[0],
        state.obs_normalizer,
        episodes=config.evaluation.episodes,
        deterministic=config.evaluation.deterministic,
        seed=session.seeds.evaluation,
        max_episode_steps=longest_episode(config),
    )
    metrics = score.metrics()
    best = max(state.best_return, metrics["eval/return_mean"])
    return state.replace(best_return=best), metrics


def _save(session: Session, state: TrainState, path: Path) -> None:
    collector = session.collector
    hidden_state = {**collector.hidden_state, SAVED_STARTS: collector.episode_starts}
    tensors, data = pack(
        state, collector.rng, session.shuffle, collector.obs, hidden_state, session.envs.save()
    )
    weights = session.agent.named(state.opt_state.params.cpu())
    data["saved"], data["spaces"] = time.time(), describe_spaces(session.envs)
    data[INTERFACE] = Interface.of(
        session.envs, masked=MASK in collector.obs, encoding=session.encoding
    ).to_data()
    save(path, state.steps, tensors, weights, data, keep=session.config.checkpoints.keep)


def describe_spaces(envs: Envs | Interface) -> dict[str, str]:
    """Return the spaces of environments in words, as checkpoints hold them."""
    return {
        "observation": describe_space(envs.observation_space),
        "action": describe_space(envs.action_space),
    }


def _restore(session: Session, checkpoint: Checkpoint) -> TrainState:
    """The state of a checkpoint; random streams and environments are put back in place."""
    fresh = initial_state(session)
    check_same("the spaces", checkpoint.data["spaces"], describe_spaces(session.envs))
    expected = {"params": fresh.opt_state.params}
    saved = {"params": checkpoint.tensors["opt_state/params"]}
    check_shapes(str(checkpoint.path), saved, expected)
    state = unpack(fresh, checkpoint.tensors, checkpoint.data)
    collector = session.collector
    collector.rng.bit_generator.state = checkpoint.data["actions"]
    session.shuffle.set_state(checkpoint.tensors["shuffle"])
    held = checkpoint.data["envs"]
    if held is not None:
        session.envs.load(arrays(checkpoint.tensors, "envs/"), held)
        collector.obs = arrays(checkpoint.tensors, "obs/")
        collector.hidden_state = arrays(checkpoint.tensors, "hidden_state/")
        collector.episode_starts = collector.hidden_state.pop(SAVED_STARTS)
    else:
        warnings.warn(
            f"{session.envs.backend}: environments cannot save their state, so running episodes "
            "begin anew; everything else goes on exactly",
            ResumeWarning,
            stacklevel=3,
        )
        seed = np.random.SeedSequence((session.seeds.envs, state.steps)).generate_state(1)[0]
        collector.begin(session.envs.reset(int(seed)))
    return state.replace(
        # copies, in torch's aligned memory: where numbers lie decides how products round
        opt_state=type(state.opt_state)(*(x.to(session.device, copy=True) for x in state.opt_state))
    )
