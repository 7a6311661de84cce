"""Note 004's reward, as its origin computes it: four parts, and two sets of parameters.

It rewards what was measured of the cluster, not what a choice did to it. Its parameters decide the
sign: with the old ones a healthy cluster earns −0.09 at every decision, with the new ones 0.6, and
nothing is better for it. The origin's legacy rewards, `instant` and `delta`, are here too: they are
the ones that `latency_penalty_scale` is a parameter of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from keel.apps.serving import fields as f
from keel.apps.serving.arrays import Floats, Ints, Replicas, Requests
from keel.errors import InputError, check_choice

Mode = Literal["hybrid", "instant", "delta"]
MODES = ("hybrid", "instant", "delta")
EMA_RATE = 0.1
LEAST_TARGET, LEAST_THRESHOLD = 0.1, 0.5
"""Below these the origin does not go: a throughput target of 0.05 is one of 0.1."""
DELTA_THROUGHPUT, DELTA_LATENCY = 0.3, 0.2
COLD_THROUGHPUT, COLD_SHARE, COLD_LATENCY = 0.1, 0.3, 0.5
"""What the origin takes for measured while its metric store is empty: requests a second, the share
of the latency threshold, and the least seconds."""
LEGACY_SCALE = 3.0
"""What the legacy rewards are divided by before the tanh."""


@dataclass(frozen=True)
class NoteReward:
    """The note's names; the defaults are its new ones."""

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
    """Follow the measured throughput with the target: the note's own follow-up."""
    latency_penalty_scale: float = 0.5
    """height of the penalty on latency above its threshold, which only the legacy rewards subtract;
    `hybrid` reports it"""
    cold_start: bool = False
    """Score the values that the origin falls back to while its metric store is empty, whatever the
    cluster does. They give every figure of the note's log: −0.05, 0.059, −0.094, a delta of 0, and
    the 1.99 that it expects"""
    unpaid: int = 0
    """Reward 0 at every so many decisions; 0: never. The origin learns from a rollout before the
    reward of its last decision is written"""
    mode: Mode = "hybrid"
    """`hybrid` is the note's; legacy: `instant`, by throughput and latency, and `delta`, by their
    changes since the last decision"""

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)
        if self.unpaid < 0:
            raise InputError(f"unpaid: expected a number of decisions, or 0, got {self.unpaid}")


BEFORE = NoteReward(
    throughput_target=1.0, alpha=0.5, latency_threshold=2.0, kappa=0.3, sigma=1.0,
    absolute_weight=0.7, delta_weight=0.3, load_balance_penalty=0.03, latency_penalty_scale=5.0,
)  # fmt: skip
AFTER = NoteReward()
VERSIONS = {"before": BEFORE, "after": AFTER}


class Scores(NamedTuple):
    """The parts of the reward, `[C]` each, by the names of the note's CSV."""

    absolute_score: Floats
    delta_score: Floats
    logistic_penalty: Floats
    balance_penalty: Floats
    total_reward: Floats
    latency_threshold_penalty: Floats


class Memory(NamedTuple):
    """What the delta needs, `[C]` each; NaN before the first decision."""

    throughput: Floats
    latency: Floats
    throughput_ema: Floats
    latency_ema: Floats


def fresh_memory(count: int) -> Memory:
    """Before the first decision."""
    return Memory(*(np.full(count, np.nan) for _ in range(4)))


def score(
    rules: NoteReward, throughput: Floats, latency: Floats, balance: Floats, memory: Memory
) -> tuple[Scores, Memory]:
    """The reward `[C]`, and what to remember.

    abs = thr / max(target, 0.1) − α·lat / max(threshold, 0.5);
    logistic = κ·sigmoid((lat − threshold) / σ);
    delta = 0.3·Δthr / EMA(thr) − 0.2·Δlat / EMA(lat);
    reward = tanh(w_abs·abs + w_Δ·delta − lb·balance − logistic); the legacy ones are in
    `legacy_reward`.
    """
    averages = [
        np.where(np.isnan(old), now, old + EMA_RATE * (now - old))
        for old, now in (
            (memory.throughput_ema, throughput),
            (memory.latency_ema, latency),
        )
    ]
    target: Floats | float = rules.throughput_target
    if rules.adaptive_target:
        target = averages[0]
    absolute = throughput / np.maximum(target, LEAST_TARGET)
    absolute = absolute - rules.alpha * latency / max(rules.latency_threshold, LEAST_THRESHOLD)
    logistic = rules.kappa / (1.0 + np.exp(-(latency - rules.latency_threshold) / rules.sigma))
    changes = [
        np.where(np.isnan(old), 0.0, now - old)
        for old, now in ((memory.throughput, throughput), (memory.latency, latency))
    ]
    relative = [
        change / np.maximum(average, 1e-6)
        for change, average in zip(changes, averages, strict=True)
    ]
    delta = DELTA_THROUGHPUT * relative[0] - DELTA_LATENCY * relative[1]
    uneven = rules.load_balance_penalty * balance
    late = latency_threshold_penalty(rules, latency)
    if rules.mode == "hybrid":
        total = np.tanh(
            rules.absolute_weight * absolute + rules.delta_weight * delta - uneven - logistic
        )
    elif rules.mode == "instant":
        total = legacy_reward(throughput, latency, uneven, late)
    else:
        total = legacy_reward(changes[0], changes[1], uneven, late)
    scores = Scores(absolute, delta, logistic, uneven, total, late)
    return scores, Memory(throughput, latency, averages[0], averages[1])


def latency_threshold_penalty(rules: NoteReward, latency: Floats) -> Floats:
    """Return scale·(1 − e^−(lat − threshold)) above the threshold, 0 below it, `[C]`."""
    return rules.latency_penalty_scale * -np.expm1(
        -np.maximum(latency - rules.latency_threshold, 0.0)
    )


def legacy_reward(throughput: Floats, latency: Floats, uneven: Floats, late: Floats) -> Floats:
    """Return tanh((thr − lat − lb·balance − late) / 3), the origin's reward before the note's.

    Args:
        throughput: Requests per second, or their change, `[C]`.
        latency: Seconds until the first token, or their change, `[C]`.
        uneven: The penalty on uneven queues, `[C]`.
        late: The penalty on latency above its threshold, `[C]`.
    """
    return np.tanh((throughput - latency - uneven - late) / LEGACY_SCALE)


def cold_values(rules: NoteReward, count: int) -> Floats:
    """Return throughput, latency and unevenness `[3, C]` of an empty metric store, by the origin.

    Args:
        rules: Whose latency threshold is meant.
        count: Clusters, `C`.
    """
    latency = max(COLD_LATENCY, COLD_SHARE * rules.latency_threshold)
    return np.repeat([[COLD_THROUGHPUT], [latency], [0.0]], count, axis=1)


def measured(now: Floats, requests: Requests, replicas: Replicas) -> tuple[Floats, Floats, Floats]:
    """Of many clusters at a time each: requests finished per second since the first arrival, the
    mean time to the first token of those, and how uneven the queues are (their deviation over
    their mean, waiting and running)."""
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
