"""A run on tokens, kept on disk: warm-up, preflight, the loop, checkpoints, and the control."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keel.apps.language.checks import check
from keel.apps.language.config import (
    Language,
    anchored,
    decoding,
    from_dict,
    to_dict,
)
from keel.apps.language.heatmap import write_heatmap
from keel.apps.language.judge import judge
from keel.apps.language.loop import Iteration, State, initial_state, run
from keel.apps.language.preflight import preflight, require
from keel.apps.language.session import Session, open_session
from keel.apps.language.supervised import ProgressCallback, control, warm_up
from keel.apps.language.tasks import held_out
from keel.apps.language.watching import token_table
from keel.networks.causal_lm import TokenAgent
from keel.tracking.config_file import read_config
from keel.tracking.directory import RunDirectory, find_run, run_name
from keel.tracking.files import replace_file
from keel.tracking.sinks import require_sinks
from keel.training.at_exit import close_at_exit
from keel.training.checkpoint import Checkpoint, check_shapes, save
from keel.training.persist import Progress, Watch, persist
from keel.training.runner import announced, load_for_resume
from keel.trust import remember, require_trust
from keel.types import HyperParams, OptimizerState

MAY_CHANGE = ("total_steps", "checkpoints", "evaluation", "tag", "log", "threads", "device")
"""What a resumed run may set anew."""
SCORE = "eval/success"
SUMMARY = "language.json"
HEATMAP = "tokens.html"


def start(
    config: Language,
    root: Path,
    name: str | None = None,
    on_progress: ProgressCallback | None = None,
    evaluating: Watch | None = None,
    announce: Callable[[], None] | None = None,
) -> Generator[Progress, None, State]:
    """Train into a new run directory; nothing is created unless the model can be made.

    Args:
        on_progress: called with metrics of the warm-up and of the control.
        evaluating: called with every iteration whose evaluation begins.
        announce: called when everything is ready; if it raises, no run is left behind.
    """
    check(config)
    require_sinks(config.sinks)
    config = anchored(config)
    session = open_session(config)
    directory = RunDirectory.create(
        root,
        name or run_name(f"{config.env}-{config.task}", config.algo, root),
        config.seed,
        config=to_dict(config),
        tag=config.tag or None,
        choices=session.choices,
    )
    announced(directory, announce)
    remember(to_dict(config))
    return close_at_exit(_begin(session, directory, on_progress, evaluating))


def _begin(
    session: Session,
    directory: RunDirectory,
    on_progress: ProgressCallback | None,
    evaluating: Watch | None,
) -> Generator[Progress, None, State]:
    """Warm up and check, then go on as every run does; what fails on the way ends the run."""
    config = session.config
    try:
        opt_state, warm_up_metrics = warm_up(session, on_progress)
        state = initial_state(session, opt_state)
        before = judge(session, opt_state.params, _looks(session))
        judged = {k.removeprefix("eval/"): v for k, v in before.metrics().items()}
        warm_up_metrics |= {f"judged_{name}": value for name, value in judged.items()}
        state = state.replace(
            warm_up=warm_up_metrics, start=opt_state.params.clone() if _controlled(config) else None
        )
        if config.preflight:
            require(preflight(session, opt_state.params, state.reference))
    except BaseException as error:
        directory.close("stopped" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    return (yield from _drive(session, state, directory, on_progress, evaluating))


def resume(
    path: Path | str,
    changes: Language | None = None,
    on_progress: ProgressCallback | None = None,
    evaluating: Watch | None = None,
    *,
    trust_code: bool = False,
) -> Generator[Progress, None, State]:
    """Go on with a run from its newest good checkpoint; without one it starts anew.

    Args:
        path: the folder of the run, or the one above it if that has a single seed.
        changes: its configuration with other values of what may change, such as `total_steps`.
        on_progress: called with metrics of the warm-up and of the control.
        evaluating: called with every iteration whose evaluation begins.
        trust_code: import reward functions that the run's file names.
    """
    path = find_run(Path(path))
    config = changes or from_dict(read_config(path))
    check(config)
    stored = to_dict(from_dict(read_config(path, strict=True)))
    require_trust(stored, path, trust_code)
    directory = RunDirectory.resume(
        path, config=to_dict(config), stored=stored, may_change=MAY_CHANGE
    )
    try:
        checkpoint = load_for_resume(path, config.total_steps)
        session = open_session(config)
        state = None if checkpoint is None else restore(session, checkpoint)
    except BaseException:
        directory.close("failed")
        raise
    if state is None:
        return close_at_exit(_begin(session, directory, on_progress, evaluating))
    return close_at_exit(_drive(session, state, directory, on_progress, evaluating))


def _drive(
    session: Session,
    state: State,
    directory: RunDirectory,
    on_progress: ProgressCallback | None,
    evaluating: Watch | None,
) -> Generator[Progress, None, State]:
    def watched() -> Generator[Iteration, None, State]:
        loop = run(session, state)
        for iteration in loop:
            if iteration.state.steps >= session.config.total_steps:
                _draw_tokens(session, iteration, directory.path)
            yield iteration
        return state

    def evaluate(now: State) -> tuple[State, dict[str, float]]:
        verdict = judge(session, now.opt_state.params, _looks(session))
        scores = verdict.metrics()
        if now.steps >= session.config.total_steps:
            scores |= _finish(session, now, directory.path, scores, on_progress)
        best = max(now.best_return, scores[SCORE])
        return now.replace(best_return=best), scores

    ended: State = yield from persist(
        watched(),
        state,
        directory,
        session.config,
        evaluate=evaluate,
        save=lambda now: store(session, now, directory.path),
        close=lambda: None,
        session=session,
        score=SCORE,
        evaluating=evaluating,
    )
    return ended


def _draw_tokens(session: Session, last: Iteration, path: Path) -> None:
    """Write the page of the last update: before the checkpoint, which does not hold its tokens."""
    params = last.state.opt_state.params
    write_heatmap(token_table(session, last, params, path), path / HEATMAP)


def _finish(
    session: Session,
    state: State,
    path: Path,
    scores: dict[str, float],
    on_progress: ProgressCallback | None,
) -> dict[str, float]:
    """Train the control, write the summary, and return metrics of both."""
    metrics: dict[str, float] = {}
    summary: dict[str, Any] = {
        "task": session.config.task,
        "algo": session.config.algo,
        "decoding": decoding(session.config),
        "warm_up": state.warm_up,
        "rl": {**{k.removeprefix("eval/"): v for k, v in scores.items()}, "passes": state.passes},
    }
    if state.start is not None:
        result = control(session, state.start, state.passes, on_progress)
        summary["control"] = result
        metrics["eval/control_success"] = result["success"]
    if "judged_success" in state.warm_up:
        metrics["eval/warmup_success"] = state.warm_up["judged_success"]
    replace_file(path / SUMMARY, (json.dumps(_plain(summary), indent=1) + "\n").encode())
    return metrics


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _looks(session: Session) -> list[Any]:
    return held_out(session.task, session.config.evaluation.prompts)


def _controlled(config: Language) -> bool:
    return config.control and config.warmup.examples > 0


def store(session: Session, state: State, path: Path) -> None:
    """A checkpoint: Keel's own state, and the model as `from_pretrained` reads it."""
    tensors: dict[str, Tensor] = {
        f"opt_state/{name}": x for name, x in state.opt_state._asdict().items()
    }
    for name, x in (("reference", state.reference), ("start", state.start)):
        if x is not None:
            tensors[name] = x
    tensors |= {"draws": session.draws.get_state(), "shuffle": session.shuffle.get_state()}
    data = {
        "steps": state.steps,
        "iteration": state.iteration,
        "hparams": state.hparams.__dict__,
        "rollbacks": state.rollbacks,
        "kl_exact_max": state.kl_exact_max,
        "best_return": state.best_return,
        "seconds": state.seconds,
        "passes": state.passes,
        "spent": state.spent,
        "warm_up": state.warm_up,
        "examples": session.examples.bit_generator.state,
        "saved": time.time(),
    }
    keep_most = session.config.checkpoints.keep
    save(
        path,
        state.steps,
        tensors,
        {},
        data,
        keep=keep_most,
        more=model_files(session, state.opt_state),
    )


