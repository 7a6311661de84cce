"""Calibration of a distributional critic: predicted returns against realised ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from keel.errors import InputError, KeelError
from keel.experience.acting import make_actor
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, new_figure, tidy
from keel.networks import popart
from keel.networks.critics import Histogram, Quantile
from keel.tracking.drawing import write_png
from keel.training.persist import EvaluationStopped
from keel.training.policy import Policy, make_for
from keel.training.signals import stop_requested
from keel.types import MASK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

ENVS, STEPS = 16, 4_000
"""Number of environments, and of steps in each."""
UNKNOWN = 0.5
"""Largest weight, in a return that counts, of what happened after the end of the record."""


class Record(NamedTuple):
    """Rewards and ends of the played steps; `[T, N]` each."""

    reward: Values
    ended: NDArray[np.bool_]
    cut: NDArray[np.bool_]
    ignored: NDArray[np.bool_]


@dataclass(frozen=True)
class Calibration:
    """Predicted and realised returns of `n` steps, played as in training; in units of reward."""

    realised: Values
    """`[n]`: discounted, to the end of the episode"""
    predicted: Values
    """`[n, N]`: quantiles"""
    levels: Values
    """`[N]`"""
    first: NDArray[np.bool_]
    """`[n]`: which are the first of their episode"""

    @property
    def shares(self) -> Values:
        """Share of returns below the quantile of each level, `[N]`."""
        below: Values = (self.realised[:, None] < self.predicted).mean(0)
        return below

    @property
    def coverage(self) -> float:
        """Share of returns between the predicted 10 % and 90 %."""
        low, high = (self._at(level) for level in (0.1, 0.9))
        return float(((self.realised >= low) & (self.realised <= high)).mean())

    def _at(self, level: float) -> Values:
        position = int(np.clip(np.searchsorted(self.levels, level), 1, len(self.levels) - 1))
        low, high = self.levels[position - 1 : position + 1]
        share = (level - low) / (high - low)
        quantile: Values = (1 - share) * self.predicted[:, position - 1] + share * self.predicted[
            :, position
        ]
        return quantile


def measure_calibration(policy: Policy, *, seed: int = 0, steps: int = STEPS) -> Calibration:
    """Play, and compare predicted with realised returns, where these are known in the end.

    Args:
        policy: of a run with a distributional critic.
        seed: of environments and actions.
        steps: of each environment.
    """
    agent, critic = policy.agent, policy.agent.critic
    if not isinstance(critic, Quantile | Histogram):
        raise InputError(
            "calibration: the critic of this run knows the mean only; "
            "train with --critic.kind quantile"
        )
    if agent.recurrent:
        raise InputError("calibration: networks with memory are not supported")
    envs = make_for(policy, ENVS, seed)
    rng = np.random.default_rng(seed)
    act = make_actor(agent, policy.params)
    output = np.zeros((ENVS, agent.dist.outputs), np.float32)
    predictions, rewards, ended, cut, ignored = [], [], [], [], []
    try:
        obs = envs.reset(seed)
        for _ in range(steps):
            if stop_requested():
                raise EvaluationStopped
            normalized = obs if policy.normalizer is None else policy.normalizer.apply(obs)
            act(normalized, output)
            tree = {key: torch.from_numpy(np.array(x)) for key, x in normalized.items()}
            with torch.no_grad():
                raw = agent.raw_value(policy.params, tree)
                predictions.append(popart.in_reward(policy.params, critic.quantiles(raw)).numpy()
                            if critic.normalized else critic.quantiles(raw).numpy())  # fmt: skip
            noise = agent.dist.noise((ENVS,), rng)
            action = agent.dist.sample(output, normalized.get(MASK), 1.0, noise)
            step = envs.step(agent.dist.to_env(action))
            rewards.append(_training_reward(policy, step.reward))
            ended.append(step.terminated)
            cut.append(step.truncated)
            ignored.append(step.ignored)
            obs = step.obs
    finally:
        envs.close()
    gamma = policy.config.advantage.gamma
    quantiles = np.array(predictions, dtype=np.float64)
    index = rng.integers(quantiles.shape[-1], size=(*quantiles.shape[:2], 1))
    sampled = np.take_along_axis(quantiles, index, -1)[..., 0]
    record = Record(*(np.array(x) for x in (rewards, ended, cut, ignored)))
    realised, known, first = _returns(record, sampled, gamma)
    if not known.any():
        raise KeelError(f"{policy.config.env}: no return is known after {steps:,} steps")
    scale = policy.reward_scale
    return Calibration(
        realised=scale * realised[known],
        predicted=scale * quantiles[known],
        levels=critic.levels(torch.zeros(1, dtype=torch.float64)).numpy(),
        first=first[known],
    )


def _training_reward(policy: Policy, reward: Values) -> Values:
    """Scale and clip rewards as in training."""
    reward = reward / policy.reward_scale
    clip = policy.config.envs.clip_reward
    return reward if clip is None else np.clip(reward, -clip, clip)


def _returns(
    record: Record, sampled: Values, gamma: float
) -> tuple[Values, NDArray[np.bool_], NDArray[np.bool_]]:
    """Return discounted returns, which are known well enough, and which begin an episode.

    All are `[T, N]`. Where an episode was cut off, or the record ends, a sample of the forecast
    stands for the rest, as it does in training; k steps before, it counts for γᵏ.
    """
    shape = record.reward.shape
    total, known, first = np.zeros(shape), np.zeros(shape, bool), np.zeros(shape, bool)
    later, unknown = sampled[-1], np.ones(shape[1])
    episode_over = record.ended | record.cut | record.ignored
    for t in reversed(range(len(sampled))):
        counts = ~record.ignored[t]
        ended, cut = record.ended[t] & counts, record.cut[t] & ~record.ended[t] & counts
        later = np.where(counts, record.reward[t] + gamma * np.where(ended, 0.0, later), later)
        unknown = np.where(counts, gamma * np.where(ended, 0.0, unknown), unknown)
        later, unknown = np.where(cut, sampled[t], later), np.where(cut, 1.0, unknown)
        total[t], known[t] = later, counts & (unknown <= UNKNOWN)
        first[t] = episode_over[t - 1] if t else True
    return total, known, first & ~record.ignored


def draw_calibration(calibration: Calibration, title: str, path: Path) -> None:
    """Draw calibration, the distribution at the start of episodes, and single forecasts.

    Args:
        calibration: as `measure_calibration` returns it.
        title: of the picture.
        path: a PNG file.
    """
    figure = new_figure(13.0, 4.4)
    left, middle, right = figure.subplots(1, 3)
    tidy(left, f"calibration: {calibration.coverage:.0%} inside the predicted 80 %",
         "level of the predicted quantile", "share of returns below it")  # fmt: skip
    left.plot([0, 1], [0, 1], color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    left.plot(
        calibration.levels, calibration.shares, color=BLUE, linewidth=2.0, marker="o", markersize=3
    )
    left.set_xlim(0, 1)
    left.set_ylim(0, 1)
    starts = calibration.first if calibration.first.any() else np.ones(len(calibration.first), bool)
    tidy(middle, "return from the start of an episode", "discounted return", "density")
    both = np.concatenate([calibration.realised[starts], calibration.predicted[starts].ravel()])
    low, high = np.quantile(both, [0.001, 0.999])
    bins = np.linspace(low, high, 41).tolist()
    middle.hist(calibration.realised[starts], bins, density=True, color=ORANGE, alpha=0.55,
                label=f"realised, {int(starts.sum()):,} episodes")  # fmt: skip
    middle.hist(calibration.predicted[starts].ravel(), bins, density=True, histtype="step",
                color=BLUE, linewidth=1.8, label="predicted")  # fmt: skip
    middle.legend(frameon=False, fontsize=9, labelcolor=INK)
    tidy(right, "single forecasts: 10 % to 90 %", "realised return", "predicted return")
    subset = np.random.default_rng(0).permutation(len(calibration.realised))[:300]
    bottom, top = (calibration._at(level)[subset] for level in (0.1, 0.9))
    inside = (calibration.realised[subset] >= bottom) & (calibration.realised[subset] <= top)
    for chosen, color in ((inside, GREEN), (~inside, ORANGE)):
        right.vlines(calibration.realised[subset][chosen], bottom[chosen], top[chosen], color=color,
                     linewidth=0.8, alpha=0.6)  # fmt: skip
    ends = float(calibration.realised[subset].min()), float(calibration.realised[subset].max())
    right.plot(ends, ends, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    figure.suptitle(title, fontsize=13, color=INK, fontweight="bold", x=0.01, ha="left")
    write_png(figure, path)
