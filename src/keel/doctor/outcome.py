"""What became of a run: whether its return rose, stayed, or fell from its best.

Rules fire on conjunctions: a low entropy is a fault where the return never rose, and usual where it
did. Whether it rose is judged leniently, so that a doubt speaks for the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from keel.doctor.finding import Evidence, evidence
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, spread

if TYPE_CHECKING:
    from numpy.typing import NDArray

RETURNS = ("rollout/return_mean", "rollout/reward_mean", "eval/return_mean")
"""Where the outcome is read, the first that the log has."""
NEEDS_RETURN = "|".join(RETURNS)
LEAST = 8
"""Values of the return without which nothing is said of its course."""
PART = 0.1
"""Share of the values that stands for the start, for the end, and for a window between them."""
BLOCKS = 200
"""A longer series is judged by the medians of so many blocks."""
SIGMAS = 3.0
"""Standard errors of the difference between two windows that are noise."""
MEDIAN = 1.2533
"""Standard error of a median over that of a mean, √(π/2)."""
SPREAD = 0.5
"""Change of the return, in standard deviations between episodes, that means nothing: means over
100 episodes have a standard error of 0.1, and overlap from one row to the next."""
SPREAD_LANGUAGE = 0.05
"""The same for completions, whose means do not overlap and are of many more samples."""
ROUNDING = 1e-9
"""Change of the return, as a share of its size, that is rounding of a mean."""
RELATIVE = 0.1
"""Change of the return, as a share of its start, that means nothing where its spread is unknown."""
TOLERANCE = "Keel: three standard errors, at least half of the deviation between episodes"
"""Where a change of the return that means something comes from."""
BEGINNING = 0.25
"""Share of the steps by which a log that covers the beginning of the run has begun."""
UNTRAINED = 0.2
"""Share of the steps by which a run has hardly learned."""
SUCCESS = ("eval/success", "rollout/success")
SOLVED = 0.9
"""Share of prompts or episodes that succeed from which on a task is solved."""


@dataclass(frozen=True)
class Outcome:
    """The course of the return."""

    series: Series
    """its finite values"""
    start: float
    end: float
    best: float
    """the highest median of a window"""
    best_step: int
    """step at the end of that window"""
    tolerance: float
    """a change that means nothing"""
    from_start: bool
    """whether the log covers the beginning of the run; the end of a good run is flat"""

    @property
    def is_known(self) -> bool:
        """Whether there are enough values to judge the course."""
        return len(self.series) >= LEAST

    @property
    def rose(self) -> bool:
        """Whether it ends above its start."""
        return self.is_known and self.end - self.start > self.tolerance

    @property
    def ever_rose(self) -> bool:
        """Whether it was above its start for a while."""
        return self.is_known and self.best - self.start > 2.0 * self.tolerance

    @property
    def fell(self) -> bool:
        """Whether it ends below its start."""
        return self.is_known and self.start - self.end > self.tolerance

    @property
    def stagnates(self) -> bool:
        """Whether it is known not to have risen since the run began."""
        return self.is_known and self.from_start and not self.rose

    @property
    def lost(self) -> float:
        """The share of the best gain that is gone at the end; 0 where there was no gain."""
        if not self.ever_rose:
            return 0.0
        return min(1.0, max(0.0, (self.best - self.end) / (self.best - self.start)))

    @property
    def is_constant(self) -> bool:
        """Whether the return never varied at all."""
        values = self.series.values
        return self.is_known and bool(np.ptp(values) <= ROUNDING * np.abs(values).max())

    def evidence(self) -> Evidence:
        """Return the course as evidence."""
        text = f"{self.end:.4g}"
        if self.is_known:
            text = (
                f"{self.start:.4g} at the start, at best {self.best:.4g}, at the end of "
                f"{len(self.series)} values {self.end:.4g}; a change below {self.tolerance:.2g} "
                "means nothing"
            )
        return evidence(
            self.series,
            text,
            self.end,
            threshold=self.start + self.tolerance if self.is_known else None,
            source=TOLERANCE if self.is_known else "",
        )


def outcome(log: RunLog) -> Outcome | None:
    """Return the course of a run's return; None where the log has none.

    Args:
        log: The run.
    """
    series = next((log[name] for name in RETURNS if name in log), None)
    if series is None:
        return None
    known = np.isfinite(series.values)
    if not known.any():
        return None
    series = Series(series.name, series.label, series.step[known], series.values[known])
    return _outcome(series, _floor(log, series))


def course(log: RunLog) -> tuple[Evidence, ...]:
    """Return the course of the return as evidence, where the log has one.

    Args:
        log: The run.
    """
    now = outcome(log)
    return () if now is None else (now.evidence(),)


def outcome_of(series: Series, floor: float = 0.0) -> Outcome | None:
    """Return the course of any series of which more is better.

    Args:
        series: The values.
        floor: The least change that means something.
    """
    known = np.isfinite(series.values)
    if not known.any():
        return None
    series = Series(series.name, series.label, series.step[known], series.values[known])
    return _outcome(series, floor)


def is_solved(log: RunLog) -> bool:
    """Return whether nothing is left to learn: all succeed, or no episode differs from the best.

    A mean length that is a whole number and equals the return says that every episode survived to
    the time limit (CartPole at 500), also in a single row.

    Args:
        log: The run.
    """
    for name in SUCCESS:
        if name in log and log[name].end(PART) >= SOLVED:
            return True
    now = outcome(log)
    if now is None:
        return False
    deviation = log.get("rollout/return_std")
    if deviation is not None and now.rose and deviation.end(PART) <= 1e-3 * abs(now.end):
        return True
    return _survives(log, now)


def progress(log: RunLog) -> float | None:
    """Return the share of the planned steps that are done; None where the plan is not known.

    Args:
        log: The run.
    """
    total = log.setting("total_steps")
    return None if not total or total <= 0 else log.last_step / total


def _survives(log: RunLog, now: Outcome) -> bool:
    if now.is_constant and now.from_start and now.series.step[0] <= UNTRAINED * log.last_step:
        return False  # nobody is that good before the first update: every step earns the same
    lengths = log.get("rollout/length_mean")
    if lengths is None or now.series.name != "rollout/return_mean" or log.is_language:
        return False
    length = lengths.end(PART)
    whole = math.isfinite(length) and length >= 100 and length == round(length)
    return whole and math.isclose(length, now.end, rel_tol=1e-6)


def _outcome(series: Series, floor: float) -> Outcome:
    values, steps = _blocks(series)
    width = max(1, round(PART * len(values)))
    medians = np.median(np.lib.stride_tricks.sliding_window_view(values, width), axis=1)
    at = int(np.argmax(medians))
    noise = spread(np.diff(values)) / math.sqrt(2.0) if len(values) > 1 else 0.0
    error = SIGMAS * MEDIAN * noise * math.sqrt(2.0 / width)
    return Outcome(
        series=series,
        start=float(medians[0]),
        end=float(medians[-1]),
        best=float(medians[at]),
        best_step=int(steps[at + width - 1]),
        tolerance=max(error, floor, ROUNDING * float(np.abs(values).max())),
        from_start=bool(series.step[0] <= BEGINNING * series.step[-1]),
    )


def _blocks(series: Series) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return at most `BLOCKS` medians of neighbouring values, and the last step of each.

    Blocks are of equal size, so that they are one array; what is left over at the start is dropped.
    """
    size = -(-len(series) // BLOCKS)
    if size == 1:
        return series.values, series.step
    rest = len(series) % size
    blocks = series.values[rest:].reshape(-1, size)
    return np.median(blocks, axis=1), series.step[rest + size - 1 :: size]


def _floor(log: RunLog, series: Series) -> float:
    """Return a change of the return that means nothing, whatever the noise between rows."""
    deviation = log.get("rollout/return_std")
    if deviation is not None and len(deviation.finite) and series.name == "rollout/return_mean":
        share = SPREAD_LANGUAGE if log.is_language else SPREAD
        return share * float(np.median(deviation.finite))
    share = SPREAD_LANGUAGE if log.is_language else RELATIVE
    return share * abs(float(np.median(series.values[: max(1, len(series) // 10)])))
