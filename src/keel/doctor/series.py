"""Series of a metric, and what rules ask of them: persistence, trends, changes.

One value proves nothing, because rollouts are noisy: a breach is what lies outside in 3 of the last
5 values, or was outside for a quarter of the run. A log with fewer is judged by those it has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

WINDOW, ENOUGH = 5, 3
"""A breach: so many of the last `WINDOW` values are outside (as in `keel.tracking.health`)."""
LASTING = 0.25
"""Share of all values that makes a breach of one that is over."""
END = 0.2
"""Share of the values that stands for the end of a run."""
POINTS = 200
"""Points that a trend is computed of at most; a longer series is averaged over blocks."""


@dataclass(frozen=True)
class Series:
    """The known values of one metric; where the log has none, there is no entry."""

    name: str
    """Keel's name"""
    label: str
    """the name in the log"""
    step: NDArray[np.int64]
    """`[n]`"""
    values: NDArray[np.float64]
    """`[n]`, never NaN; may be infinite"""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def last(self) -> float:
        """The newest value; NaN where there is none."""
        return float(self.values[-1]) if len(self.values) else math.nan

    @property
    def finite(self) -> NDArray[np.float64]:
        """The values that are finite, `[m]`."""
        return self.values[np.isfinite(self.values)]

    def end(self, share: float = END) -> float:
        """Return the median of the last share of the values."""
        return _median(self.values[-max(1, round(share * len(self))) :])

    def start(self, share: float = END) -> float:
        """Return the median of the first share of the values."""
        return _median(self.values[: max(1, round(share * len(self)))])

    def median(self) -> float:
        """Return the median of all values."""
        return _median(self.values)

    def map(self, values: NDArray[np.float64]) -> Series:
        """Return a series at the same steps with other values, `[n]`."""
        return Series(self.name, self.label, self.step, values)


@dataclass(frozen=True)
class Breach:
    """Values outside of a range, for long or at the end."""

    onset: int
    """step of the first value outside"""
    value: float
    """the newest one outside"""
    share: float
    """share of all values that are outside"""
    count: int
    """number of values outside"""
    lasting: bool
    """whether it holds at the end of the series"""


def breach(
    series: Series,
    low: float | None = None,
    high: float | None = None,
    *,
    enough: int = ENOUGH,
    window: int = WINDOW,
    lasting: float = LASTING,
) -> Breach | None:
    """Return the breach of a range, or None.

    Args:
        series: The values.
        low: The lowest value inside; None where there is no such end.
        high: The highest value inside.
        enough: Values of the last `window` that must be outside; fewer where the series is shorter.
        window: Number of values that count as the end.
        lasting: Share of all values that makes a breach of one that is over.
    """
    outside = np.zeros(len(series), dtype=bool)
    if low is not None:
        outside |= series.values < low
    if high is not None:
        outside |= series.values > high
    return breach_where(series, outside, enough=enough, window=window, lasting=lasting)


def breach_where(
    series: Series,
    outside: NDArray[np.bool_],
    *,
    enough: int = ENOUGH,
    window: int = WINDOW,
    lasting: float = LASTING,
) -> Breach | None:
    """Return the breach of a condition, or None.

    Args:
        series: The values.
        outside: Where the condition holds, `[n]`.
        enough: As for `breach`.
        window: As for `breach`.
        lasting: As for `breach`.
    """
    indices = np.flatnonzero(outside)
    if len(indices) == 0:
        return None
    at_end = int(outside[-window:].sum()) >= min(enough, len(outside))
    share = len(indices) / len(outside)
    if not at_end and (len(indices) < enough or share < lasting):
        return None
    return Breach(
        onset=int(series.step[indices[0]]),
        value=float(series.values[indices[-1]]),
        share=share,
        count=len(indices),
        lasting=at_end,
    )


@dataclass(frozen=True)
class Trend:
    """A monotone trend."""

    change: float
    """Theil–Sen slope × length: the change from the first to the last value along the line"""
    p: float
    """two-sided p-value of Mann and Kendall's test; 1 where there are too few values"""


def trend(series: Series) -> Trend:
    """Return the robust trend of a series: Theil and Sen's slope, Mann and Kendall's test.

    Values that are not finite are left out; a long series is averaged over blocks first, which also
    weakens the correlation between neighbours that the test does not know.

    Args:
        series: The values.

    Examples:
        >>> rising = Series("train/loss", "loss", np.arange(9), np.arange(9.0))
        >>> trend(rising).change, trend(rising).p < 0.01
        (8.0, True)
    """
    values = _thinned(series.finite)
    n = len(values)
    if n < 4:
        return Trend(0.0, 1.0)
    i, j = np.triu_indices(n, k=1)
    differences = values[j] - values[i]
    slope = float(np.median(differences / (j - i)))
    score = float(np.sign(differences).sum())
    _, ties = np.unique(values, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - (ties * (ties - 1) * (2 * ties + 5)).sum()) / 18
    if variance <= 0.0:
        return Trend(0.0, 1.0)
    z = max(abs(score) - 1.0, 0.0) / math.sqrt(variance)
    return Trend(slope * (n - 1), math.erfc(z / math.sqrt(2.0)))


def spread(values: NDArray[np.float64]) -> float:
    """Return the robust standard deviation: 1.4826 × the median absolute deviation, `[n]`."""
    return 1.4826 * _median(np.abs(values - _median(values)))


def is_constant(series: Series, least: int = 5) -> bool:
    """Return whether a series has at least so many values, all the same."""
    return len(series) >= least and bool((series.values == series.values[0]).all())


def align(first: Series, second: Series) -> tuple[Series, Series]:
    """Return both series at the steps that they share."""
    _, i, j = np.intersect1d(first.step, second.step, return_indices=True)
    return (
        Series(first.name, first.label, first.step[i], first.values[i]),
        Series(second.name, second.label, second.step[j], second.values[j]),
    )


def _thinned(values: NDArray[np.float64]) -> NDArray[np.float64]:
    if len(values) <= POINTS:
        return values
    return np.array([block.mean() for block in np.array_split(values, POINTS)])


def _median(values: NDArray[np.float64]) -> float:
    return float(np.median(values)) if len(values) else math.nan
