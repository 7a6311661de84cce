"""The training loop: a generator that yields after every iteration; anything can drive it."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.config import Config, check
from keel.controllers.controllers import Outcome
from keel.envs import ObsNormalizer, RewardNormalizer
from keel.experience.batch import Rows, Sampled, Targets, rows_of
from keel.experience.collector import Collected
from keel.experience.demos import sample_demos
from keel.experience.faults import broken
from keel.experience.targets import compute_targets
from keel.networks.popart import rescale_critic
from keel.tracking.catalogue.imitation import DOMINATES
from keel.training.builder import scheduled
from keel.training.session import Session, initial_state, open_session
from keel.training.shift import shift
from keel.training.state import WINDOW, TrainState
from keel.trust_region.measure import group_moments
from keel.types import HyperParams, Rollout, UpdateReport


@dataclass(frozen=True)
class Iteration:
    """One rollout and its update: what happened, and where the run stands."""

    state: TrainState
    report: UpdateReport
    metrics: dict[str, float]
    session: Session

    @property
    def steps(self) -> int:
        """Agent steps so far."""
        return self.state.steps


def train(config: Config) -> Generator[Iteration, None, TrainState]:
    """Train from scratch; environments are closed when the generator ends or is closed."""
    check(config)
    session = open_session(config)
    try:
        return (yield from run(session, initial_state(session)))
    finally:
        session.envs.close()


def run(session: Session, state: TrainState) -> Generator[Iteration, None, TrainState]:
    """Iterate from `state` until the configured number of steps."""
    while state.steps < session.config.total_steps:
        state, report, metrics = iterate(session, state)
        yield Iteration(state, report, metrics, session)
    return state


def iterate(
    session: Session, state: TrainState
) -> tuple[TrainState, UpdateReport, dict[str, float]]:
    """One iteration: collect, learn, certify, adapt."""
    config = session.config
    hparams = scheduled(state.hparams, config, state.steps)
    started = time.perf_counter()
    collected = session.collector.collect(
        state.opt_state.params, state.temperature, state.obs_normalizer
    )
    collected, reward_normalizer = _normalize_reward(collected, state, config)
    sampled = time.perf_counter()
    moved = shift(
        session.agent,
        state.opt_state.params,
        collected,
        state.obs_normalizer,
        hparams.temperature,
        hparams.max_kl if session.region.enforce else math.inf,
    )
    rollout = broken(moved.rollout.to(session.device), config.faults)
    rows = rows_of(rollout)
    noted: dict[str, float] = {}
    acted = collected.value
    if moved.changed:
        before = rows_of(broken(collected.rollout.to(session.device), config.faults))
        rows = replace(rows, sampled=Sampled(before.obs, state.temperature))
        acted = None  # the critic, too, sees new statistics
    if acted is not None:
        acted = acted.to(session.device)

    first: list[Tensor] = []
    sampling = session.shuffle if config.critic.targets == "sampled" else None

    def targets(params: Tensor) -> Targets:
        known = None if noted else acted  # later epochs ask the critic as it is then
        learned, statistics = compute_targets(
            session.agent,
            params,
            rollout,
            config.advantage,
            known,
            sampling,
            config.faults.interleaved_gae,
        )
        noted.update({k: v for k, v in statistics.items() if k not in noted})
        first.append(learned.target)
        return learned

    rows, demo_metrics = _with_demonstrations(
        session, state, rows, moved.normalizer, reward_normalizer
    )
    opt_state, report = session.region.update(
        session.learner,
        state.opt_state,
        rows,
        targets,
        replace(hparams, temperature=moved.temperature),
        session.shuffle,
        session.step,
        state.iteration,
    )
    if session.agent.critic.normalized:
        opt_state = opt_state._replace(
            params=rescale_critic(session.agent, opt_state.params, *group_moments(first[0], rows))
        )
    ended = time.perf_counter()
    returns = (*state.returns, *collected.episodes.returns.tolist())[-WINDOW:]
    lengths = (*state.lengths, *collected.episodes.lengths.tolist())[-WINDOW:]
    controllers, next_hparams = _adapt(
        session, state, report, hparams, collected, moved.temperature
    )
    if next_hparams.max_kl == hparams.max_kl:  # what is only planned is not remembered
        next_hparams = replace(next_hparams, max_kl=state.hparams.max_kl)
    seconds = state.seconds + ended - started
    state = TrainState(
        steps=state.steps + config.batch,
        iteration=state.iteration + 1,
        opt_state=opt_state,
        hparams=next_hparams,
        controllers=controllers,
        obs_normalizer=moved.normalizer,
        reward_normalizer=reward_normalizer,
        temperature=moved.temperature,
        rollbacks=state.rollbacks + int(report.verdict != "accepted"),
        kl_exact_max=max(state.kl_exact_max, report.kl_exact.max().item()),
        best_return=state.best_return,
        returns=returns,
        lengths=lengths,
        seconds=seconds,
    )
    metrics = {
        **_episode_metrics(state, collected),
        **_action_share(collected.rollout),
        **noted,
        **report.metrics,
        **demo_metrics,
        **_cloning_metrics(report.metrics),
        **_agent_metrics(session, report, collected),
        **moved.metrics,
        "train/rollbacks": float(state.rollbacks),
        "train/learning_rate": hparams.learning_rate,
        "train/critic_learning_rate": hparams.learning_rate * hparams.critic_factor,
        "train/clip_range": hparams.clip_high,
        "train/entropy_coef": hparams.entropy_coef,
        "train/kl_coef": hparams.kl_coef,
        "train/temperature": rollout.temperature,
        "train/temp_is_pulsing": float(rollout.temperature > 1.0),
        "time/steps": float(state.steps),
        "time/seconds": seconds,
        "time/rollout_seconds": sampled - started,
        "time/update_seconds": ended - sampled,
        "time/steps_per_second": config.batch / (ended - started),
    }
    return state, report, metrics


def _agent_metrics(
    session: Session, report: UpdateReport, collected: Collected
) -> dict[str, float]:
    """What each of several agents has for itself, as NAME/AGENT."""
    names, own = session.envs.agents, dict(report.agents)
    returns = collected.episodes.agents
    if returns is not None:
        own["rollout/return_mean"] = torch.from_numpy(returns.mean(0))
    return {
        f"{key}/{name}": value.item()
        for key, values in own.items()
        for name, value in zip(names, values, strict=True)
    }


def _normalize_reward(
    collected: Collected, state: TrainState, config: Config
) -> tuple[Collected, RewardNormalizer | None]:
    rollout, normalizer = collected.rollout, state.reward_normalizer
    if normalizer is None and config.envs.clip_reward is None:
        return collected, None
    reward = collected.reward
    if normalizer is not None:
        done = (rollout.terminated | rollout.truncated).numpy()
        reward, normalizer = normalizer.apply_rollout(reward, done, rollout.weight.numpy())
    if config.envs.clip_reward is not None:
        reward = np.clip(reward, -config.envs.clip_reward, config.envs.clip_reward)
    learned = torch.from_numpy(np.asarray(reward, dtype=np.float32))
    return collected._replace(rollout=replace(rollout, reward=learned)), normalizer


def _with_demonstrations(
    session: Session,
    state: TrainState,
    rows: Rows,
    observations: ObsNormalizer | None,
    rewards: RewardNormalizer | None,
) -> tuple[Rows, dict[str, float]]:
    """The rows with as many demonstrated steps beside them, seen and counted as the run's own."""
    config, demo_dataset = session.config, session.demo_dataset
    if demo_dataset is None:
        return rows, {}

    def scale_reward(reward: np.ndarray) -> np.ndarray:
        counted = reward if rewards is None else rewards.apply(reward)
        bound = config.envs.clip_reward
        return counted if bound is None else np.clip(counted, -bound, bound)

    demos, metrics = sample_demos(
        demo_dataset,
        session.agent,
        state.opt_state.params,
        rows.count,
        session.shuffle,
        config.demos,
        gamma=config.advantage.gamma,
        preprocess=observations.apply if observations is not None else dict,
        scale_reward=scale_reward,
    )
    return replace(rows, demos=demos), metrics