def model_files(session: Session, opt_state: OptimizerState) -> dict[str, bytes]:
    """The model and its tokenizer in the format of Hugging Face, file by file."""
    write_into(session.agent, opt_state.params)
    with tempfile.TemporaryDirectory() as folder:
        session.agent.network.model.save_pretrained(folder)
        session.tokenizer.save_pretrained(folder)
        return {place.name: place.read_bytes() for place in sorted(Path(folder).iterdir())}


@torch.no_grad()
def write_into(agent: TokenAgent, params: Tensor) -> None:
    """Let the module hold these parameters, for those who use it without the matrix."""
    own = dict(agent.network.named_parameters())
    for name, x in agent.layout.unflatten(params[0]).items():
        own[name].copy_(x)


def restore(session: Session, checkpoint: Checkpoint) -> State:
    """The state of a checkpoint; random streams are put back in place."""
    tensors, data = checkpoint.tensors, checkpoint.data
    check_shapes(
        str(checkpoint.path),
        {"params": tensors["opt_state/params"]},
        {"params": session.agent.initial},
    )
    session.draws.set_state(tensors["draws"])
    session.shuffle.set_state(tensors["shuffle"])
    session.examples.bit_generator.state = data["examples"]
    device = session.device

    def held(name: str) -> Tensor | None:
        return tensors[name].to(device, copy=True) if name in tensors else None

    opt_state = {k: held(f"opt_state/{k}") for k in OptimizerState._fields}
    return State(
        steps=data["steps"],
        iteration=data["iteration"],
        opt_state=OptimizerState(**opt_state),  # type: ignore[arg-type]
        hparams=HyperParams(**data["hparams"]),
        reference=held("reference"),
        rollbacks=data["rollbacks"],
        kl_exact_max=data["kl_exact_max"],
        best_return=data["best_return"],
        seconds=data["seconds"],
        passes=data["passes"],
        spent=data["spent"],
        start=held("start"),
        warm_up=data["warm_up"],
    )
