"""Reward of measured throughput and latency: four terms, and two sets of parameters.

It rewards what was measured of the cluster, not the effect of a choice on it. Its parameters decide
the sign: with the old ones a healthy cluster earns −0.09 at every decision, with the new ones 0.6,
and nothing is better for it. The earlier rewards of the same origin, `instant` and `delta`, are
here too: `latency_penalty_scale` is a parameter of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from keel.apps.serving import fields as f
from keel.apps.serving.arrays import Floats, Ints, Replicas, Requests
from keel.errors import InputError, check_choice

Mode = Literal["hybrid", "instant", "delta"]
EMA_RATE = 0.1
LEAST_TARGET, LEAST_THRESHOLD = 0.1, 0.5
"""Lower bounds: a throughput target of 0.05 has the effect of 0.1."""
DELTA_THROUGHPUT, DELTA_LATENCY = 0.3, 0.2
COLD_THROUGHPUT, COLD_SHARE, COLD_LATENCY = 0.1, 0.3, 0.5
"""Values in place of measurements while the metric store is empty: requests per second, the share
of the latency threshold, and the least seconds."""
LEGACY_SCALE = 3.0
"""Divisor of the legacy rewards before the tanh."""


@dataclass(frozen=True)
class ThroughputReward:
    """Parameters of the reward; the defaults are the new set, `AFTER`."""

    throughput_target: float = 0.05
    alpha: float = 0.1
    """weight of latency in the absolute score"""
    latency_threshold: float = 6.0
    kappa: float = 0.05
    sigma: float = 2.0
    absolute_weight: float = 0.8
    delta_weight: float = 0.2
    load_balance_penalty: float = 0.15
    adaptive_target: bool = False
    """Let the target follow the measured throughput."""
    latency_penalty_scale: float = 0.5
    """height of the penalty on latency above its threshold, which only the legacy rewards subtract;
    `hybrid` reports it"""
    cold_start: bool = False
    """Score the values for an empty metric store, whatever the cluster does. They give every figure
    of the original log: −0.05, 0.059, −0.094, a delta of 0, and the expected 1.99"""
    unpaid: int = 0
    """Reward 0 at every `unpaid`-th decision; 0: never. The original code learns from a rollout
    before the reward of its last decision is written"""
    mode: Mode = "hybrid"
    """`hybrid`: absolute and delta terms; legacy: `instant`, by throughput and latency, and
    `delta`, by their changes since the last decision"""

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, get_args(Mode))
        if self.unpaid < 0:
            raise InputError(f"unpaid: expected a number of decisions, or 0, got {self.unpaid}")


BEFORE = ThroughputReward(
    throughput_target=1.0, alpha=0.5, latency_threshold=2.0, kappa=0.3, sigma=1.0,
    absolute_weight=0.7, delta_weight=0.3, load_balance_penalty=0.03, latency_penalty_scale=5.0,
)  # fmt: skip
AFTER = ThroughputReward()
VERSIONS = {"before": BEFORE, "after": AFTER}


class RewardTerms(NamedTuple):
    """Terms of the reward, `[C]` each, by the names of the original CSV."""

    absolute_score: Floats
    delta_score: Floats
    logistic_penalty: Floats
    balance_penalty: Floats
    total_reward: Floats
    latency_threshold_penalty: Floats


class RewardState(NamedTuple):
    """Previous measurements and their averages, `[C]` each; NaN before the first decision."""

    throughput: Floats
    latency: Floats
    throughput_ema: Floats
    latency_ema: Floats


def initial_state(count: int) -> RewardState:
    """Return the state before the first decision, for `count` clusters."""
    return RewardState(*(np.full(count, np.nan) for _ in range(4)))


def compute_reward(
    rules: ThroughputReward,
    throughput: Floats,
    latency: Floats,
    balance: Floats,
    state: RewardState,
) -> tuple[RewardTerms, RewardState]:
    """Compute the reward and its terms, `[C]` each.

    abs = thr / max(target, 0.1) − α·lat / max(threshold, 0.5);
    logistic = κ·sigmoid((lat − threshold) / σ);
    delta = 0.3·Δthr / EMA(thr) − 0.2·Δlat / EMA(lat);
    reward = tanh(w_abs·abs + w_Δ·delta − lb·balance − logistic);
    late = scale·(1 − e^−(lat − threshold)) above the threshold, 0 below it;
    legacy rewards = tanh((thr − lat − lb·balance − late) / 3), of `delta` with changes in place of
    throughput and latency.

    Args:
        rules: Parameters of the reward.
        throughput: Requests per second, `[C]`.
        latency: Seconds until the first token, `[C]`.
        balance: Unevenness of the queues, `[C]`.
        state: Of the previous decision.

    Returns:
        The terms, and the state for the next decision.
    """
    averages = [
        np.where(np.isnan(old), now, old + EMA_RATE * (now - old))
        for old, now in ((state.throughput_ema, throughput), (state.latency_ema, latency))
    ]
    target = averages[0] if rules.adaptive_target else rules.throughput_target
    absolute = throughput / np.maximum(target, LEAST_TARGET)
    absolute = absolute - rules.alpha * latency / max(rules.latency_threshold, LEAST_THRESHOLD)
    logistic = rules.kappa / (1.0 + np.exp(-(latency - rules.latency_threshold) / rules.sigma))
    changes = [
        np.where(np.isnan(old), 0.0, now - old)
        for old, now in ((state.throughput, throughput), (state.latency, latency))
    ]
    relative = [x / np.maximum(average, 1e-6) for x, average in zip(changes, averages, strict=True)]
    delta = DELTA_THROUGHPUT * relative[0] - DELTA_LATENCY * relative[1]
    uneven = rules.load_balance_penalty * balance
    beyond = np.maximum(latency - rules.latency_threshold, 0.0)
    late = rules.latency_penalty_scale * -np.expm1(-beyond)
    if rules.mode == "hybrid":
        total = np.tanh(
            rules.absolute_weight * absolute + rules.delta_weight * delta - uneven - logistic
        )
    elif rules.mode == "instant":
        total = np.tanh((throughput - latency - uneven - late) / LEGACY_SCALE)
    else:
        total = np.tanh((changes[0] - changes[1] - uneven - late) / LEGACY_SCALE)
    terms = RewardTerms(absolute, delta, logistic, uneven, total, late)
    return terms, RewardState(throughput, latency, averages[0], averages[1])


def cold_start_metrics(rules: ThroughputReward, count: int) -> Floats:
    """Return throughput, latency and unevenness `[3, C]` of an empty metric store.

    Args:
        rules: Parameters with the latency threshold.
        count: Number of clusters, C.
    """
    latency = max(COLD_LATENCY, COLD_SHARE * rules.latency_threshold)
    return np.repeat([[COLD_THROUGHPUT], [latency], [0.0]], count, axis=1)


def measure_clusters(
    now: Floats, requests: Requests, replicas: Replicas
) -> tuple[Floats, Floats, Floats]:
    """Measure throughput, latency and unevenness of clusters, `[C]` each.

    They are the requests finished per second since the first arrival, their mean time to the first
    token, and the deviation of the queues (waiting and running) over their mean.

    Args:
        now: Time of each cluster, `[C]`.
        requests: Of C clusters.
        replicas: Of C clusters.
    """
    finished, arrival = requests.times[:, f.Q_FINISHED], requests.times[:, f.Q_ARRIVAL]
    done = (finished <= now[:, None]) & (requests.ints[:, f.Q_LOST] == 0)
    count = done.sum(1)
    span = np.maximum(now - arrival[:, 0], 1e-9)
    waited = np.where(done, requests.times[:, f.Q_FIRST_TOKEN] - arrival, 0.0).sum(1)
    queues: Ints = (
        replicas.ints[:, f.R_WAITING] + replicas.ints[:, f.R_ASIDE] + replicas.ints[:, f.R_SIZE]
    )
    mean = queues.mean(1)
    uneven = np.where(mean > 0, queues.std(1) / np.maximum(mean, 1e-9), 0.0)
    return count / span, waited / np.maximum(count, 1), uneven
