"""Routing as Keel trains on it: many clusters, each with one decision per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from keel.apps.serving import fields as f
from keel.apps.serving.arrays import Weights, make_weights
from keel.apps.serving.observations import REPLICA, REQUEST
from keel.apps.serving.results import summarise
from keel.apps.serving.settings import Setting, draw, held_out, make_setting, training_seed
from keel.apps.serving.throughput_reward import (
    AFTER,
    VERSIONS,
    Memory,
    NoteReward,
    Scores,
    cold_values,
    fresh_memory,
    measured,
    score,
)
from keel.apps.serving.vector_clusters import Many
from keel.envs.protocol import Autoreset, Obs, Saved, Step
from keel.errors import InputError, check_choice
from keel.keys import MASK

Reward = Literal["latency", "counterfactual", "note-004"]
REWARDS = ("latency", "counterfactual", "note-004")
LATENCY_SCALE, WEIGHT_SCALE = 20.0, 2.0
"""Seconds."""
WORST = 20.0
"""Bound on the reward of one choice, in units of its scale."""
NOBODY = np.zeros(0, np.int64)


class ServingEnvs:
    """`num_envs` clusters; a finished trace is followed at once by another, on another cluster.

    The reward `latency` is minus the seconds that all requests of the cluster spend until the next
    one arrives: over an episode minus the sum of all latencies. `counterfactual` is minus what the
    choice costs all requests at its replica, beyond what the mean choice would: their futures are
    played with and without the request, on the same random numbers. `weights` says what a second
    until the first token, until the end, and a lost request cost in both. `note-004` is the note's
    (`keel.apps.serving.throughput_reward`), which is told of the cluster every `refresh` seconds.
    """

    agents: tuple[str, ...] = ()
    autoreset: Autoreset = "same_step"
    backend = "serving"

    def __init__(
        self,
        setting: Setting,
        num_envs: int,
        reward: Reward = "latency",
        scenes: str = "train",
        note: NoteReward = AFTER,
        refresh: float = 0.0,
        weights: Weights = Weights(),  # noqa: B008
    ) -> None:
        self.reward_kind = check_choice("reward", reward, REWARDS)
        self.scenes = check_choice("scenes", scenes, ("train", "held-out"))
        if setting.disturbed and reward != "counterfactual":
            raise InputError(
                "disturbed: only reward=counterfactual tells what a choice is worth that somebody "
                "else overrules; with other rewards say disturbed=0.0"
            )
        self.setting, self.num_envs = setting, num_envs
        self.many = Many(setting, num_envs, weights)
        self._rng = np.random.default_rng(0)
        self._next = 0
        self._total = np.zeros(num_envs)
        self._crowd = np.zeros((2, num_envs))
        """where somebody else sends requests, and how often"""
        self.note, self.refresh = note, refresh
        self._memory = fresh_memory(num_envs)
        self._told = np.full(num_envs, -np.inf)
        self._known = np.zeros((3, num_envs))
        self._parts = np.zeros((len(Scores._fields), num_envs))
        self.action_space = spaces.Discrete(setting.replicas)
        self.observation_space = spaces.Dict(
            {
                "replicas": _box(setting.replicas, len(REPLICA)),
                "request": _box(len(REQUEST)),
            }
        )

    def reset(self, seed: int) -> Obs:
        self._rng, self._next = np.random.default_rng(seed), 0
        self._forget(self.many.all)
        for c in self.many.all:
            self._begin(int(c))
        self.many.look(self.many.all)
        return self._obs()

    def step(self, action: np.ndarray) -> Step:
        many, chosen = self.many, np.ascontiguousarray(action, dtype=np.int64)
        weight = many.weighed() if self.reward_kind == "counterfactual" else None
        may = many.seen[2].copy()
        decision = many.at + 1
        last = decision == self.setting.requests
        cost = many.step(self._disturbed(chosen, may))
        if self.reward_kind == "note-004":
            reward = self._by_note(decision)
        elif weight is None:
            reward = -cost / LATENCY_SCALE
        else:
            extra = weight[many.all, chosen] - np.average(weight, 1, may)
            reward = -np.clip(extra / WEIGHT_SCALE, -WORST, WORST)
        self._total += reward
        over = last.nonzero()[0]
        returns, measures = self._total[over].copy(), None
        if over.size:
            measures = self._measures(over)
            self._forget(over)
            for c in over:
                self._begin(int(c))
            many.look(over)
        nothing = np.zeros(self.num_envs, bool)
        return Step(
            obs=self._obs(),
            reward=reward.astype(np.float32),
            terminated=last,
            truncated=nothing,
            ignored=nothing.copy(),
            final_obs=None,
            episode_index=over,
            episode_return=returns,
            episode_length=np.full(over.size, self.setting.requests),
            episode_measures=measures,
        )

    def close(self) -> None:
        """Nothing is open."""

    def save(self) -> Saved | None:
        kept = {"total": self._total, "crowd": self._crowd, "told": self._told,
                "known": self._known,
                "parts": self._parts, "memory": np.array(self._memory)}  # fmt: skip
        return self.many.save() | {name: x.copy() for name, x in kept.items()}, {
            "rng": self._rng.bit_generator.state,
            "next": self._next,
        }

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
        self.many.load(arrays)
        self._total[:], self._told[:] = arrays["total"], arrays["told"]
        self._crowd[:] = arrays["crowd"]
        parts = arrays["parts"]  # of version 0.1: without the last
        self._known[:], self._parts[: len(parts)] = arrays["known"], parts
        self._memory = Memory(*(x.copy() for x in arrays["memory"]))
        self._rng.bit_generator.state = data["rng"]
        self._next = int(data["next"])

    def _disturbed(self, chosen: np.ndarray, may: np.ndarray) -> np.ndarray:
        """What is really done: now and then somebody else chooses. Whoever is credited by what the
        choice would have cost does not mind."""
        if not self.setting.disturbed:
            return chosen
        early = self.many.at < self.setting.requests // 2
        others = self._rng.random(self.num_envs) < self._crowd[1]
        crowd = self._crowd[0].astype(np.int64)
        return np.where(early & others & may[self.many.all, crowd], crowd, chosen)

    def _begin(self, cluster: int) -> None:
        if self.scenes == "train":
            seed = training_seed(self._rng)
        else:
            seed = held_out(self._next + 1)[-1]
            self._next += 1
        self.many.begin(cluster, draw(self.setting, seed), seed)
        if self.setting.disturbed:
            often = self._rng.uniform(0.2, 0.8) * (self._rng.random() < self.setting.disturbed)
            self._crowd[:, cluster] = self._rng.integers(self.many.sizes[cluster]), often

    def _by_note(self, decision: np.ndarray) -> np.ndarray:
        """Note 004's reward of what is known of all clusters; the parts are added up.

        Args:
            decision: Decisions of the trace so far, `[C]`, the one that is rewarded included.
        """
        many = self.many
        now = many.requests.times[many.all, f.Q_ARRIVAL, many.at]
        due = now >= self._told + self.refresh
        if self.note.cold_start:
            fresh = cold_values(self.note, self.num_envs)
        else:
            fresh = np.array(measured(now, many.requests, many.replicas))
        self._known = np.where(due, fresh, self._known)
        self._told = np.where(due, now, self._told)
        throughput, latency, balance = self._known
        scores, self._memory = score(self.note, throughput, latency, balance, self._memory)
        self._parts += np.array(scores)
        if self.note.unpaid:
            return np.where(decision % self.note.unpaid == 0, 0.0, scores.total_reward)
        return scores.total_reward

    def _forget(self, over: np.ndarray) -> None:
        """Traces that ended leave nothing to those that begin."""
        self._total[over], self._parts[:, over] = 0.0, 0.0
        self._told[over] = -np.inf
        for old, blank in zip(self._memory, fresh_memory(len(over)), strict=True):
            old[over] = blank

    def _measures(self, over: np.ndarray) -> dict[str, np.ndarray]:
        """Of traces that ended."""
        reports = [summarise(self.many.played(int(c), "policy")) for c in over]
        shares = np.zeros((len(reports), self.setting.replicas))
        for own, report in zip(shares, reports, strict=True):
            own[: len(report.shares)] = report.shares
        steps = self.setting.requests
        of_note = {}
        if self.reward_kind == "note-004":
            parts = zip(Scores._fields, self._parts[:, over] / steps, strict=True)
            of_note = dict(parts)
        return (
            of_note
            | {f"action_replica_{r}": x for r, x in enumerate(shares.T)}
            | {
                "latency": np.array([r.end_to_end.mean for r in reports]),
                "ttft_p99": np.array([r.ttft.p99 for r in reports]),
                "slo": np.array([r.slo for r in reports]),
                "dropped": np.array([float(r.dropped) for r in reports]),
                "cache_hits": np.array([r.cache_hits for r in reports]),
                "largest_share": np.array([max(r.shares) for r in reports]),
            }
        )

    def _obs(self) -> Obs:
        replicas, request, mask = (x.copy() for x in self.many.seen)
        return {"replicas": replicas, "request": request, MASK: mask}


def vector_env(
    num_envs: int,
    *,
    setting: str = "mixed",
    reward: Reward = "latency",
    scenes: str = "train",
    note: str = "after",
    refresh: float = 0.0,
    weight_end: float = 1.0,
    weight_first: float = 0.0,
    weight_lost: float = 30.0,
    **changes: Any,
) -> ServingEnvs:
    """`num_envs` clusters of a named setting, with changes to it, or to note 004's reward, whose
    parameters are those `before` or `after` the note. The weights are those of a second until the
    end, another until the first token, and of a lost request."""
    weights = make_weights(weight_end, weight_first, weight_lost)
    rules = VERSIONS[check_choice("note", note, VERSIONS)]
    names = {field.name for field in fields(NoteReward)}
    own = {name: changes.pop(name) for name in list(changes) if name in names}
    return ServingEnvs(
        make_setting(setting, **changes), num_envs, reward, scenes, replace(rules, **own), refresh,
        weights,
    )  # fmt: skip


def _box(*shape: int) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, shape, np.float32)