def _cloning_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return note 001's own two: the coefficient in use, and its warning, else NaN."""
    if "train/bc_coef" not in metrics:
        return {}
    ratio = metrics["train/bc_ppo_ratio"]
    return {
        "train/bc_coef_adjusted": metrics["train/bc_coef"],
        "warn/bc_dominates": ratio if ratio > DOMINATES else math.nan,
    }


def _adapt(
    session: Session,
    state: TrainState,
    report: UpdateReport,
    hparams: HyperParams,
    collected: Collected,
    temperature: float,
) -> tuple[tuple[Any, ...], HyperParams]:
    returns = collected.episodes.returns
    outcome = Outcome(
        kl=report.kl_requested.max().item(),
        return_mean=float(returns.mean()) if returns.size else math.nan,
        accepted=report.verdict != "rejected",
        gain_ratio=report.metrics.get("train/gain_ratio", math.nan),
        curvature_min=report.metrics.get("train/curvature_min", math.nan),
        bc_loss_ratio=report.metrics.get("train/bc_ppo_ratio", math.nan),
        bc_cosine=report.metrics.get("train/bc_cosine", math.nan),
        temperature=temperature,
    )
    states = []
    for controller, held in zip(session.controllers, state.controllers, strict=True):
        held, hparams = controller(held, outcome, hparams)
        states.append(held)
    return tuple(states), hparams


def _episode_metrics(state: TrainState, collected: Collected) -> dict[str, float]:
    known = bool(state.returns)
    reward = collected.reward[collected.rollout.weight.numpy() > 0]
    return {
        "rollout/return_mean": float(np.mean(state.returns)) if known else math.nan,
        "rollout/return_std": float(np.std(state.returns)) if known else math.nan,
        "rollout/length_mean": float(np.mean(state.lengths)) if known else math.nan,
        "rollout/episodes": float(collected.episodes.returns.size),
        "rollout/reward_mean": float(reward.mean()) if reward.size else math.nan,
        **{
            f"env/{name}": float(np.nanmean(x)) if np.isfinite(x).any() else math.nan
            for name, x in collected.episodes.measures.items()
        },
    }


def _action_share(rollout: Rollout) -> dict[str, float]:
    """How often the commonest of single discrete choices was taken: a policy that has collapsed
    onto one shows here before it shows in the return."""
    action, counts = rollout.action, rollout.weight > 0
    if action.dtype != torch.int64 or action.shape != rollout.weight.shape or not counts.any():
        return {}
    taken = torch.bincount(action[counts].flatten())
    return {"rollout/action_share_max": (taken.max() / counts.sum()).item()}
