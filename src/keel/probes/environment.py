"""`keel probe ENV`: is this environment one that can be learned in, and with what settings?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from keel.config import Config
from keel.envs.check import check_env
from keel.envs.make import make_envs
from keel.envs.spaces import is_image
from keel.probes.counterfactual import AHEAD, Effects, effects, greedy_return
from keel.probes.rollouts import Played, idle_actions, play, random_actions
from keel.types import MASK

Level = Literal["sick", "watch", "good", "fact"]
PARTS = ("contract", "random actions", "doing nothing", "does the action matter?")
"""What is measured, in this order."""
LANES = 4
"""Environments that are played side by side."""
STEPS = 20_000
BEYOND, DEAD = 10.0, 1e-3
"""Largest healthy observation, and the least standard deviation of a dimension (RLExplorer)."""
MANY_DEAD = 0.25
"""Share of dead dimensions that is told as a warning: one-hot codes and rare events have some."""
FAR = 1_000.0
"""Spread of returns that no learning rate of a critic is made for (values beyond ±10: A. Jones)."""
SPARSE = 0.9
"""Share of rewards that are 0 from which on they are sparse (note on routers)."""
REACH = 5.0
"""Horizons of the discount, 1 / (1 − γ), in which an episode should fit."""
LARGEST_GAMMA = 0.999


@dataclass(frozen=True)
class Remark:
    """One thing that was measured."""

    topic: str
    level: Level
    text: str


@dataclass
class EnvReport:
    """What was measured of an environment."""

    env: str
    remarks: list[Remark] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """what follows, by Keel's dotted names"""
    baselines: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    """mean return, standard deviation and number of episodes, by name"""

    @property
    def verdict(self) -> Level:
        """The worst level of a remark."""
        levels = {remark.level for remark in self.remarks}
        return "sick" if "sick" in levels else "watch" if "watch" in levels else "good"

    def note(self, topic: str, level: Level, text: str) -> None:
        """Add a remark."""
        self.remarks.append(Remark(topic, level, text))

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "env": self.env,
            "verdict": self.verdict,
            "remarks": [vars(remark) for remark in self.remarks],
            "settings": self.settings,
            "baselines": {
                name: {"return_mean": mean, "return_std": std, "episodes": episodes}
                for name, (mean, std, episodes) in self.baselines.items()
            },
        }


