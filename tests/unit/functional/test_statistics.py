"""Running moments, fit, sample size, and the statistics of comparing runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import scipy.stats
import torch
from scipy.stats import mannwhitneyu, trim_mean
from torch import Tensor

from keel.errors import InputError, ShapeError
from keel.functional import (
    Moments,
    effective_sample_size,
    empty_moments,
    explained_variance,
    holm,
    interquartile_mean,
    merge_moments,
    performance_profile,
    probability_of_improvement,
    stratified_bootstrap,
    t_interval,
    t_test,
    trimmed_mean,
    update_moments,
    wilson_interval,
)
from keel.functional.statistics import _resample


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- running moments ----------------------------------------------------------------------------


def test_moments_by_hand():
    """1, 2, 3, 6: mean 3, deviations 4 + 1 + 0 + 9."""
    state = update_moments(empty_moments(), torch.tensor([1.0, 2.0, 3.0, 6.0]))
    assert (state.weight.item(), state.mean.item(), state.deviations.item()) == (4.0, 3.0, 14.0)
    assert state.variance.item() == 3.5


def test_weights_count_rows_by_hand():
    """1 once and 4 twice: mean 3, variance (4 + 1 + 1)/3; the row of weight 0 may be anything."""
    rows, weight = torch.tensor([1.0, 4.0, math.nan]), torch.tensor([1.0, 2.0, 0.0])
    state = update_moments(empty_moments(), rows, weight)
    assert (state.weight.item(), state.mean.item(), state.variance.item()) == (3.0, 3.0, 2.0)


def test_leading_axes_are_rows_and_the_rest_are_features():
    batch = torch.arange(24.0).reshape(2, 3, 4)
    state = update_moments(empty_moments((4,)), batch, torch.ones(2, 3))
    torch.testing.assert_close(state.mean, batch.double().mean((0, 1)))
    torch.testing.assert_close(state.variance, batch.double().var((0, 1), correction=0))


def test_a_single_number_is_a_batch():
    assert update_moments(empty_moments(), torch.tensor(5.0)).mean.item() == 5.0


def test_the_empty_state_divides_harmlessly():
    state = empty_moments((3,))
    assert state.weight.item() == 0.0
    assert state.mean.tolist() == [0.0, 0.0, 0.0]
    assert state.variance.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("weight", [None, torch.zeros(2)], ids=["no rows", "no weight"])
def test_nothing_new_changes_nothing(weight: Tensor | None):
    state = update_moments(empty_moments(), torch.tensor([1.0, 3.0]))
    batch = torch.empty(0) if weight is None else torch.full((2,), math.nan)
    assert update_moments(state, batch, weight) == state


def test_a_constant_seen_once_has_no_variance():
    assert update_moments(empty_moments(), torch.tensor([7.0])).variance.item() == 0.0


def test_moments_do_not_forget_small_deviations_on_a_large_offset():
    """10⁸ and 10⁸ + 1 in turn: Σx² needs 17 digits, the deviations one."""
    state = empty_moments()
    for _ in range(1000):
        state = update_moments(state, torch.tensor([1e8, 1e8 + 1.0], dtype=torch.float64))
    assert state.variance.item() == pytest.approx(0.25, rel=1e-6)


def test_merging_by_hand():
    """(0, 2) and (6): together mean 8/3 and deviations 64/9 + 4/9 + 100/9."""
    one, other = (update_moments(empty_moments(), torch.tensor(x)) for x in ([0.0, 2.0], [6.0]))
    merged = merge_moments(one, other)
    assert merged.mean.item() == pytest.approx(8 / 3)
    assert merged.deviations.item() == pytest.approx(168 / 9)


# --- explained variance -------------------------------------------------------------------------

TARGET = torch.tensor([1.0, 2.0, 3.0, 4.0])
UNLUCKY = 2.759729817359214
"""153 of them add up to something whose 153rd part is another number."""


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0], 1.0),
        ([6.0, 7.0, 8.0, 9.0], 1.0),  # a constant offset is no lack of fit
        ([0.0, 0.0, 0.0, 0.0], 0.0),
        ([4.0, 3.0, 2.0, 1.0], -3.0),  # residuals −3, −1, 1, 3: variance 5 against 1.25
        ([1.0, 2.0, 3.0, 2.0], 0.4),  # residuals 0, 0, 0, 2: variance 0.75
    ],
)
def test_explained_variance_by_hand(prediction: list[float], expected: float):
    got = explained_variance(torch.tensor(prediction), TARGET)
    assert got.item() == pytest.approx(expected)


def test_explained_variance_ignores_rows_of_weight_zero():
    prediction = torch.tensor([1.0, 2.0, math.inf, 3.0])
    target = torch.tensor([1.0, 2.0, math.nan, 3.0])
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0])
    assert explained_variance(prediction, target, weight).item() == 1.0


@pytest.mark.parametrize("value", [0.0, 7.0, UNLUCKY, -UNLUCKY, UNLUCKY * 2.0**30])
@pytest.mark.parametrize("rows", [1, 7, 153])
def test_a_constant_target_leaves_nothing_to_explain(value: float, rows: int):
    """Even where its computed mean is one rounding error beside it."""
    target = torch.full((rows,), value, dtype=torch.float64)
    weight = torch.linspace(0.1, 0.9, rows, dtype=torch.float64)
    for weights in (None, weight):
        assert explained_variance(torch.arange(rows).double(), target, weights).isnan()


def test_a_small_variation_on_a_large_offset_counts():
    target = 1e6 + TARGET.double() * 1e-5
    assert explained_variance(target, target).item() == 1.0


# --- effective sample size ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "size"),
    [
        ([1.0, 1.0, 1.0, 1.0], 4.0),
        ([5.0, 0.0, 0.0], 1.0),
        ([2.0, 1.0, 1.0], 16.0 / 6.0),
        ([3e38, 3e38], 2.0),  # the squares overflow float32
        ([1e-30, 1e-30], 2.0),  # and here they vanish
        ([0.0, 0.0], 0.0),
    ],
)
def test_effective_sample_size_by_hand(weights: list[float], size: float):
    assert effective_sample_size(torch.tensor(weights)).item() == pytest.approx(size)


# --- scores of runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [1, 3, 4, 5, 7, 8, 11])
def test_interquartile_mean_is_scipys_trimmed_mean(runs: int):
    scores = torch.randn(runs, 3, generator=rng(), dtype=torch.float64)
    expected = trim_mean(scores.flatten().numpy(), 0.25)
    assert interquartile_mean(scores).item() == pytest.approx(expected)


def test_interquartile_mean_ignores_the_outer_quarters():
    assert interquartile_mean(torch.tensor([-1e9, 1.0, 2.0, 1e9])).item() == 1.5


def test_probability_of_improvement_by_hand():
    """Task 1: 3 wins of 4. Task 2: one win and one tie of 4. Mean (0.75 + 0.375)/2."""
    x = torch.tensor([[1.0, 5.0], [4.0, 1.0]])
    y = torch.tensor([[0.0, 5.0], [2.0, 4.0]])
    assert probability_of_improvement(x, y).item() == pytest.approx(0.5625)


def test_probability_of_improvement_is_mann_whitneys_u():
    """U / (n·m) per task, ties counted half, averaged over tasks."""
    x = torch.randint(0, 5, (4, 3), generator=rng()).double()
    y = torch.randint(0, 5, (6, 3), generator=rng(1)).double()
    tasks = [mannwhitneyu(x[:, i], y[:, i]).statistic / (4 * 6) for i in range(3)]
    assert probability_of_improvement(x, y).item() == pytest.approx(sum(tasks) / 3)


def test_performance_profile_by_hand():
    """The share of all runs *strictly* above each threshold."""
    scores = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    profile = performance_profile(scores, torch.tensor([-1.0, 0.0, 1.5, 3.0]))
    assert profile.tolist() == [1.0, 0.75, 0.5, 0.0]


# --- stratified bootstrap -----------------------------------------------------------------------

SCORES = torch.randn(10, 4, generator=rng(7), dtype=torch.float64)


def test_the_generator_decides_the_interval():
    intervals = [
        stratified_bootstrap(torch.mean, SCORES, generator=rng(seed), resamples=200)
        for seed in (0, 0, 1)
    ]
    assert intervals[0] == intervals[1]
    assert intervals[0] != intervals[2]


def test_the_estimate_is_that_of_the_scores_themselves():
    interval = stratified_bootstrap(torch.mean, SCORES, generator=rng(), resamples=200)
    assert interval.estimate == SCORES.mean()
    assert interval.low < interval.estimate < interval.high


def test_runs_are_resampled_within_their_task():
    """Task i has scores in [10·i, 10·i + 5): no resample may mix them, each draws on its own."""
    scores = torch.arange(5.0)[:, None] + 10.0 * torch.arange(3.0)
    runs = _resample(scores, 100, rng()) - 10.0 * torch.arange(3.0)
    assert runs.shape == (100, 5, 3)
    assert set(runs.flatten().tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0}
    assert (runs[..., 0] != runs[..., 1]).any()
    assert runs.mean().item() == pytest.approx(2.0, abs=0.15)  # 1,500 draws of 0…4: σ = 0.037


def test_each_table_is_resampled_on_its_own():
    """Else x − x would be 0 in every resample."""
    interval = stratified_bootstrap(
        lambda x, y: (x - y).mean(), SCORES, SCORES, generator=rng(), resamples=200
    )
    assert interval.estimate == 0.0
    assert interval.low < 0.0 < interval.high


def test_tables_may_differ_in_runs():
    x, y = SCORES + 10.0, SCORES[:3]
    interval = stratified_bootstrap(probability_of_improvement, x, y, generator=rng(), resamples=50)
    assert [end.item() for end in interval] == [1.0, 1.0, 1.0]


def test_a_statistic_may_have_many_values():
    thresholds = torch.tensor([-1.0, 0.0, 1.0])
    interval = stratified_bootstrap(
        lambda scores: performance_profile(scores, thresholds),
        SCORES,
        generator=rng(),
        resamples=50,
    )
    assert interval.low.shape == interval.high.shape == (3,)
    assert (interval.low <= interval.high).all()


def test_the_interval_is_as_wide_as_the_normal_one():
    """The mean of n equal-variance scores: ±1.96 σ/√n at 95 %, ±1.645 σ/√n at 90 %."""
    scores = torch.randn(400, 1, generator=rng(), dtype=torch.float64)
    error = scores.std(correction=0).item() / 20.0
    for confidence, quantile in ((0.95, 1.960), (0.90, 1.645)):
        low, high = stratified_bootstrap(
            torch.mean, scores, generator=rng(), confidence=confidence
        )[1:]
        assert (high - low).item() == pytest.approx(2.0 * quantile * error, rel=0.06)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """90 % nominal, a little less for a percentile interval of 20 runs; σ of 100 trials is 3."""
    covered = 0
    for seed in range(100):
        scores = torch.randn(20, 1, generator=rng(seed), dtype=torch.float64)
        low, high = stratified_bootstrap(
            torch.mean, scores, generator=rng(1000 + seed), confidence=0.9, resamples=200
        )[1:]
        covered += bool(low <= 0.0 <= high)
    assert 79 <= covered <= 97


# --- Student's t ---------------------------------------------------------------------------------


def test_a_trimmed_mean_by_hand():
    """1 2 3 4 10: a quarter of five is one, so 2 3 4 stay; winsorised 2 2 3 4 4, of variance 1.
    The squared error is (5 − 1)·1 / (3·2)."""
    found = trimmed_mean(torch.tensor([10.0, 1.0, 3.0, 2.0, 4.0]))
    assert found.mean == pytest.approx(3.0)
    assert found.error == pytest.approx(4.0 / 6.0)
    assert found.freedom == 2


def test_without_trimming_it_is_the_mean_and_its_standard_error():
    x = torch.randn(7, generator=rng(), dtype=torch.float64)
    found = trimmed_mean(x, 0.0)
    assert torch.equal(found.mean, x.sort().values.mean())
    assert found.error.item() == pytest.approx(x.var().item() / 7)


@pytest.mark.parametrize(("trim", "sizes"), [(0.0, (3, 3)), (0.0, (4, 9)), (0.25, (5, 8))])
def test_two_means_give_the_interval_of_scipy(trim: float, sizes: tuple[int, int]):
    x, y = (torch.randn(n, generator=rng(n), dtype=torch.float64) * n for n in sizes)
    found = t_interval((1.0, trimmed_mean(x, trim)), (-1.0, trimmed_mean(y, trim)))
    test = scipy.stats.ttest_ind(x.numpy(), y.numpy(), equal_var=False, trim=trim)
    expected = test.confidence_interval(0.95)
    assert found.low.item() == pytest.approx(expected.low)
    assert found.high.item() == pytest.approx(expected.high)


def test_one_mean_gives_the_interval_of_scipy():
    x = torch.randn(6, generator=rng(), dtype=torch.float64)
    found = t_interval((1.0, trimmed_mean(x, 0.0)), confidence=0.9)
    expected = scipy.stats.ttest_1samp(x.numpy(), 0.0).confidence_interval(0.9)
    assert (found.low.item(), found.high.item()) == pytest.approx((expected.low, expected.high))


def test_one_run_says_nothing_about_the_spread():
    found = t_interval((1.0, trimmed_mean(torch.tensor([2.0]))))
    assert found.estimate == 2.0
    assert (found.low, found.high) == (-torch.inf, torch.inf)


def test_equal_runs_leave_no_doubt():
    found = t_interval((1.0, trimmed_mean(torch.full((5,), 2.0))))
    assert found == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("trim", [0.0, 0.25])
def test_the_p_value_is_scipys(trim: float):
    x, y = (torch.randn(7, generator=rng(seed), dtype=torch.float64) for seed in (1, 2))
    found = t_test((1.0, trimmed_mean(x, trim)), (-1.0, trimmed_mean(y, trim)))
    expected = scipy.stats.ttest_ind(x.numpy(), y.numpy(), equal_var=False, trim=trim).pvalue
    assert found == pytest.approx(float(expected), rel=1e-9)


def test_p_values_without_spread():
    same, other = (trimmed_mean(torch.full((5,), c)) for c in (2.0, 3.0))
    assert t_test((1.0, same), (-1.0, same)) == 1.0
    assert t_test((1.0, other), (-1.0, same)) == 0.0
    assert t_test((1.0, trimmed_mean(torch.tensor([2.0])))) == 1.0


# --- many tests, and proportions -----------------------------------------------------------------


def test_holm_by_hand():
    """Of four: 4 × 0.005, 3 × 0.011 = 0.033, 2 × 0.02 = 0.04 and 0.04 itself."""
    assert holm([0.02, 0.04, 0.005, 0.011]) == pytest.approx([0.04, 0.04, 0.02, 0.033])
    assert holm([0.5, 0.4]) == pytest.approx([0.8, 0.8])
    assert holm([0.3, 0.9, 0.9]) == pytest.approx([0.9, 1.0, 1.0])
    assert holm([]) == []


def test_wilson_by_hand():
    """8 of 10 with z² = 3.8415: centre (0.8 + 0.1921)/1.3841; 200 of 200: 1/(1 + z²/200)."""
    found = [float(x) for x in wilson_interval(8, 10)]
    assert found == pytest.approx([0.8, 0.4902, 0.9433], abs=1e-4)
    assert [float(x) for x in wilson_interval(200, 200)] == pytest.approx([1.0, 0.981155, 1.0])
    assert float(wilson_interval(0, 200).low) == 0.0
    with pytest.raises(InputError, match="successes: expected 0 to 10"):
        wilson_interval(11, 10)


# --- refusals -----------------------------------------------------------------------------------

table, row = torch.zeros(2, 3), torch.zeros(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: update_moments(empty_moments((2,)), table),
            r"batch: expected \[\*lead, \*\[2\]\]",
        ),
        (lambda: update_moments(empty_moments((2, 3)), row), r"batch: .*got \[3\]"),
        (lambda: update_moments(empty_moments((3,)), table, row), r"weight: .*\[2\].*leading axes"),
        (lambda: explained_variance(row, table), r"prediction: expected shape \[2, 3\]"),
        (lambda: explained_variance(table, table, row), r"weight: expected shape \[2, 3\]"),
        (lambda: probability_of_improvement(row, table), r"x: expected \[runs, tasks\]"),
        (lambda: probability_of_improvement(table, row), r"y: expected \[runs, tasks\]"),
        (lambda: probability_of_improvement(table, table.T), r"y: expected 3 tasks .*\[3, 2\]"),
        (lambda: performance_profile(table[None], row), r"scores: .*got \[1, 2, 3\]"),
        (lambda: performance_profile(table[:0], row), r"scores: .*got \[0, 3\]"),
        (
            lambda: stratified_bootstrap(torch.mean, table, row, generator=rng()),
            r"scores\[1\]: expected \[runs, tasks\]",
        ),
    ],
)
def test_a_wrong_shape_is_named(call: Callable[[], Moments | Tensor], message: str):
    with pytest.raises(ShapeError, match=message):
        call()
