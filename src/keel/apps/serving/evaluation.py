"""Routers side by side on the same traces, which no training has seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy.stats import t as student

from keel.apps.serving.arrays import Weights
from keel.apps.serving.results import Report, summarise
from keel.apps.serving.scorer import Scorer
from keel.apps.serving.settings import Scenario, Setting, draw
from keel.apps.serving.simulation import HONEST, Trace, clairvoyant, simulate
from keel.apps.serving.vector_clusters import Many
from keel.errors import InputError

LEARNED = "policy"
CLAIRVOYANTS = {"clairvoyant": Weights(), "clairvoyant-first": Weights(end=0.0, first=1.0)}
"""Who knows the future, and what for: the end of requests, or their first token."""
AT_ONCE = 64
NOTHING_TO_WIN = 0.03
"""A gap to the clairvoyant below this is not worth training for."""
Measure = Callable[[Report], float]
MEASURES: dict[str, Measure] = {
    "end_to_end": lambda report: report.end_to_end.mean,
    "ttft_p99": lambda report: report.ttft.p99,
}
DrawScene = Callable[[Setting, int], Scenario]
"""A scene by its seed; clusters, lengths and prefixes no larger than the setting has them."""
OnProgress = Callable[[float, str], None]
"""Called with how many more traces are done, and by which router."""


def judge(
    setting: Setting,
    seeds: Sequence[int],
    routers: Sequence[str] = HONEST,
    scorer: Scorer | None = None,
    clairvoyant: bool = True,
    on_progress: OnProgress | None = None,
    draw_scene: DrawScene = draw,
) -> dict[str, list[Report]]:
    """Reports of every router on the scenes of all seeds, in their order."""
    if not seeds:
        raise InputError("seeds: expected at least one")
    scenes = [draw_scene(setting, seed) for seed in seeds]
    names = [*routers, *(CLAIRVOYANTS if clairvoyant else ())]
    reports: dict[str, list[Report]] = {name: [] for name in names}
    for name in names:
        for scene, seed in zip(scenes, seeds, strict=True):
            reports[name].append(summarise(_play_scene(scene, name, seed)))
            if on_progress is not None:
                on_progress(1.0, name)
    if scorer is not None:
        reports[LEARNED] = learned(scorer, setting, seeds, on_progress, draw_scene)
    return reports


def _play_scene(scene: Scenario, name: str, seed: int) -> Trace:
    if name in CLAIRVOYANTS:
        return clairvoyant(scene.cluster, scene.workload, scene.conditions, CLAIRVOYANTS[name])
    return simulate(scene.cluster, scene.workload, name, scene.conditions, seed)


def learned(
    scorer: Scorer,
    setting: Setting,
    seeds: Sequence[int],
    on_progress: OnProgress | None = None,
    draw_scene: DrawScene = draw,
) -> list[Report]:
    """The reports of a trained router, which takes the replica it scores highest."""
    reports: list[Report] = []
    for begin in range(0, len(seeds), AT_ONCE):
        part = list(seeds[begin : begin + AT_ONCE])
        many = Many(setting, len(part))
        for c, seed in enumerate(part):
            many.begin(c, draw_scene(setting, seed), seed)
        many.look(many.all)
        for _ in range(setting.requests):
            replicas, request, mask = many.seen
            scores = np.where(mask, scorer(replicas, request), -np.inf)
            many.step(scores.argmax(1))
            if on_progress is not None:
                on_progress(len(part) / setting.requests, LEARNED)
        reports += [summarise(many.played(c, LEARNED)) for c in range(len(part))]
    return reports


@dataclass(frozen=True)
class Gain:
    """How much less one router costs than another, on the same traces; relative to the other."""

    measure: str
    against: str
    own: float
    """mean over the traces"""
    other: float
    gain: float
    """share of the other's that is saved, over all traces"""
    low: float
    high: float
    """95 % interval over traces (Student's t on the paired differences, over the other's mean)"""


def gain(own: Sequence[Report], other: Sequence[Report], measure: str = "end_to_end") -> Gain:
    """Of one router over another."""
    of = MEASURES[measure]
    ours, theirs = (np.array([of(report) for report in x]) for x in (own, other))
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
    """What can be won in a setting before anything is trained."""

    measure: str
    best: str
    """the heuristic with the least"""
    best_value: float
    clairvoyant: float
    room: float
    """share of the best heuristic's that the clairvoyant saves"""
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """In words."""
        if not self.high > NOTHING_TO_WIN:
            return "nothing to win here"
        if not self.low > NOTHING_TO_WIN:
            return "perhaps a little to win; more traces would tell"
        return "something to win"

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        return {**asdict(self), "verdict": self.verdict}


def headroom(found: dict[str, list[Report]], measure: str = "end_to_end") -> Headroom:
    """From the reports of `judge`, those of the clairvoyants among them: the better one counts."""
    best = best_heuristic(found, measure)
    room = max(
        (gain(found[name], found[best], measure) for name in CLAIRVOYANTS if name in found),
        key=lambda room: room.gain,
    )
    return Headroom(measure, best, room.other, room.own, room.gain, room.low, room.high)


def best_heuristic(found: dict[str, list[Report]], measure: str = "end_to_end") -> str:
    """The honest router with the least, over all traces."""
    of = MEASURES[measure]
    means = {
        name: float(np.mean([of(report) for report in reports]))
        for name, reports in found.items()
        if name in HONEST
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
