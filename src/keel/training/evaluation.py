"""Evaluation: whole episodes with a frozen policy, in environments of their own.

An evaluation always ends: an episode that goes on for too long is cut, and a request to stop the
process is heeded between two steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from torch import Tensor

from keel.config import Config, options
from keel.envs import AtariOptions, Envs, ObsNormalizer, Step, lead, time_limit
from keel.experience.acting import ActionSelector, initial_hidden_state
from keel.networks.agent import Agent
from keel.training.persist import EvaluationStopped
from keel.training.signals import stop_requested

LONGEST_EPISODE = 27_000
"""Steps after which an evaluation cuts an episode of an environment that has no time limit: that of
Atari games, half an hour at 60 frames a second and 4 frames a step."""


class EvaluationWarning(UserWarning):
    """Warning of a result of an evaluation that is not what it seems."""


class Score(NamedTuple):
    """Raw returns and lengths of the episodes, in the order of environments."""

    returns: list[float]
    lengths: list[int]
    agents: Mapping[str, list[float]] = MappingProxyType({})
    """returns of each of several agents, whose sum is the episode's"""
    cut: int = 0
    """episodes that did not end in time; their returns are those up to the cut"""

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """Standard deviation of the returns."""
        return float(np.std(self.returns))

    def __str__(self) -> str:
        """Return one line: mean, deviation, number of episodes."""
        cut = f", {self.cut} of them cut" if self.cut else ""
        return f"return {self.mean:,.2f} ± {self.std:,.2f} ({len(self.returns)} episodes{cut})"

    def metrics(self) -> dict[str, float]:
        """Return the metrics under the names of the registry."""
        return {
            **{f"eval/return_mean/{agent}": float(np.mean(x)) for agent, x in self.agents.items()},
            "eval/return_mean": self.mean,
            "eval/return_std": self.std,
            "eval/length_mean": float(np.mean(self.lengths)),
            "eval/episodes": float(len(self.returns)),
            "eval/episodes_cut": float(self.cut),
        }


def longest_episode(config: Config) -> int:
    """Return the number of steps after which an evaluation of this run cuts an episode.

    That is `evaluation.max_episode_steps`; where it is 0, the environment's own time limit, or
    `LONGEST_EPISODE` if it has none.
    """
    atari = AtariOptions(frame_skip=config.atari.frame_skip)
    env_limit = time_limit(config.env, options(config), atari)
    return config.evaluation.max_episode_steps or env_limit or LONGEST_EPISODE


