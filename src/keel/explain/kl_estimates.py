"""Monte Carlo estimates of a KL: mean, standard error, and how often a sample is negative."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from keel.explain.explanation import Table, make_table, number
from keel.functional import kl_estimate


@dataclass(frozen=True)
class Estimate:
    """A Monte Carlo estimate of a KL beside its standard error."""

    name: str
    mean: float
    standard_error: float
    negative_share: float

    def numbers(self) -> dict[str, float]:
        """Return mean and standard error as data."""
        return {"mean": self.mean, "standard_error": self.standard_error}


def estimate_kl(log_p: Tensor, log_q: Tensor) -> list[Estimate]:
    """Return k1, k2 and k3 of KL(P‖Q).

    Args:
        log_p: log P of the samples `[N]`, which P drew.
        log_q: log Q of the same samples `[N]`.
    """
    return [estimate_from(name, kl_estimate(name, log_p, log_q)) for name in ("k1", "k2", "k3")]


def estimate_from(name: str, values: Tensor) -> Estimate:
    """Return the mean of `values` `[N]` with its standard error, which is NaN for one value.

    Args:
        name: Name of the estimator.
        values: Samples, `[N]`.
    """
    count = values.shape[0]
    error = values.std().item() / math.sqrt(count) if count > 1 else math.nan
    return Estimate(name, values.mean().item(), error, (values < 0).double().mean().item())


def estimate_numbers(estimates: list[Estimate], samples: int, seed: int) -> dict[str, object]:
    """Return the estimates as data."""
    return {
        "samples": samples,
        "seed": seed,
        "estimators": {estimate.name: estimate.numbers() for estimate in estimates},
    }


def estimate_table(estimates: list[Estimate], samples: int, exact: float) -> Table:
    """Return the estimates as a table, with the exact value below them."""
    rows = [
        (e.name, e.mean, f"± {number(e.standard_error)}", f"{e.negative_share:.0%}")
        for e in estimates
    ]
    columns = ("estimator", "nats", "standard error", "negative samples")
    title = f"Estimated from {samples:,} samples of P"
    return make_table(title, columns, [*rows, ("exact", exact, "", "")], digits=5)
