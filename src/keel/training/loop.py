"""The training loop: a generator that yields after every iteration; anything can drive it.

What a run remembers between two iterations, beside its source of experience, is a `TrainState`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from keel.experience.batch import Experience
from keel.types import AlgorithmState, HyperParams, OptimizerState, UpdateReport

if TYPE_CHECKING:
    from keel.controllers.controllers import Outcome
    from keel.training.session import Session


@dataclass(frozen=True)
class TrainState:
    """Between two iterations."""

    steps: int
    iteration: int
    opt_state: OptimizerState
    hparams: HyperParams
    controllers: tuple[Mapping[str, float], ...]
    rollbacks: int = 0
    kl_exact_max: float = 0.0
    """the largest mean KL(old‖new) that any update kept"""
    best_return: float = -float("inf")
    """of any evaluation"""
    seconds: float = 0.0
    set_by_hand: tuple[str, ...] = ()
    """hyperparameters that were set between iterations: schedules leave them alone"""

    def replace(self, **changes: Any) -> TrainState:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


SAVED = ("steps", "iteration", "rollbacks", "kl_exact_max", "best_return", "seconds")
"""Fields that a checkpoint holds as they are."""


def pack(state: TrainState, shuffle: torch.Generator) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and plain data that `unpack` turns into the same state, bit for bit."""
    tensors = {f"opt_state/{name}": x for name, x in state.opt_state._asdict().items()}
    tensors["shuffle"] = shuffle.get_state()
    data = {name: getattr(state, name) for name in (*SAVED, "controllers", "set_by_hand")}
    return tensors, data | {"hparams": dataclasses.asdict(state.hparams)}


def unpack(
    fresh: TrainState,
    shuffle: torch.Generator,
    tensors: Mapping[str, Tensor],
    data: Mapping[str, Any],
) -> TrainState:
    """Return the state that `pack` saw, and put the generator back in place.

    Args:
        fresh: a new state of this run, whose device counts.
        shuffle: generator of the run.
        tensors: as `pack` returned them.
        data: as `pack` returned it; language runs of version 0.1 had no state of controllers.
    """
    shuffle.set_state(tensors["shuffle"])
    device = fresh.opt_state.params.device
    # copies, in torch's aligned memory: where numbers lie decides how products round
    opt_state = {k: x.to(device, copy=True) for k, x in part(tensors, "opt_state/").items()}
    return fresh.replace(
        **{name: data[name] for name in SAVED},
        opt_state=OptimizerState(**opt_state),
        hparams=HyperParams(**data["hparams"]),
        controllers=tuple(data.get("controllers", fresh.controllers)),
        set_by_hand=tuple(data.get("set_by_hand", ())),
    )


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors under a prefix, without it."""
    return {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}


def arrays(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, np.ndarray]:
    """Return the same as numpy arrays."""
    return {key: x.numpy() for key, x in part(tensors, prefix).items()}


def prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return arrays as tensors of their own under a prefix."""
    return {f"{prefix}{key}": torch.from_numpy(np.array(x, order="C")) for key, x in values.items()}


class Seeds(NamedTuple):
    """A seed for each consumer of randomness."""

    envs: int
    network: int
    actions: int
    shuffle: int
    evaluation: int


def derive_seeds(seed: int) -> Seeds:
    """Derive five independent seeds from one, by numpy's SeedSequence."""
    states = np.random.SeedSequence(seed).generate_state(len(Seeds._fields), np.uint32)
    return Seeds(*(int(state) for state in states))


@dataclass(frozen=True)
class Iteration:
    """One batch of experience and its update: what happened, and where the run stands."""

    state: TrainState
    report: UpdateReport
    metrics: dict[str, float]
    session: Session

    @property
    def steps(self) -> int:
        """Agent steps so far."""
        return self.state.steps


def run(session: Session, state: TrainState) -> Generator[Iteration, None, TrainState]:
    """Iterate from `state` until the configured number of steps."""
    while state.steps < session.config.total_steps:
        if session.changes:
            from keel.training.hyperparams import apply_changes

            state = apply_changes(state, session.config, session.changes)
            session.changes.clear()
        state, report, metrics = iterate(session, state)
        yield Iteration(state, report, metrics, session)
    return state


