"""Walking back: what is returned was measured, and holds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keel.errors import InputError
from keel.functional import WalkBack, walk_back


def alone(kl_at: Callable[[float], float], bound: float) -> WalkBack:
    """`walk_back` of a single group."""
    return walk_back(lambda share: torch.tensor([kl_at(share.item())], dtype=torch.float64), bound)


def fractions_of(kl_at: Callable[[float], float], bound: float) -> list[float]:
    """The fractions that `walk_back` of a single group measures."""
    asked: list[float] = []

    def measured(share: float) -> float:
        asked.append(share)
        return kl_at(share)

    alone(measured, bound)
    return asked


@pytest.mark.parametrize("kl", [0.01, 0.02])
def test_a_step_inside_the_bound_or_on_it_is_kept_whole(kl: float) -> None:
    result = alone(lambda share: kl * share**2, bound=0.02)
    assert (result.fraction.item(), result.evaluations) == (1.0, 1)
    assert result.kl == result.requested


def test_a_quadratic_kl_needs_one_more_measurement() -> None:
    """KL(α) = 0.04 α², bound 0.01, aimed at 0.98 of it: α = √(0.98 · 0.01 / 0.04) = 0.49497."""
    result = alone(lambda share: 0.04 * share**2, bound=0.01)
    assert result.fraction.item() == pytest.approx(0.494975, abs=1e-6)
    assert result.kl.item() == pytest.approx(0.0098)
    assert result.requested.item() == pytest.approx(0.04)
    assert result.evaluations == 2


def test_a_share_whose_kl_is_the_bound_itself_is_kept() -> None:
    seen = iter([0.04, 0.01])
    result = alone(lambda _: next(seen), bound=0.01)
    assert result.fraction.item() == pytest.approx(0.494975, abs=1e-6)
    assert result.kl.item() == 0.01


def test_a_share_whose_kl_is_half_of_the_bound_is_enough() -> None:
    seen = iter([0.04, 0.005])
    result = alone(lambda _: next(seen), bound=0.01)
    assert (result.kl.item(), result.evaluations) == (0.005, 2)


def test_a_kl_that_never_holds_rolls_back() -> None:
    result = alone(lambda share: 1.0 if share > 0 else 0.0, bound=0.01)
    assert (result.fraction.item(), result.kl.item()) == (0.0, 0.0)
    assert result.requested.item() == 1.0


def test_steps_grow_twofold_while_a_kl_does_not_fall() -> None:
    """KL = 1, bound 0.01: as if quadratic first, by s = ½ ln(1/0.0098); then 2s, 4s, 8s more."""
    first = 0.5 * math.log(1 / 0.0098)
    logs = [math.log(share) for share in fractions_of(lambda _: 1.0, bound=0.01)]
    assert logs[:5] == pytest.approx([0, -first, -3 * first, -7 * first, -15 * first])
    assert len(logs) == 20


def test_a_step_without_a_finite_kl_is_halved() -> None:
    assert fractions_of(lambda _: math.inf, bound=0.01)[:2] == pytest.approx([1.0, 0.5])


def test_no_fraction_is_smaller_than_one_that_a_float_still_holds() -> None:
    """KL = α^0.001 would need α = 10^-2009: five times as far each time, and not beyond e^-700."""
    asked = fractions_of(lambda share: share**0.001, bound=0.01)
    assert (asked[-1], len(asked)) == (math.exp(-700), 6)


def test_a_kl_that_is_not_finite_tells_no_slope() -> None:
    """1, NaN, then 10³⁰ at x = -3s: the slope is 2 still, for as much as 4·3s at once."""
    first = 0.5 * math.log(1 / 0.0098)
    seen = iter([1.0, math.nan, 1e30, 0.009])
    logs = [math.log(share) for share in fractions_of(lambda _: next(seen), bound=0.01)]
    assert logs == pytest.approx([0, -first, -3 * first, -15 * first])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_is_walked_back_to_where_it_is(bad: float) -> None:
    result = alone(lambda share: bad if share > 0.3 else 0.001, bound=0.01)
    assert 0.25 <= result.fraction.item() <= 0.3
    assert result.kl.item() == pytest.approx(0.001)


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0, 3.0, 5.0, 8.0])
@pytest.mark.parametrize("excess", [1.0001, 1.5, 40.0, 1e4])
@pytest.mark.parametrize("bound", [1e-4, 0.05])
def test_half_of_the_bound_or_more_is_kept_of_any_power(
    power: float, excess: float, bound: float
) -> None:
    """KL(α) = excess · bound · α^p: two measurements tell p, the next one lands."""
    result = alone(lambda share: excess * bound * share**power, bound)
    assert 0.5 * bound <= result.kl.item() <= bound
    assert result.evaluations <= 8


pieces = st.lists(st.tuples(st.floats(0.01, 6.0), st.floats(0.0, 8.0)), max_size=5)


@given(pieces, st.floats(0.3, 8.0), st.floats(1e-6, 9.2), st.floats(1e-4, 1.0))
def test_half_of_the_bound_or_more_is_kept_wherever_the_slope_is_at_most_eight(
    pieces: list[tuple[float, float]], tail: float, excess: float, bound: float
) -> None:
    """log KL over log α in straight pieces: cusps, plateaus (slope 0) and cliffs (slope 8)."""

    def kl_at(share: float) -> float:
        left, log_kl = -math.log(share), math.log(bound) + excess
        for length, slope in [*pieces, (math.inf, tail)]:
            log_kl -= slope * min(left, length)
            left = max(0.0, left - length)
        return math.exp(max(log_kl, -700.0))

    result = alone(kl_at, bound)
    assert 0.5 * bound <= result.kl.item() <= bound
    assert result.evaluations <= 20


def test_the_search_ends_where_a_kl_jumps_over_half_of_the_bound() -> None:
    """From 0.1 to 100 of the bound at α = 0.2: no share has more, and what holds is kept."""
    result = alone(lambda share: 0.005 if share < 0.2 else 5.0, bound=0.05)
    assert result.kl.item() == 0.005
    assert 0.17 < result.fraction.item() < 0.2


@pytest.mark.parametrize(("edge", "below", "above"), [(0.3, 0.001, 0.1), (0.7, 0.0, 0.1)])
def test_a_jump_is_found_as_closely_as_a_slope_of_eight_needs(
    edge: float, below: float, above: float
) -> None:
    """Half of the bound lies within ln 2 / 8 of the bound where the slope is 8."""
    result = alone(lambda share: below if share < edge else above, bound=0.05)
    assert edge * math.exp(-math.log(2) / 8) < result.fraction.item() < edge


def test_groups_are_walked_back_on_their_own() -> None:
    """The first group is inside and keeps all; the second keeps half, up to the safety margin."""
    scale = torch.tensor([0.01, 0.04, math.inf], dtype=torch.float64)
    asked = []

    def kl_at(share: Tensor) -> Tensor:
        asked.append(share)
        return scale * share**2

    result = walk_back(kl_at, 0.01, groups=3)
    assert torch.equal(
        asked[-1][:2], result.fraction[:2]
    )  # those that are done stay where they are
    assert result.fraction[0] == 1.0
    assert result.fraction[1].item() == pytest.approx(0.494975, abs=1e-6)
    assert result.fraction[2] == 0.0
    assert result.kl[2] == 0.0


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

    def kl_at(share: Tensor) -> Tensor:
        return scale * share**power * (1.0 + wobble * torch.sin(20.0 * share) ** 2)

    result = walk_back(kl_at, bound)
    assert result.kl.item() <= bound
    assert 0.0 <= result.fraction.item() <= 1.0
    measured = kl_at(result.fraction) if result.fraction.item() > 0 else torch.zeros(1)
    assert result.kl.item() == measured.item()
    assert result.requested.item() == kl_at(torch.ones(1).double()).item()


def test_a_bound_must_be_positive() -> None:
    with pytest.raises(InputError, match="bound: expected a positive KL, got 0"):
        alone(lambda share: share, bound=0.0)


def test_what_is_known_of_the_whole_step_is_not_measured_again():
    asked = []

    def kl_at(fraction):
        asked.append(fraction.item())
        return 0.4 * fraction**2

    found = walk_back(kl_at, 0.1, requested=torch.tensor([0.4], dtype=torch.float64))
    assert 1.0 not in asked
    assert found.evaluations == len(asked) == 1
    assert found.requested.item() == 0.4
    assert found.fraction.item() == pytest.approx((0.98 * 0.1 / 0.4) ** 0.5)
