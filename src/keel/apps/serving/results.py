"""Metrics of a simulation: latencies, goodput, drops, shares."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from keel.apps.serving import fields as f
from keel.apps.serving.arrays import Floats
from keel.apps.serving.simulation import SimulationResult


@dataclass(frozen=True)
class Objective:
    """Service-level objective."""

    ttft: float = 2.0
    """seconds to the first token"""
    tpot: float = 0.1
    """seconds per token after it"""


@dataclass(frozen=True)
class LatencySummary:
    """Mean and percentiles of latencies, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Report:
    """Metrics of one trace with one router. Latencies are those of served requests."""

    router: str
    requests: int
    ttft: LatencySummary
    tpot: LatencySummary
    """Time per output token, of requests with at least two tokens."""
    end_to_end: LatencySummary
    slo: float
    """share of all requests, lost ones included, that met the objective"""
    throughput: float
    """requests served per second"""
    goodput: float
    """requests per second that met the objective"""
    tokens_per_second: float
    """tokens written per second"""
    dropped: int
    turned_away: int
    gave_up: int
    failed: int
    restarts: int
    """restarts for lack of memory"""
    cache_hits: float
    """share of the prompts' tokens that were in a prefix cache"""
    utilisation: tuple[float, ...]
    """share of the time that each replica was busy"""
    shares: tuple[float, ...]
    """share of the requests that each replica got"""
    fairness: float
    """Jain's index of the replicas' shares: 1 when all are equal, 1/R when one has all"""

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain data for JSON."""
        return asdict(self)


def summarize(result: SimulationResult, objective: Objective | None = None) -> Report:
    """Summarize a simulation.

    Args:
        result: What `simulate`, `replay` or `clairvoyant` returned.
        objective: Service-level objective; by default `Objective()`.
    """
    objective = objective or Objective()
    requests, replicas = result.requests, result.replicas
    served = requests.ints[f.Q_LOST] == 0
    ttft, tpot, end_to_end = latencies(result)
    within_slo = served & (ttft <= objective.ttft) & ~(tpot > objective.tpot)
    span = max(end_time(result) - float(requests.times[f.Q_ARRIVAL][0]), 1e-9)
    count = replicas.ints.shape[1]
    sent = np.bincount(
        requests.ints[f.Q_REPLICA][requests.ints[f.Q_REPLICA] >= 0], minlength=count
    ).astype(float)
    share = sent / max(1.0, sent.sum())
    return Report(
        router=result.router,
        requests=len(served),
        ttft=_summary(ttft[served]),
        tpot=_summary(tpot[served & ~np.isnan(tpot)]),
        end_to_end=_summary(end_to_end[served]),
        slo=float(within_slo.mean()),
        throughput=float(served.sum()) / span,
        goodput=float(within_slo.sum()) / span,
        tokens_per_second=float(requests.ints[f.Q_OUTPUT][served].sum()) / span,
        dropped=int((~served).sum()),
        turned_away=int((requests.ints[f.Q_LOST] == 1).sum()),
        gave_up=int((requests.ints[f.Q_LOST] == 2).sum()),
        failed=int((requests.ints[f.Q_LOST] == 3).sum()),
        restarts=int(requests.ints[f.Q_RESTARTS].sum()),
        cache_hits=float(
            requests.ints[f.Q_HIT][served].sum() / max(1, requests.ints[f.Q_PROMPT][served].sum())
        ),
        utilisation=tuple((replicas.times[f.R_BUSY] / span).tolist()),
        shares=tuple(share.tolist()),
        fairness=float(share.sum() ** 2 / (count * (share**2).sum())) if sent.sum() else 1.0,
    )


def end_time(result: SimulationResult) -> float:
    """Return when the last request was finished or, where none was, when the last one arrived."""
    finished = result.requests.times[f.Q_FINISHED]
    finished = finished[np.isfinite(finished)]
    return float(finished.max() if finished.size else result.requests.times[f.Q_ARRIVAL].max())


def latencies(result: SimulationResult) -> tuple[Floats, Floats, Floats]:
    """Return the latencies of all requests, `[N]` each.

    Args:
        result: What `simulate`, `replay` or `clairvoyant` returned.

    Returns:
        Seconds to the first token, per token after it (NaN if there is only one), and to the end.
    """
    requests = result.requests
    ttft = requests.times[f.Q_FIRST_TOKEN] - requests.times[f.Q_ARRIVAL]
    end_to_end = requests.times[f.Q_FINISHED] - requests.times[f.Q_ARRIVAL]
    more = requests.ints[f.Q_OUTPUT] - 1
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot = np.where(
            more > 0,
            (requests.times[f.Q_FINISHED] - requests.times[f.Q_FIRST_TOKEN]) / more,
            np.nan,
        )
    return ttft, tpot, end_to_end


def _summary(x: Floats) -> LatencySummary:
    if not x.size:
        return LatencySummary(*[float("nan")] * 4)
    p50, p90, p99 = np.percentile(x, (50, 90, 99)).tolist()
    return LatencySummary(float(x.mean()), p50, p90, p99)


METRICS: dict[str, Callable[[Report], float]] = {
    "end_to_end": lambda r: r.end_to_end.mean,
    "end_to_end_p99": lambda r: r.end_to_end.p99,
    "ttft": lambda r: r.ttft.mean,
    "ttft_p99": lambda r: r.ttft.p99,
    "slo": lambda r: r.slo,
    "cache_hits": lambda r: r.cache_hits,
    "largest_share": lambda r: max(r.shares),
    "dropped": lambda r: float(r.dropped),
}


def means(reports: Sequence[Report]) -> dict[str, float]:
    """Return the mean metrics over traces."""
    return {name: statistics.fmean(map(value_of, reports)) for name, value_of in METRICS.items()}