def iterate(
    session: Session, state: TrainState
) -> tuple[TrainState, UpdateReport, dict[str, float]]:
    """One iteration: collect, learn, certify, adapt."""
    source, batch = session.source, session.config.batch
    hparams = session.schedule(state.hparams, state.steps, state.set_by_hand)
    started = time.perf_counter()
    experience = source.collect(state.opt_state.params, hparams)
    updated, report = session.algorithm.update(
        AlgorithmState(state.opt_state, session.shuffle, state.iteration),
        experience,
        replace(hparams, temperature=experience.temperature),
    )
    ended = time.perf_counter()
    scoring = experience.metrics.get("time/score_seconds", 0.0)
    controllers, next_hparams = _adapt(session, state, report, hparams, experience)
    state = TrainState(
        steps=state.steps + batch,
        iteration=state.iteration + 1,
        opt_state=updated.opt_state,
        hparams=next_hparams,
        controllers=controllers,
        rollbacks=state.rollbacks + int(report.verdict != "accepted"),
        kl_exact_max=max(state.kl_exact_max, report.kl_exact.max().item()),
        best_return=state.best_return,
        seconds=state.seconds + ended - started,
        set_by_hand=state.set_by_hand,
    )
    metrics = {
        **experience.metrics,
        **report.metrics,
        **_agent_metrics(experience.agents, report),
        **source.after_update(experience, updated.opt_state.params, report),
        **_hparam_metrics(hparams),
        "train/rollbacks": float(state.rollbacks),
        "time/steps": float(state.steps),
        "time/seconds": state.seconds,
        "time/rollout_seconds": experience.seconds,
        "time/update_seconds": ended - started - experience.seconds - scoring,
        "time/steps_per_second": batch / (ended - started),
        **{
            f"time/{name}_per_second": count / (ended - started)
            for name, count in experience.counts.items()
        },
    }
    return state, report, metrics


def _hparam_metrics(hparams: HyperParams) -> dict[str, float]:
    return {
        "train/learning_rate": hparams.learning_rate,
        "train/critic_learning_rate": hparams.learning_rate * hparams.critic_factor,
        "train/clip_range": hparams.clip_high,
        "train/entropy_coef": hparams.entropy_coef,
        "train/kl_coef": hparams.kl_coef,
    }


def _agent_metrics(names: Sequence[str], report: UpdateReport) -> dict[str, float]:
    """Return what each of several agents has for itself, as NAME/AGENT."""
    return {
        f"{key}/{name}": value.item()
        for key, values in report.agents.items()
        for name, value in zip(names, values, strict=True)
    }


def _adapt(
    session: Session,
    state: TrainState,
    report: UpdateReport,
    hparams: HyperParams,
    experience: Experience,
) -> tuple[tuple[Mapping[str, Any], ...], HyperParams]:
    """Let the controllers turn the hyperparameters; what is only planned is not remembered."""
    planned, states = hparams.max_kl, []
    for controller, own in zip(session.controllers, state.controllers, strict=True):
        outcome = _outcome(report, experience)
        own, hparams = controller(own, outcome, hparams)
        states.append(own)
    if hparams.max_kl == planned:
        hparams = replace(hparams, max_kl=state.hparams.max_kl)
    return tuple(states), hparams


def _outcome(report: UpdateReport, experience: Experience) -> Outcome:
    """Return what controllers hear of an update."""
    from keel.controllers.controllers import Outcome

    return Outcome(
        kl=report.kl_requested.max().item(),
        accepted=report.verdict != "rejected",
        gain_ratio=report.metrics.get("train/gain_ratio", math.nan),
        curvature_min=report.metrics.get("train/curvature_min", math.nan),
        bc_loss_ratio=report.metrics.get("train/bc_ppo_ratio", math.nan),
        bc_cosine=report.metrics.get("train/bc_cosine", math.nan),
        **experience.signals,
    )
