"""However data arrives, its moments are those of all of it together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from keel.functional import (
    Moments,
    effective_sample_size,
    empty_moments,
    explained_variance,
    interquartile_mean,
    merge_moments,
    probability_of_improvement,
    update_moments,
)

values = st.floats(-100.0, 100.0)
batches = st.lists(
    st.integers(0, 6).flatmap(lambda rows: arrays(np.float64, (rows, 2), elements=values)),
    min_size=1,
    max_size=6,
)
offsets = st.sampled_from([0.0, 1e8])
tables = arrays(np.float64, st.tuples(st.integers(1, 6), st.just(3)), elements=values)


def moments(*data: np.ndarray) -> Moments:
    state = empty_moments((2,))
    for batch in data:
        state = update_moments(state, torch.from_numpy(batch))
    return state


def assert_same(one: Moments, other: Moments) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-6)


@given(batches, offsets)
def test_any_split_gives_the_moments_of_everything(data: list[np.ndarray], offset: float):
    state = moments(*(batch + offset for batch in data))
    everything = np.concatenate(data) + offset
    assert state.weight.item() == len(everything)
    if len(everything):
        assert state.mean.numpy() == pytest.approx(everything.mean(0), rel=1e-12, abs=1e-9)
        assert state.variance.numpy() == pytest.approx(everything.var(0), rel=1e-6, abs=1e-12)


@given(batches, st.randoms(use_true_random=False))
def test_rows_that_do_not_count_may_hold_anything(data: list[np.ndarray], random):
    kept, state = [], empty_moments((2,))
    for batch in data:
        counts = np.array([random.random() < 0.5 for _ in batch], dtype=bool)
        garbage = np.where(counts[:, None], batch, np.nan)
        state = update_moments(state, torch.from_numpy(garbage), torch.from_numpy(counts).float())
        kept.append(batch[counts])
    assert_same(state, moments(np.concatenate(kept)))


@given(batches, batches, batches)
def test_merging_is_commutative_and_associative(a, b, c):
    one, two, three = moments(*a), moments(*b), moments(*c)
    assert_same(merge_moments(one, two), merge_moments(two, one))
    left = merge_moments(merge_moments(one, two), three)
    assert_same(left, merge_moments(one, merge_moments(two, three)))
    assert_same(left, moments(*a, *b, *c))


@given(batches)
def test_the_empty_state_is_neutral(data: list[np.ndarray]):
    state = moments(*data)
    assert_same(merge_moments(state, empty_moments((2,))), state)
    assert_same(merge_moments(empty_moments((2,)), state), state)


@given(arrays(np.float64, (2, 5), elements=values), st.floats(0.1, 10.0), values)
def test_explained_variance_knows_no_units(data: np.ndarray, scale: float, offset: float):
    prediction, target = torch.from_numpy(data)
    share = explained_variance(prediction, target)
    moved = explained_variance(scale * prediction + offset, scale * target + offset)
    spread = target.std()
    if spread > 1e-3:
        torch.testing.assert_close(moved, share, rtol=1e-6, atol=1e-6)
        assert share.item() <= 1.0


@given(arrays(np.float64, st.integers(1, 8), elements=st.floats(0.01, 100.0)), st.floats(1e-6, 1e6))
def test_an_effective_sample_size_is_a_number_of_samples(weights: np.ndarray, scale: float):
    size = effective_sample_size(torch.from_numpy(weights)).item()
    assert 1.0 - 1e-9 <= size <= len(weights) + 1e-9
    assert effective_sample_size(scale * torch.from_numpy(weights)).item() == pytest.approx(size)


@given(tables, tables)
def test_one_improves_on_the_other_or_the_other_on_it(x: np.ndarray, y: np.ndarray):
    one, other = torch.from_numpy(x), torch.from_numpy(y)
    there, back = probability_of_improvement(one, other), probability_of_improvement(other, one)
    assert there.item() + back.item() == pytest.approx(1.0)
    assert probability_of_improvement(one, one).item() == pytest.approx(0.5)


@given(tables, values, st.floats(0.1, 10.0))
def test_the_interquartile_mean_lies_in_the_middle_and_moves_with_the_data(
    scores: np.ndarray, shift: float, scale: float
):
    table: Tensor = torch.from_numpy(scores)
    middle = interquartile_mean(table)
    assert table.min() - 1e-9 <= middle <= table.max() + 1e-9
    torch.testing.assert_close(interquartile_mean(scale * table + shift), scale * middle + shift)
