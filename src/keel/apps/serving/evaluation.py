"""Evaluation of routers on the same held-out traces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy.stats import t as student

from keel.apps.serving.arrays import Weights
from keel.apps.serving.results import METRICS, Report, summarize
from keel.apps.serving.scorer import Scorer
from keel.apps.serving.settings import Scenario, Setting, draw_scenario
from keel.apps.serving.simulation import HEURISTICS, SimulationResult, clairvoyant, simulate
from keel.apps.serving.vector_clusters import VectorClusters
from keel.errors import InputError

LEARNED = "policy"
CLAIRVOYANTS = {"clairvoyant": Weights(), "clairvoyant-first": Weights(end=0.0, first=1.0)}
"""Clairvoyant routers, by the objective: the end of requests, or their first token."""
BATCH = 64
NEGLIGIBLE = 0.03
"""Relative gap to the clairvoyant below which training is not worthwhile."""
MEASURES = {name: METRICS[name] for name in ("end_to_end", "ttft_p99")}
DrawScenario = Callable[[Setting, int], Scenario]
"""Function from a setting and a seed to a scenario no larger than the setting's own."""
OnProgress = Callable[[float, str], None]
"""Callback with the number of further traces that are done, and the router's name."""


def evaluate_routers(
    setting: Setting,
    seeds: Sequence[int],
    routers: Sequence[str] = HEURISTICS,
    scorer: Scorer | None = None,
    clairvoyant: bool = True,
    on_progress: OnProgress | None = None,
    draw: DrawScenario = draw_scenario,
) -> dict[str, list[Report]]:
    """Evaluate routers on the scenarios of all seeds.

    Args:
        setting: Distribution of clusters and traces.
        seeds: Seeds of the scenarios, usually of `held_out`.
        routers: Names in `ROUTERS`.
        scorer: A trained router; its reports are named `policy`.
        clairvoyant: Also evaluate `CLAIRVOYANTS`, which takes longer than all others together.
        on_progress: Called after each trace.
        draw: Draws the scenario of a seed.

    Returns:
        Reports by router, in the order of the seeds.
    """
    if not seeds:
        raise InputError("seeds: expected at least one")
    scenarios = [draw(setting, seed) for seed in seeds]
    names = [*routers, *(CLAIRVOYANTS if clairvoyant else ())]
    reports: dict[str, list[Report]] = {name: [] for name in names}
    for name in names:
        for scenario, seed in zip(scenarios, seeds, strict=True):
            reports[name].append(summarize(_simulate_router(scenario, name, seed)))
            if on_progress is not None:
                on_progress(1.0, name)
    if scorer is not None:
        reports[LEARNED] = evaluate_scorer(scorer, setting, seeds, on_progress, draw)
    return reports


def _simulate_router(scenario: Scenario, name: str, seed: int) -> SimulationResult:
    if name in CLAIRVOYANTS:
        return clairvoyant(
            scenario.cluster, scenario.workload, scenario.conditions, CLAIRVOYANTS[name]
        )
    return simulate(scenario.cluster, scenario.workload, name, scenario.conditions, seed)


def evaluate_scorer(
    scorer: Scorer,
    setting: Setting,
    seeds: Sequence[int],
    on_progress: OnProgress | None = None,
    draw: DrawScenario = draw_scenario,
) -> list[Report]:
    """Evaluate a trained router, which takes the replica of the highest score.

    Args:
        scorer: The trained router.
        setting: Distribution of clusters and traces.
        seeds: Seeds of the scenarios.
        on_progress: Called after each decision, with the share of the traces that it finished.
        draw: Draws the scenario of a seed.

    Returns:
        Reports in the order of the seeds.
    """
    reports: list[Report] = []
    for begin in range(0, len(seeds), BATCH):
        part = list(seeds[begin : begin + BATCH])
        clusters = VectorClusters(setting, len(part))
        for c, seed in enumerate(part):
            clusters.begin(c, draw(setting, seed), seed)
        clusters.observe(clusters.all)
        for _ in range(setting.requests):
            replicas, request, mask = clusters.observations
            scores = np.where(mask, scorer(replicas, request), -np.inf)
            clusters.step(scores.argmax(1))
            if on_progress is not None:
                on_progress(len(part) / setting.requests, LEARNED)
        reports += [summarize(clusters.result(c, LEARNED)) for c in range(len(part))]
    return reports


@dataclass(frozen=True)
class Gain:
    """Relative saving of one router against another on the same traces."""

    measure: str
    against: str
    own: float
    """mean over the traces"""
    other: float
    gain: float
    """relative saving over all traces"""
    low: float
    high: float
    """95 % interval over traces (Student's t on the paired differences, over the other's mean)"""


def gain(own: Sequence[Report], other: Sequence[Report], measure: str = "end_to_end") -> Gain:
    """Compare two routers on the same traces.

    Args:
        own: Reports of the router, by trace.
        other: Reports of the router to compare with, on the same traces.
        measure: A name of `MEASURES`.
    """
    value_of = MEASURES[measure]
    ours, theirs = (np.array([value_of(report) for report in x]) for x in (own, other))
    saved, base = theirs - ours, float(theirs.mean())
    half = math.nan
    if len(saved) > 1:
        spread = float(saved.std(ddof=1)) / math.sqrt(len(saved))
        half = float(student.ppf(0.975, len(saved) - 1)) * spread
    mean = float(saved.mean())
    return Gain(
        measure, other[0].router, float(ours.mean()), base, mean / base,
        (mean - half) / base, (mean + half) / base,
    )  # fmt: skip


@dataclass(frozen=True)
class Headroom:
    """Possible saving in a setting, known before anything is trained."""

    measure: str
    best: str
    """name of the best heuristic"""
    best_value: float
    clairvoyant: float
    room: float
    """relative saving of the clairvoyant against the best heuristic"""
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Verdict in words."""
        if not self.high > NEGLIGIBLE:
            return "nothing to win here"
        if not self.low > NEGLIGIBLE:
            return "perhaps a little to win; more traces would tell"
        return "something to win"

    def to_dict(self) -> dict[str, object]:
        """Return the headroom as plain data for JSON."""
        return {**asdict(self), "verdict": self.verdict}


def headroom(reports: dict[str, list[Report]], measure: str = "end_to_end") -> Headroom:
    """Return the headroom between the best heuristic and the better clairvoyant.

    Args:
        reports: What `evaluate_routers` returned, with clairvoyants.
        measure: A name of `MEASURES`.
    """
    best = best_heuristic(reports, measure)
    best_gain = max(
        (gain(reports[name], reports[best], measure) for name in CLAIRVOYANTS if name in reports),
        key=lambda gain: gain.gain,
    )
    return Headroom(
        measure, best, best_gain.other, best_gain.own, best_gain.gain, best_gain.low, best_gain.high
    )


def best_heuristic(reports: dict[str, list[Report]], measure: str = "end_to_end") -> str:
    """Return the name of the heuristic with the lowest mean over all traces."""
    value_of = MEASURES[measure]
    means = {
        name: float(np.mean([value_of(report) for report in of_router]))
        for name, of_router in reports.items()
        if name in HEURISTICS
    }
    if not means:
        raise InputError("routers: expected at least one that is not marked broken")
    served = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    if not served:
        raise InputError(
            "every heuristic has lost all requests of a trace: prompts that no replica has memory "
            "for, or too much load; choose another trace, model or --scale"
        )
    return min(served, key=served.__getitem__)
