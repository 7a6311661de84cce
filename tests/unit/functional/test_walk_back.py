"""Walking back: what is returned was measured, and holds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.errors import InputError
from keel.functional import walk_back


def test_a_step_inside_the_bound_is_kept_whole() -> None:
    result = walk_back(lambda share: 0.01 * share**2, bound=0.02)
    assert result == (1.0, 0.01, 0.01, 1)


def test_a_quadratic_kl_needs_one_more_measurement() -> None:
    """KL(α) = 0.04 α², bound 0.01, aimed at 0.98 of it: α = √(0.98 · 0.01 / 0.04) = 0.49497."""
    result = walk_back(lambda share: 0.04 * share**2, bound=0.01)
    assert result.fraction == pytest.approx(0.494975, abs=1e-6)
    assert result.kl == pytest.approx(0.0098)
    assert result.requested == pytest.approx(0.04)
    assert result.evaluations == 2


def test_a_kl_that_never_holds_rolls_back() -> None:
    result = walk_back(lambda share: 1.0 if share > 0 else 0.0, bound=0.01)
    assert (result.fraction, result.kl, result.requested) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_is_walked_back_by_halving(bad: float) -> None:
    result = walk_back(lambda share: bad if share > 0.3 else 0.001, bound=0.01)
    assert (result.fraction, result.kl) == (0.25, 0.001)


def test_a_linear_kl_ends_in_bisection() -> None:
    """√ undershoots the cut a linear KL needs; bisection finishes the work."""
    result = walk_back(lambda share: 1e6 * share, bound=0.01)
    assert result.fraction > 0.0
    assert result.kl <= 0.01


@given(
    st.floats(0.1, 5.0),
    st.floats(1e-6, 1e3),
    st.floats(1e-4, 1.0),
    st.floats(0.0, 3.0),
)
def test_the_returned_kl_is_measured_and_inside(
    power: float, scale: float, bound: float, wobble: float
) -> None:
    """Whatever the shape of the KL along the step, monotone or not."""

    def kl_at(share: float) -> float:
        return scale * share**power * (1.0 + wobble * math.sin(20.0 * share) ** 2)

    result = walk_back(kl_at, bound)
    assert result.kl <= bound
    assert result.kl == (kl_at(result.fraction) if result.fraction > 0 else 0.0)
    assert 0.0 <= result.fraction <= 1.0
    assert result.requested == kl_at(1.0)


def test_a_bound_must_be_positive() -> None:
    with pytest.raises(InputError, match="bound: expected a positive KL, got 0"):
        walk_back(lambda share: share, bound=0.0)
