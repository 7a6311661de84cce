"""Routing as a vectorized environment: many clusters, each with one decision per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal, get_args

import numpy as np
from gymnasium import spaces

from keel.apps.serving import fields as f
from keel.apps.serving.arrays import Weights, make_weights
from keel.apps.serving.observations import REPLICA, REQUEST
from keel.apps.serving.results import METRICS, summarize
from keel.apps.serving.settings import Setting, draw_scenario, held_out, make_setting, training_seed
from keel.apps.serving.throughput_reward import (
    AFTER,
    VERSIONS,
    RewardState,
    RewardTerms,
    ThroughputReward,
    cold_start_metrics,
    compute_reward,
    initial_state,
    measure_clusters,
)
from keel.apps.serving.vector_clusters import VectorClusters
from keel.envs.protocol import Autoreset, Obs, Saved, Step
from keel.errors import InputError, check_choice
from keel.types import MASK

Reward = Literal["latency", "counterfactual", "throughput"]
MEASURES = {"latency": "end_to_end"} | {
    name: name for name in ("ttft_p99", "slo", "dropped", "cache_hits", "largest_share")
}
"""Metrics of a trace, by the names they have here."""
RENAMED = {"note-004": "throughput"}
"""Names of rewards in version 0.1, which still work."""
LATENCY_SCALE, WEIGHT_SCALE = 20.0, 2.0
"""Scales of the rewards in seconds."""
WORST = 20.0
"""Bound on the reward of one choice, in units of its scale."""


class ServingEnvs:
    """Vectorized environment of `num_envs` clusters; a finished trace restarts on another cluster.

    The reward `latency` is minus the seconds that all requests of the cluster spend until the next
    one arrives: over an episode minus the sum of all latencies. `counterfactual` is minus the cost
    of the choice to all requests at its replica, relative to the mean choice: their futures are
    simulated with and without the request, on the same random numbers. `throughput` is the reward
    of measured throughput and latency (`keel.apps.serving.throughput_reward`).

    Args:
        setting: Distribution of clusters and traces.
        num_envs: Number of clusters, C.
        reward: "latency", "counterfactual" or "throughput".
        scenes: "train" or "held-out": which scenarios are drawn.
        reward_rules: Parameters of the reward "throughput".
        refresh: Seconds between measurements for the reward "throughput".
        weights: Costs of a second and of a lost request in the other two rewards.
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
        reward_rules: ThroughputReward = AFTER,
        refresh: float = 0.0,
        weights: Weights = Weights(),  # noqa: B008
    ) -> None:
        self.reward_kind = check_choice("reward", RENAMED.get(reward, reward), get_args(Reward))
        self.scenes = check_choice("scenes", scenes, ("train", "held-out"))
        if setting.disturbed and reward != "counterfactual":
            raise InputError(
                "disturbed: only reward=counterfactual tells what a choice is worth that somebody "
                "else overrules; with other rewards say disturbed=0.0"
            )
        self.setting, self.num_envs = setting, num_envs
        self.clusters = VectorClusters(setting, num_envs, weights)
        self._rng = np.random.default_rng(0)
        self._next = 0
        self._total = np.zeros(num_envs)
        self._crowd = np.zeros((2, num_envs))
        """replica that a disturbance sends requests to, and its probability"""
        self.reward_rules, self.refresh = reward_rules, refresh
        self._reward_state = initial_state(num_envs)
        self._measured_at = np.full(num_envs, -np.inf)
        self._metrics = np.zeros((3, num_envs))
        self._parts = np.zeros((len(RewardTerms._fields), num_envs))
        self.action_space = spaces.Discrete(setting.replicas)
        self.observation_space = spaces.Dict(
            {"replicas": _box(setting.replicas, len(REPLICA)), "request": _box(len(REQUEST))}
        )

    def reset(self, seed: int) -> Obs:
        self._rng, self._next = np.random.default_rng(seed), 0
        self._clear_episodes(self.clusters.all)
        for c in self.clusters.all:
            self._begin(int(c))
        self.clusters.observe(self.clusters.all)
        return self._obs()

    def step(self, action: np.ndarray) -> Step:
        clusters, chosen = self.clusters, np.ascontiguousarray(action, dtype=np.int64)
        choice_cost = (
            clusters.counterfactual_costs() if self.reward_kind == "counterfactual" else None
        )
        mask = clusters.observations[2].copy()
        decision = clusters.at + 1
        last = decision == self.setting.requests
        cost = clusters.step(self._with_disturbance(chosen, mask))
        if self.reward_kind == "throughput":
            reward = self._throughput_reward(decision)
        elif choice_cost is None:
            reward = -cost / LATENCY_SCALE
        else:
            extra = choice_cost[clusters.all, chosen] - np.average(choice_cost, 1, mask)
            reward = -np.clip(extra / WEIGHT_SCALE, -WORST, WORST)
        self._total += reward
        over = last.nonzero()[0]
        returns, measures = self._total[over].copy(), None
        if over.size:
            measures = self._measures(over)
            self._clear_episodes(over)
            for c in over:
                self._begin(int(c))
            clusters.observe(over)
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
        """Do nothing: no resources are held."""

    def save(self) -> Saved | None:
        saved = {"total": self._total, "crowd": self._crowd, "told": self._measured_at,
                "known": self._metrics,
                "parts": self._parts, "memory": np.array(self._reward_state)}  # fmt: skip
        data = {"rng": self._rng.bit_generator.state, "next": self._next}
        return self.clusters.save() | {name: x.copy() for name, x in saved.items()}, data

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
        self.clusters.load(arrays)
        self._total[:], self._measured_at[:] = arrays["total"], arrays["told"]
        self._crowd[:] = arrays["crowd"]
        parts = arrays["parts"]  # of version 0.1: without the last
        self._metrics[:], self._parts[: len(parts)] = arrays["known"], parts
        self._reward_state = RewardState(*(x.copy() for x in arrays["memory"]))
        self._rng.bit_generator.state = data["rng"]
        self._next = int(data["next"])

    def _with_disturbance(self, chosen: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return the actions after random disturbances, `[C]`.

        The counterfactual reward credits the chosen action, so it is not affected.
        """
        if not self.setting.disturbed:
            return chosen
        early = self.clusters.at < self.setting.requests // 2
        others = self._rng.random(self.num_envs) < self._crowd[1]
        crowd = self._crowd[0].astype(np.int64)
        return np.where(early & others & mask[self.clusters.all, crowd], crowd, chosen)

    def _begin(self, cluster: int) -> None:
        if self.scenes == "train":
            seed = training_seed(self._rng)
        else:
            seed = held_out(self._next + 1)[-1]
            self._next += 1
        self.clusters.begin(cluster, draw_scenario(self.setting, seed), seed)
        if self.setting.disturbed:
            often = self._rng.uniform(0.2, 0.8) * (self._rng.random() < self.setting.disturbed)
            self._crowd[:, cluster] = self._rng.integers(self.clusters.sizes[cluster]), often

    def _throughput_reward(self, decision: np.ndarray) -> np.ndarray:
        """Return the reward of measured throughput and latency, `[C]`, and sum up its terms.

        Args:
            decision: Decisions of the trace so far, `[C]`, the one that is rewarded included.
        """
        clusters = self.clusters
        now = clusters.requests.times[clusters.all, f.Q_ARRIVAL, clusters.at]
        due = now >= self._measured_at + self.refresh
        if self.reward_rules.cold_start:
            fresh = cold_start_metrics(self.reward_rules, self.num_envs)
        else:
            fresh = np.array(measure_clusters(now, clusters.requests, clusters.replicas))
        self._metrics = np.where(due, fresh, self._metrics)
        self._measured_at = np.where(due, now, self._measured_at)
        throughput, latency, balance = self._metrics
        scores, self._reward_state = compute_reward(
            self.reward_rules, throughput, latency, balance, self._reward_state
        )
        self._parts += np.array(scores)
        if self.reward_rules.unpaid:
            return np.where(decision % self.reward_rules.unpaid == 0, 0.0, scores.total_reward)
        return scores.total_reward

    def _clear_episodes(self, over: np.ndarray) -> None:
        """Reset the sums and measurements of clusters `over` whose traces ended."""
        self._total[over], self._parts[:, over] = 0.0, 0.0
        self._measured_at[over] = -np.inf
        for old, blank in zip(self._reward_state, initial_state(len(over)), strict=True):
            old[over] = blank

    def _measures(self, over: np.ndarray) -> dict[str, np.ndarray]:
        """Return the metrics of traces that ended."""
        reports = [summarize(self.clusters.result(int(c), "policy")) for c in over]
        shares = np.zeros((len(reports), self.setting.replicas))
        for own, report in zip(shares, reports, strict=True):
            own[: len(report.shares)] = report.shares
        terms = {}
        if self.reward_kind == "throughput":
            parts = self._parts[:, over] / self.setting.requests
            terms = dict(zip(RewardTerms._fields, parts, strict=True))
        return {
            **terms,
            **{f"action_replica_{r}": x for r, x in enumerate(shares.T)},
            **{
                name: np.array([METRICS[metric](report) for report in reports])
                for name, metric in MEASURES.items()
            },
        }

    def _obs(self) -> Obs:
        replicas, request, mask = (x.copy() for x in self.clusters.observations)
        return {"replicas": replicas, "request": request, MASK: mask}


def vector_env(
    num_envs: int,
    *,
    setting: str = "mixed",
    reward: Reward = "latency",
    scenes: str = "train",
    version: str = "after",
    refresh: float = 0.0,
    weight_end: float = 1.0,
    weight_first: float = 0.0,
    weight_lost: float = 30.0,
    **changes: Any,
) -> ServingEnvs:
    """Make a vectorized environment of clusters of a named setting.

    Args:
        num_envs: Number of clusters.
        setting: A name of `SETTINGS`.
        reward: "latency", "counterfactual" or "throughput".
        scenes: "train" or "held-out": which scenarios are drawn.
        version: Parameters of the reward "throughput": "before" or "after".
        refresh: Seconds between measurements for the reward "throughput".
        weight_end: Cost of a second of a request until its end.
        weight_first: Additional cost of a second until its first token.
        weight_lost: Cost of a lost request.
        **changes: Other fields of `Setting` or of `ThroughputReward`.
    """
    weights = make_weights(weight_end, weight_first, weight_lost)
    version = changes.pop("note", version)  # the name in version 0.1
    rules = VERSIONS[check_choice("version", version, VERSIONS)]
    names = {field.name for field in fields(ThroughputReward)}
    own = {name: changes.pop(name) for name in list(changes) if name in names}
    return ServingEnvs(
        make_setting(setting, **changes), num_envs, reward, scenes, replace(rules, **own), refresh,
        weights,
    )  # fmt: skip


def _box(*shape: int) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, shape, np.float32)
