"""IQM, probability of improvement, profiles and intervals as rliable computes them.

Its numbers were written by `benchmarks/rliable_numbers.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.functional import (
    interquartile_mean,
    performance_profile,
    probability_of_improvement,
    stratified_bootstrap,
)

CASES = json.loads(Path(__file__).with_name("rliable.json").read_text())
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{len(case['x'])} runs")


def table(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@cases
def test_point_estimates(case: dict[str, Any]):
    x, y = table(case["x"]), table(case["y"])
    assert interquartile_mean(x).item() == pytest.approx(case["iqm"], abs=1e-6)
    found = probability_of_improvement(x, y).item()
    assert found == pytest.approx(case["probability_of_improvement"], abs=1e-6)
    profile = performance_profile(x, torch.tensor(case["levels"], dtype=torch.float64))
    assert profile.tolist() == pytest.approx(case["profile"], abs=1e-6)


@cases
def test_intervals_within_monte_carlo_error(case: dict[str, Any]):
    """Percentiles of 20,000 resamples on either side: their ends scatter by about 1 % of the
    width, or by a gap between the few values that three runs allow."""
    generator = torch.Generator().manual_seed(0)
    found = stratified_bootstrap(
        interquartile_mean, table(case["x"]), generator=generator, resamples=20_000
    )
    low, high = case["interval"]
    assert found.low.item() == pytest.approx(low, abs=0.03 * (high - low))
    assert found.high.item() == pytest.approx(high, abs=0.03 * (high - low))
