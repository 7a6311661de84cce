"""What the critic said the return would be, against what it was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from keel.errors import InputError, KeelError
from keel.keys import MASK
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, new_figure, tidy
from keel.models import popart
from keel.models.acting import make_actor
from keel.models.critics import Histogram, Quantile
from keel.models.sampling import draw_noise, sample, to_env
from keel.runs.drawing import write_png
from keel.training.evaluate import EvaluationStopped
from keel.training.policy import Policy, make_for
from keel.training.signals import stop_requested

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

ENVS, STEPS = 16, 4_000
"""Played side by side, and for how long."""
UNKNOWN = 0.5
"""The weight that what happened after the end of a record may have in a return that counts."""


class Record(NamedTuple):
    """Of playing; `[T, N]` each."""

    reward: Values
    ended: NDArray[np.bool_]
    cut: NDArray[np.bool_]
    ignored: NDArray[np.bool_]


@dataclass(frozen=True)
class Calibration:
    """Of `n` steps, played as in training; in the units of the reward."""

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
        """`[N]`: how often the return was below the quantile of each level."""
        below: Values = (self.realised[:, None] < self.predicted).mean(0)
        return below

    @property
    def coverage(self) -> float:
        """The share of returns between the predicted 10 % and 90 %."""
        low, high = (self._at(level) for level in (0.1, 0.9))
        return float(((self.realised >= low) & (self.realised <= high)).mean())

    def _at(self, level: float) -> Values:
        place = int(np.clip(np.searchsorted(self.levels, level), 1, len(self.levels) - 1))
        low, high = self.levels[place - 1 : place + 1]
        share = (level - low) / (high - low)
        found: Values = (1 - share) * self.predicted[:, place - 1] + share * self.predicted[
            :, place
        ]
        return found


def measure_calibration(policy: Policy, *, seed: int = 0, steps: int = STEPS) -> Calibration:
    """Play, and note what was said and what came of it, where that is known in the end."""
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
    said, rewards, ended, cut, ignored = [], [], [], [], []
    try:
        obs = envs.reset(seed)
        for _ in range(steps):
            if stop_requested():
                raise EvaluationStopped
            seen = obs if policy.normaliser is None else policy.normaliser.apply(obs)
            act(seen, output)
            tree = {key: torch.from_numpy(np.array(x)) for key, x in seen.items()}
            with torch.no_grad():
                raw = agent.raw_value(policy.params, tree)
                said.append(popart.in_reward(policy.params, critic.quantiles(raw)).numpy()
                            if critic.normalized else critic.quantiles(raw).numpy())  # fmt: skip
            noise = draw_noise(agent.dist, (ENVS,), rng)
            action = sample(agent.dist, output, seen.get(MASK), 1.0, noise)
            step = envs.step(to_env(agent.dist, action))
            rewards.append(_as_learned(policy, step.reward))
            ended.append(step.terminated)
            cut.append(step.truncated)
            ignored.append(step.ignored)
            obs = step.obs
    finally:
        envs.close()
    gamma = policy.config.advantage.gamma
    quantiles = np.array(said, dtype=np.float64)
    which = rng.integers(quantiles.shape[-1], size=(*quantiles.shape[:2], 1))
    drawn = np.take_along_axis(quantiles, which, -1)[..., 0]
    record = Record(*(np.array(x) for x in (rewards, ended, cut, ignored)))
    realised, whole, first = _returns(record, drawn, gamma)
    if not whole.any():
        raise KeelError(f"{policy.config.env}: no return is known after {steps:,} steps")
    scale = policy.reward_scale
    return Calibration(
        realised=scale * realised[whole],
        predicted=scale * quantiles[whole],
        levels=critic.levels(torch.zeros(1, dtype=torch.float64)).numpy(),
        first=first[whole],
    )


def _as_learned(policy: Policy, reward: Values) -> Values:
    """Rewards as they were in training."""
    reward = reward / policy.reward_scale
    clip = policy.config.envs.clip_reward
    return reward if clip is None else np.clip(reward, -clip, clip)


def _returns(
    record: Record, drawn: Values, gamma: float
) -> tuple[Values, NDArray[np.bool_], NDArray[np.bool_]]:
    """Discounted returns `[T, N]`, which of them are known well enough, and which are the first of
    their episode.

    Where an episode was cut off, or the record ends, a sample of the forecast stands for the rest,
    as it does in training; k steps before, it counts for γᵏ.
    """
    shape = record.reward.shape
    total, known, first = np.zeros(shape), np.zeros(shape, bool), np.zeros(shape, bool)
    later, unknown = drawn[-1], np.ones(shape[1])
    over = record.ended | record.cut | record.ignored
    for t in reversed(range(len(drawn))):
        counts = ~record.ignored[t]
        ended, cut = record.ended[t] & counts, record.cut[t] & ~record.ended[t] & counts
        later = np.where(counts, record.reward[t] + gamma * np.where(ended, 0.0, later), later)
        unknown = np.where(counts, gamma * np.where(ended, 0.0, unknown), unknown)
        later, unknown = np.where(cut, drawn[t], later), np.where(cut, 1.0, unknown)
        total[t], known[t] = later, counts & (unknown <= UNKNOWN)
        first[t] = over[t - 1] if t else True
    return total, known, first & ~record.ignored


def draw_calibration(found: Calibration, title: str, path: Path) -> None:
    """Calibration, the distribution at the start of episodes, and single forecasts, as PNG."""
    figure = new_figure(13.0, 4.4)
    left, middle, right = figure.subplots(1, 3)
    tidy(left, f"calibration: {found.coverage:.0%} inside the predicted 80 %",
         "level of the predicted quantile", "share of returns below it")  # fmt: skip
    left.plot([0, 1], [0, 1], color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    left.plot(found.levels, found.shares, color=BLUE, linewidth=2.0, marker="o", markersize=3)
    left.set_xlim(0, 1)
    left.set_ylim(0, 1)
    starts = found.first if found.first.any() else np.ones(len(found.first), bool)
    tidy(middle, "return from the start of an episode", "discounted return", "density")
    both = np.concatenate([found.realised[starts], found.predicted[starts].ravel()])
    low, high = np.quantile(both, [0.001, 0.999])
    bins = np.linspace(low, high, 41).tolist()
    middle.hist(found.realised[starts], bins, density=True, color=ORANGE, alpha=0.55,
                label=f"realised, {int(starts.sum()):,} episodes")  # fmt: skip
    middle.hist(found.predicted[starts].ravel(), bins, density=True, histtype="step", color=BLUE,
                linewidth=1.8, label="predicted")  # fmt: skip
    middle.legend(frameon=False, fontsize=9, labelcolor=INK)
    tidy(right, "single forecasts: 10 % to 90 %", "realised return", "predicted return")
    some = np.random.default_rng(0).permutation(len(found.realised))[:300]
    bottom, top = (found._at(level)[some] for level in (0.1, 0.9))
    inside = (found.realised[some] >= bottom) & (found.realised[some] <= top)
    for chosen, colour in ((inside, GREEN), (~inside, ORANGE)):
        right.vlines(found.realised[some][chosen], bottom[chosen], top[chosen], color=colour,
                     linewidth=0.8, alpha=0.6)  # fmt: skip
    ends = float(found.realised[some].min()), float(found.realised[some].max())
    right.plot(ends, ends, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    figure.suptitle(title, fontsize=13, color=INK, fontweight="bold", x=0.01, ha="left")
    write_png(figure, path)