def evaluate(
    agent: Agent,
    params: Tensor,
    envs: Envs,
    normalizer: ObsNormalizer | None,
    *,
    episodes: int,
    deterministic: bool,
    seed: int,
    max_episode_steps: int = LONGEST_EPISODE,
) -> Score:
    """Play `episodes` whole episodes, equally many in every environment.

    No environment contributes more than its share, so that short episodes are not favoured. The
    environments are reset first: the result depends on the policy and the seed alone. Raises
    `EvaluationStopped` when the process is asked to stop (`keel.training.signals`).

    Args:
        agent: distribution and network of the policy.
        params: `[G, P]`.
        envs: where to play.
        normalizer: of observations.
        episodes: number of episodes, rounded up to equally many in every environment.
        deterministic: take the mode in place of a sample.
        seed: of environments and actions.
        max_episode_steps: an episode that has not ended after so many steps is cut there; it counts
            with its return up to then, in `Score.cut`, and with an `EvaluationWarning`.
    """
    tally = _Tally(envs, quota=-(-episodes // envs.num_envs), limit=max_episode_steps)
    rng = None if deterministic else np.random.default_rng(seed)
    select = ActionSelector(agent, params, normalizer)
    obs, rows = envs.reset(seed), lead(envs)
    hidden_state = initial_hidden_state(agent, envs.num_envs)
    episode_starts = np.ones(envs.num_envs, bool)
    while not tally.complete:
        if stop_requested():
            raise EvaluationStopped
        if tally.stuck:  # nothing but the rest of episodes that were cut: begin new ones
            tally.begin()
            again = np.random.SeedSequence((seed, tally.begun - 1)).generate_state(1)[0]
            obs = envs.reset(int(again))
            hidden_state = initial_hidden_state(agent, envs.num_envs)
            episode_starts = np.ones(envs.num_envs, bool)
        action, hidden_state = select(obs, rows, hidden_state, episode_starts, rng)
        step = envs.step(action)
        obs, episode_starts = step.obs, step.ignored
        if envs.autoreset == "same_step":
            episode_starts = episode_starts | step.terminated | step.truncated
        tally.add(step)
    score = tally.score(episodes)
    if score.cut:
        warnings.warn(
            f"evaluation: {score.cut} of {episodes} episodes did not end within "
            f"{max_episode_steps:,} steps and were cut there; their returns are those up to the "
            "cut (evaluation.max_episode_steps sets the limit)",
            EvaluationWarning,
            stacklevel=2,
        )
    return score


class _Episode(NamedTuple):
    total: float
    length: int
    agents: np.ndarray
    """`[A]`: each agent's own return; empty where there is one agent"""
    cut: bool


class _Tally:
    """Episodes of an evaluation: those that count, and the running ones."""

    def __init__(self, envs: Envs, quota: int, limit: int) -> None:
        self._agents, self._quota, self._limit = envs.agents, quota, limit
        self._episodes: list[list[_Episode]] = [[] for _ in range(envs.num_envs)]
        self._incomplete = np.ones(envs.num_envs, bool)
        self.begun = 0
        """times that every environment began a new episode together"""
        self.begin()

    def begin(self) -> None:
        """Note that every environment begins a new episode."""
        self.begun += 1
        num_envs = len(self._episodes)
        self._reward: np.ndarray = np.zeros((num_envs, max(1, len(self._agents))))
        self._length: np.ndarray = np.zeros(num_envs, np.int64)
        self._is_cut: np.ndarray = np.zeros(num_envs, bool)  # cut, and still running

    @property
    def complete(self) -> bool:
        """Whether every environment has played its share."""
        return not self._incomplete.any()

    @property
    def stuck(self) -> bool:
        """Whether all incomplete environments are in an episode that was cut."""
        return bool(self._is_cut.any()) and not (self._incomplete & ~self._is_cut).any()

    def add(self, step: Step) -> None:
        """Count one step of all environments."""
        played = np.atleast_1d(~step.ignored.reshape(len(self._length), -1).all(-1))
        self._length += played
        self._reward += step.reward.reshape(self._reward.shape) * played[:, None]
        for position, index in enumerate(step.episode_index.tolist()):
            agent_returns = (
                np.zeros(0) if step.agent_return is None else step.agent_return[position]
            )
            total, length = step.episode_return[position], step.episode_length[position]
            self._count(index, _Episode(float(total), int(length), agent_returns, cut=False))
            self._reward[index], self._length[index], self._is_cut[index] = 0.0, 0, False
        for index in np.flatnonzero((self._length >= self._limit) & ~self._is_cut).tolist():
            agent_returns = self._reward[index].copy() if self._agents else np.zeros(0)
            total, length = self._reward[index].sum(), self._length[index]
            self._count(index, _Episode(float(total), int(length), agent_returns, cut=True))
            self._is_cut[index] = True

    def _count(self, index: int, episode: _Episode) -> None:
        episodes = self._episodes[index]
        if not self._is_cut[index] and len(episodes) < self._quota:
            episodes.append(episode)
            self._incomplete[index] = len(episodes) < self._quota

    def score(self, episodes: int) -> Score:
        """Return the first `episodes` that count."""
        scored = [episode for row in self._episodes for episode in row][:episodes]
        return Score(
            [episode.total for episode in scored],
            [episode.length for episode in scored],
            {w: [float(e.agents[a]) for e in scored] for a, w in enumerate(self._agents)},
            sum(episode.cut for episode in scored),
        )