def probe_environment(
    env: str,
    *,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    seconds: float = 12.0,
    progress: Callable[[str], None] = lambda _: None,
) -> EnvReport:
    """Measure an environment without a policy.

    Args:
        env: Its name, as for `keel.train`.
        options: Of its constructor.
        seed: Of environments and actions.
        seconds: Budget of each of the three long parts.
        progress: Told what is measured next.
    """
    report = EnvReport(env)
    progress(PARTS[0])
    problems = check_env(env, seed=seed, env_kwargs=options)
    for problem in problems:
        report.note("contract", "sick", problem)
    if not problems:
        report.note("contract", "good", "shapes, dtypes, finite values, bounds, flags, seeding")
    envs = make_envs(env, LANES, backend="sync", seed=seed, env_kwargs=options)
    try:
        progress(PARTS[1])
        chooser = random_actions(envs, seed)
        played = play(envs, chooser, seed=seed, steps=STEPS, seconds=seconds)
        _judge_observations(report, envs, played)
        _judge_rewards(report, played)
        _judge_ends(report, played)
        _note_baseline(report, "random", played)
        progress(PARTS[2])
        idle = play(envs, idle_actions(envs), seed=seed, steps=STEPS // 4, seconds=seconds / 3)
        _note_baseline(report, "no-op", idle)
    finally:
        envs.close()
    progress(PARTS[3])
    _judge_actions(report, env, options, seed, seconds, deterministic=not problems)
    return report


def _judge_observations(report: EnvReport, envs: Any, played: Played) -> None:
    spaces = getattr(envs.observation_space, "spaces", {"obs": envs.observation_space})
    alive = 0
    for key, space in spaces.items():
        if key == MASK or key not in played.obs:
            continue
        rows = played.rows(key, math.prod(space.shape))
        if is_image(space):
            report.note(
                key, "fact", f"images {list(space.shape)}, {rows.min():g} to {rows.max():g}"
            )
            alive += int((rows.std(axis=0) >= DEAD).sum())
            continue
        dead = np.flatnonzero(rows.std(axis=0) < DEAD)
        alive += rows.shape[1] - len(dead)
        if len(dead):
            shown = ", ".join(map(str, dead[:8])) + (" …" if len(dead) > 8 else "")
            level: Level = "watch" if len(dead) > MANY_DEAD * rows.shape[1] else "fact"
            report.note(
                key,
                level,
                f"{len(dead)} of {rows.shape[1]} dimensions have a standard deviation below "
                f"{DEAD:g} under random actions: {shown}",
            )
        largest = float(np.abs(rows).max(initial=0.0))
        if largest > BEYOND:
            report.note(
                key, "watch", f"values up to {largest:.3g}; networks want about ±{BEYOND:g}"
            )
            report.settings["envs.normalize_obs"] = True
        elif not len(dead):
            report.note(key, "good", f"{rows.shape[1]} dimensions within ±{largest:.3g}, all alive")
    if not alive and not played.is_bandit:
        report.note("obs", "sick", "observations never change: there is nothing to tell states by")


def _judge_rewards(report: EnvReport, played: Played) -> None:
    reward = played.reward
    if len(reward) == 0:
        return
    zeros = float((reward == 0.0).mean())
    if (reward == reward[0]).all() and len(set(np.round(played.returns, 6))) <= 1:
        report.note(
            "reward",
            "watch",
            f"is {reward[0]:g} in all {len(reward):,} steps, and all episodes pay the same: random "
            "actions find nothing to learn from",
        )
    elif zeros > SPARSE:
        report.note("reward", "watch", f"sparse: {zeros:.1%} of all rewards are 0")
    else:
        text = f"mean {reward.mean():.3g}, standard deviation {reward.std():.3g}, {zeros:.0%} zeros"
        report.note("reward", "good", text)
    if (reward < 0.0).all() and played.terminated and played.terminated > played.truncated:
        report.note(
            "reward",
            "watch",
            "always negative, and episodes can end: dying early pays, unless the end costs more",
        )
    scale = float(np.std(played.returns)) if len(played.returns) > 1 else 0.0
    size = max(scale, float(np.abs(reward).mean()))
    if size > BEYOND or 0.0 < size < 1.0 / BEYOND:
        level: Level = "watch" if size > FAR or size < 1.0 / FAR else "fact"
        report.note(
            "reward scale",
            level,
            f"returns vary by {scale:.3g}; critics want about 1 to {BEYOND:g}",
        )
        report.settings["envs.normalize_reward"] = True


def _judge_ends(report: EnvReport, played: Played) -> None:
    ends = played.terminated + played.truncated
    if ends == 0:
        report.note(
            "episodes",
            "sick",
            f"none has ended in {played.steps:,} steps: without a time limit no return is known",
        )
        report.settings["evaluation.max_episode_steps"] = 1000
        return
    length = float(np.mean(played.lengths)) if played.lengths else float(played.steps)
    longest = max(played.lengths, default=0)
    cut = played.truncated / ends
    text = f"{ends:,} ended after {length:,.0f} steps on average; {cut:.0%} by the time limit"
    report.note("episodes", "fact", text)
    gamma = Config().advantage.gamma
    if longest > REACH / (1.0 - gamma):
        wanted = min(LARGEST_GAMMA, round(1.0 - REACH / longest, 4))
        report.note(
            "horizon",
            "watch",
            f"episodes of up to {longest:,} steps, γ = {gamma:g} looks {1 / (1 - gamma):.0f} "
            f"ahead; what pays later than that wants γ = {wanted:g}",
        )
    elif longest == 1:
        report.note("horizon", "fact", "every episode is one step: a bandit, γ and λ do not matter")


def _note_baseline(report: EnvReport, name: str, played: Played) -> None:
    if not played.returns:
        report.note(name, "fact", f"no episode ended in {played.steps:,} steps")
        return
    mean, std = float(np.mean(played.returns)), float(np.std(played.returns))
    report.baselines[name] = mean, std, len(played.returns)
    report.note(
        name, "fact", f"return {mean:,.3g} ± {std:,.3g} over {len(played.returns)} episodes"
    )


def _judge_actions(
    report: EnvReport,
    env: str,
    options: Mapping[str, Any] | None,
    seed: int,
    seconds: float,
    *,
    deterministic: bool,
) -> None:
    envs = make_envs(env, 1, backend="sync", seed=seed, env_kwargs=options)
    try:
        if envs.agents:
            report.note("actions", "fact", "not compared: there are several agents")
            return
        if not deterministic:
            report.note("actions", "fact", "not compared: the contract is broken")
            return
        found = effects(envs, seed=seed, seconds=seconds)
        greedy = greedy_return(envs, seed=seed, seconds=seconds / 2)
    finally:
        envs.close()
    if greedy is None:
        report.note("greedy", "fact", f"no episode ended within {seconds / 2:g} s")
    else:
        report.baselines["greedy"] = greedy, 0.0, 1
        report.note(
            "greedy", "fact", f"return {greedy:,.3g} in one episode, looking one step ahead"
        )
    if found is None:
        report.note("actions", "fact", "not compared: every episode ended too early")
    elif not found.matters:
        report.note(
            "actions",
            "sick",
            f"{len(found.labels)} actions in {found.states} states led to the same observations "
            "and rewards: the action has no effect",
        )
    else:
        _note_effects(report, found)


def _note_effects(report: EnvReport, found: Effects) -> None:
    twins = found.twins
    if twins:
        pairs = ", ".join(f"{a} and {b}" for a, b in twins[:4])
        report.note("actions", "watch", f"do the same in {found.states} states: {pairs}")
    apart = np.ptp(found.returns, axis=1)
    report.note(
        "actions",
        "good",
        f"one action changes the rewards of the next {AHEAD} steps by up to {apart.max():.3g}"
        if apart.max() > 0.0
        else f"change what is seen; not the rewards of the next {AHEAD} steps",
    )
