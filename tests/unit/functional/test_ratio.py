"""The ratio of two policies: its clamp, its quarantine, and its report."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from keel.errors import ShapeError
from keel.functional import policy_ratio, ratio_report

NAN, INF = math.nan, math.inf
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def rows(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@DTYPES
def test_the_ratio_is_the_quotient_of_the_probabilities(dtype):
    new, old = rows(0.6, 0.3, 0.5, dtype=dtype), rows(0.3, 0.6, 0.5, dtype=dtype)
    ratio = policy_ratio(new.log(), old.log())
    assert_close(ratio.ratio, rows(2, 0.5, 1, dtype=dtype))
    assert_close(ratio.log_ratio, rows(math.log(2), -math.log(2), 0, dtype=dtype))
    assert torch.equal(ratio.weight, torch.ones_like(new))
    assert not ratio.quarantined.any()


@DTYPES
def test_the_log_ratio_is_clamped_to_ten_and_loses_its_gradient_there(dtype):
    log_prob = rows(-50, -9, 0, 9, 50, dtype=dtype).requires_grad_()
    ratio = policy_ratio(log_prob, torch.zeros(5, dtype=dtype))
    assert torch.equal(ratio.log_ratio, rows(-10, -9, 0, 9, 10, dtype=dtype))
    assert torch.equal(ratio.raw_log_ratio, rows(-50, -9, 0, 9, 50, dtype=dtype))
    assert not ratio.raw_log_ratio.requires_grad

    ratio.ratio.sum().backward()  # d exp(x)/dx = exp(x) inside, 0 outside
    expected = rows(0, math.exp(-9), 1, math.exp(9), 0, dtype=dtype)
    assert_close(log_prob.grad, expected, rtol=1e-5, atol=0)


def test_the_clamp_can_be_chosen():
    ratio = policy_ratio(rows(-3, 3), rows(0, 0), max_log_ratio=2.0)
    assert torch.equal(ratio.log_ratio, rows(-2, 2))
    assert ratio_report(ratio, max_log_ratio=2.0).share_clamped == 1
    assert ratio_report(ratio).share_clamped == 0


# (log π_new, log π_old): the first and the last are healthy
SICK = [
    (-1.0, -1.5),
    (NAN, -1.0),
    (-1.0, NAN),
    (INF, -1.0),
    (-INF, -1.0),
    (-1.0, -INF),
    (-INF, -INF),
]
SICK += [(-2.0, -1.0)]
HEALTHY = torch.tensor([True] + [False] * 6 + [True])


@DTYPES
def test_samples_that_are_not_finite_are_quarantined(dtype):
    log_prob, old_log_prob = torch.tensor(SICK, dtype=dtype).unbind(1)
    ratio = policy_ratio(log_prob, old_log_prob, torch.full((8,), 0.5))
    assert torch.equal(ratio.quarantined, ~HEALTHY)
    assert torch.equal(ratio.weight, 0.5 * HEALTHY.to(dtype))
    assert torch.equal(ratio.ratio[~HEALTHY], torch.ones(6, dtype=dtype))
    assert not ratio.log_ratio[~HEALTHY].any()
    assert not ratio.raw_log_ratio[~HEALTHY].any()


@DTYPES
def test_quarantine_gives_the_gradient_of_the_batch_without_the_sick(dtype):
    def gradient(pairs: torch.Tensor) -> torch.Tensor:
        log_prob, old_log_prob = pairs.unbind(1)
        log_prob = log_prob.clone().requires_grad_()
        ratio = policy_ratio(log_prob, old_log_prob)
        ((ratio.ratio * ratio.weight).sum() / ratio.weight.sum()).backward()
        return log_prob.grad

    pairs = torch.tensor(SICK, dtype=dtype)
    assert torch.equal(gradient(pairs)[HEALTHY], gradient(pairs[HEALTHY]))
    assert torch.equal(gradient(pairs)[~HEALTHY], torch.zeros(6, dtype=dtype))


def test_a_row_that_does_not_count_is_neither_used_nor_quarantined():
    log_prob = rows(-1, NAN, 30).requires_grad_()
    ratio = policy_ratio(log_prob, rows(-2, 0, 0), rows(1, 0, 0))
    assert not ratio.quarantined.any()
    assert torch.equal(ratio.log_ratio, rows(1, 0, 0))
    ratio.ratio.sum().backward()
    assert_close(log_prob.grad, rows(math.e, 0, 0))
    report = ratio_report(ratio)
    assert (report.max_abs_log_ratio, report.non_finite_count, report.share_clamped) == (1, 0, 0)


def test_the_ratio_passes_the_numerical_gradient_check():
    old_log_prob = rows(-1, -2, NAN, -3)
    log_prob = rows(-1.5, -0.5, -1, -20).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: policy_ratio(x, old_log_prob)[:2], (log_prob,)
    )  # ratio and log-ratio: once plain, once grown, once quarantined, once clamped


@DTYPES
def test_the_report_by_hand(dtype):
    log_ratio = rows(0, 4.5, -4.5, 4.7, -4.7, 5.5, -12, NAN, INF, 99, dtype=dtype)
    weight = rows(1, 1, 1, 1, 1, 1, 1, 1, 1, 0, dtype=dtype)
    report = ratio_report(policy_ratio(log_ratio, torch.zeros_like(log_ratio), weight))
    assert report.max_abs_log_ratio == 12  # the true size, before the clamp
    assert_close(report.share_large.item(), 2 / 7)  # 5.5 and −12 are beyond 5
    assert_close(report.share_clamped.item(), 1 / 7)  # −12 is beyond 10
    assert_close(report.ratio_min.item(), math.exp(-10), rtol=1e-5, atol=0)
    assert_close(report.ratio_max.item(), math.exp(5.5), rtol=1e-5, atol=0)
    assert_close(report.share_extreme.item(), 4 / 7)  # ln 100 = 4.605: ±4.7 are beyond, ±4.5 not
    assert report.non_finite_count == 2
    assert_close(report.non_finite_share.item(), 2 / 9)
    assert all(field.ndim == 0 for field in report)


def test_on_its_threshold_a_log_ratio_is_neither_large_nor_clamped():
    report = ratio_report(policy_ratio(rows(5, -5, 10, -10), rows(0, 0, 0, 0)))
    assert (report.share_large, report.share_clamped) == (0.5, 0)


def test_on_its_threshold_a_ratio_is_not_extreme():
    ratio = policy_ratio(rows(0, 0, 0, 0), rows(0, 0, 0, 0))
    ratio = ratio._replace(ratio=rows(100, 0.01, 100.5, 0.0099))
    assert ratio_report(ratio).share_extreme == 0.5


def test_the_report_takes_no_part_in_the_gradient():
    report = ratio_report(policy_ratio(rows(-1, -2).requires_grad_(), rows(-2, -2)))
    assert not any(field.requires_grad for field in report)


@pytest.mark.parametrize(
    ("ratios", "share"),
    [((1, 1, 1, 1), 1.0), ((3, 3), 1.0), ((1, 3), 16 / 20), ((1, 0.001), 1.002001 / 2.000002)],
)
def test_the_effective_sample_size_is_a_share_of_the_rows(ratios, share):
    report = ratio_report(policy_ratio(rows(*ratios).log(), torch.zeros(len(ratios))))
    assert_close(report.effective_sample_size.item(), share)


def test_the_effective_sample_size_ignores_what_does_not_count():
    log_prob = rows(0, math.log(3), 9, NAN)
    report = ratio_report(policy_ratio(log_prob, torch.zeros(4), rows(1, 1, 0, 1)))
    assert_close(report.effective_sample_size.item(), 0.8)


@DTYPES
@pytest.mark.parametrize("size", [0, 3])
def test_without_a_usable_row_the_report_is_zeros_and_ratios_of_one(size, dtype):
    x = torch.full((size,), 7.0, dtype=dtype)
    report = ratio_report(policy_ratio(x, 0 * x, 0 * x))._asdict()
    assert (report.pop("ratio_min"), report.pop("ratio_max")) == (1, 1)
    assert not any(field.any() for field in report.values())


def test_a_batch_that_is_all_quarantined_says_so():
    report = ratio_report(policy_ratio(rows(NAN, INF), rows(0, 0)))
    assert (report.non_finite_count, report.non_finite_share) == (2, 1)
    assert (report.ratio_min, report.ratio_max, report.effective_sample_size) == (1, 1, 0)
    assert ratio_report(policy_ratio(rows(NAN), rows(0))).non_finite_share == 1


@DTYPES
def test_any_finite_log_probs_give_a_finite_ratio(dtype):
    largest = torch.finfo(dtype).max
    log_prob = rows(-largest, largest, -745, 0, dtype=dtype).requires_grad_()
    ratio = policy_ratio(log_prob, rows(largest, -largest, 0, -745, dtype=dtype))
    assert ratio.quarantined.tolist() == [True, True, False, False]  # the first two overflow
    ratio.ratio.sum().backward()
    assert log_prob.grad.isfinite().all()
    assert torch.stack(list(ratio_report(ratio))).isfinite().all()


def test_shape_errors_name_the_argument():
    x = torch.zeros(2, 3)
    with pytest.raises(ShapeError, match=r"old_log_prob: expected shape \[2, 3\] .*got \[3\]"):
        policy_ratio(x, x[0])
    with pytest.raises(ShapeError, match=r"weight: expected shape \[2, 3\] \(that of log_prob\)"):
        policy_ratio(x, x, x[:1])


def test_ratio_and_report_compile_into_one_graph():
    def both(log_prob, old_log_prob, weight):
        ratio = policy_ratio(log_prob, old_log_prob, weight)
        return ratio, ratio_report(ratio)

    log_prob, old_log_prob = rows(-1, 20, NAN, -2, 3), rows(-2, 0, 0, -2, 0)
    arguments = (log_prob, old_log_prob, rows(1, 1, 1, 1, 0))
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert_close(compiled(*arguments), both(*arguments))
