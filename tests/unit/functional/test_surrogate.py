"""Surrogate losses by hand, in value and in gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from keel.errors import ShapeError
from keel.functional import aggregate, policy_ratio, ratio_report, surrogate
from keel.functional.surrogate import cispo, clip, dual_clip, sequence_log_ratio, symmetric_clip

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])

# Ratios below, inside and above the clip, each with a good and with a bad advantage.
RATIO = (0.5, 1.0, 2.0, 0.5, 1.0, 2.0)
ADVANTAGE = (1.0, 1.0, 1.0, -1.0, -1.0, -1.0)


def rows(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def loss_gradient(loss, ratio=RATIO, advantage=ADVANTAGE, dtype=torch.float64, **options):
    """The surrogate of these rows, and the gradient of its sum in the ratio."""
    ratio = rows(*ratio, dtype=dtype).requires_grad_()
    result = loss(ratio, rows(*advantage, dtype=dtype), **options)
    (gradient,) = torch.autograd.grad(result.loss.sum(), ratio)
    return result.loss, result.clipped.tolist(), gradient


@DTYPES
def test_a_ratio_of_two_with_advantage_one_costs_minus_one_point_two(dtype):
    loss, clipped, gradient = loss_gradient(clip, (2.0,), (1.0,), dtype)
    assert_close(loss, rows(-1.2, dtype=dtype))
    assert clipped == [True]
    assert gradient == 0


@DTYPES
@pytest.mark.parametrize(
    ("loss", "options", "values", "clipped"),
    [
        (surrogate.unclipped, {}, (-0.5, -1, -2, 0.5, 1, 2), ()),
        (clip, {}, (-0.5, -1, -1.2, 0.8, 1, 2), (2, 3)),
        (clip, {"low": 0.1}, (-0.5, -1, -1.1, 0.9, 1, 2), (2, 3)),
        (clip, {"low": 0.2, "high": 0.28}, (-0.5, -1, -1.28, 0.8, 1, 2), (2, 3)),
        (clip, {"low": 0.5, "high": 1.5}, (-0.5, -1, -2, 0.5, 1, 2), ()),
        (symmetric_clip, {"epsilon": 0.25}, (-0.5, -1, -1.25, 0.8, 1, 2), (2, 3)),
        (symmetric_clip, {}, (-0.5, -1, -1.2, 1 / 1.2, 1, 2), (2, 3)),
        (dual_clip, {}, (-0.5, -1, -1.2, 0.8, 1, 2), (2, 3)),  # below the bound of 3
        (dual_clip, {"bound": 1.5}, (-0.5, -1, -1.2, 0.8, 1, 1.5), (2, 3, 5)),
        (dual_clip, {"low": 0.1, "high": 0.3}, (-0.5, -1, -1.3, 0.9, 1, 2), (2, 3)),
    ],
)
def test_losses_by_hand_and_no_gradient_where_clipped(loss, options, values, clipped, dtype):
    result, cut, gradient = loss_gradient(loss, dtype=dtype, **options)
    assert_close(result, rows(*values, dtype=dtype))
    assert [row for row, is_cut in enumerate(cut) if is_cut] == list(clipped)
    slope = [
        0.0 if is_cut else -advantage for is_cut, advantage in zip(cut, ADVANTAGE, strict=True)
    ]
    assert torch.equal(gradient, rows(*slope, dtype=dtype))


def test_dual_clip_bounds_the_loss_of_a_bad_action_that_became_likely():
    ratio, advantage = (100.0, 100.0, 2.9), (-2.0, 2.0, -2.0)
    loss, clipped, gradient = loss_gradient(dual_clip, ratio, advantage)
    assert_close(loss, rows(6, -2.4, 5.8))  # at most 3·|A|, and a good action is only clipped
    assert clipped == [True, True, False]
    assert torch.equal(gradient, rows(0, 0, 2))


def test_the_symmetric_clip_is_symmetric_in_the_log_ratio():
    good, _, _ = loss_gradient(symmetric_clip, (9.0,), (1.0,), epsilon=0.5)
    bad, _, _ = loss_gradient(symmetric_clip, (1 / 9,), (-1.0,), epsilon=0.5)
    assert_close((-good).log(), -bad.log())


@DTYPES
@pytest.mark.parametrize("loss", [clip, dual_clip])
def test_bounds_may_be_numbers_or_tensors_in_any_mixture(loss, dtype):
    low, high = torch.tensor(0.25), torch.tensor(0.5)
    numbers = loss_gradient(loss, dtype=dtype, low=0.25, high=0.5)
    for bounds in (
        {"low": low, "high": 0.5},
        {"low": 0.25, "high": high},
        {"low": low, "high": high},
    ):
        assert_close(loss_gradient(loss, dtype=dtype, **bounds), numbers, rtol=0, atol=0)


def test_on_the_edge_of_the_clip_the_gradient_is_whole():
    _, clipped, gradient = loss_gradient(clip, (1.25, 0.75), (1.0, -1.0), low=0.25)
    assert clipped == [False, False]
    assert torch.equal(gradient, rows(-1, 1))
    _, clipped, gradient = loss_gradient(dual_clip, (3.0,), (-1.0,), bound=3.0)
    assert (clipped, gradient) == ([False], 1)


def test_an_advantage_of_zero_asks_for_nothing():
    for loss in (surrogate.unclipped, clip, symmetric_clip, dual_clip):
        value, clipped, gradient = loss_gradient(loss, (0.1, 1.0, 9.0), (0.0, 0.0, 0.0))
        assert not value.any()
        assert not any(clipped)
        assert not gradient.any()


@DTYPES
def test_cispo_clips_the_weight_and_goes_on_learning(dtype):
    log_prob = rows(-3, -1, -0.5, dtype=dtype).requires_grad_()
    ratio = (log_prob - log_prob.detach() + rows(0.5, 1, 2, dtype=dtype).log()).exp()
    result = cispo(log_prob, ratio, rows(1, 2, -4, dtype=dtype), high=0.28)
    assert_close(result.loss, rows(2.4, 2, -2.56, dtype=dtype))  # −w·A·log π, w = 0.8, 1, 1.28
    assert result.clipped.tolist() == [True, False, True]
    result.loss.sum().backward()
    assert_close(log_prob.grad, rows(-0.8, -2, 5.12, dtype=dtype))  # −w·A, clipped or not


def test_cispo_clips_symmetrically_unless_told():
    one = torch.ones(2)
    result = cispo(one, torch.tensor([0.25, 4.0]), one, low=0.5)
    assert result.loss.tolist() == [-0.5, -1.5]
    assert_close(cispo(one, torch.tensor([0.25, 4.0]), one).loss, torch.tensor([-0.8, -1.2]))


@DTYPES
def test_the_sequence_ratio_is_the_mean_of_the_counted_tokens(dtype):
    log_ratio = torch.tensor([[1, 3, math.nan], [4, math.inf, math.nan]], dtype=dtype)
    log_ratio = torch.cat([log_ratio, torch.full((1, 3), math.nan, dtype=dtype)]).requires_grad_()
    weight = torch.tensor([[1.0, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    result = sequence_log_ratio(log_ratio, weight)
    assert result.tolist() == [[2, 2, 0], [4, 0, 0], [0, 0, 0]]

    (gradient,) = torch.autograd.grad(result[0, 0] + 10 * result[1, 0], log_ratio)
    assert gradient.tolist() == [[0.5, 0.5, 0], [10, 0, 0], [0, 0, 0]]


def test_a_sequence_learns_as_much_as_all_its_tokens():
    log_ratio = torch.zeros(1, 4, dtype=torch.float64).requires_grad_()
    ratio = sequence_log_ratio(log_ratio, torch.ones(1, 4)).exp()
    clip(ratio, torch.full((1, 4), 3.0)).loss.sum().backward()
    assert log_ratio.grad.tolist() == [[-3, -3, -3, -3]]  # 4 tokens × ¼ of the ratio each


@pytest.mark.parametrize("loss", [surrogate.unclipped, clip, symmetric_clip, dual_clip])
def test_losses_pass_the_numerical_gradient_check(loss):
    ratio = rows(0.3, 0.9, 1.1, 1.5, 5.0, 0.3, 0.9, 1.1, 1.5, 5.0).requires_grad_()
    advantage = rows(1, 2, 3, 4, 5, -1, -2, -3, -4, -5).requires_grad_()
    assert torch.autograd.gradcheck(lambda r, a: loss(r, a).loss, (ratio, advantage))


def test_sequence_ratio_and_cispo_pass_the_numerical_gradient_check():
    log_prob = rows(-3, -1, -0.5, -2).reshape(2, 2).requires_grad_()
    weight = torch.tensor([[1, 1], [1, 0]])
    assert torch.autograd.gradcheck(sequence_log_ratio, (log_prob, weight))
    fixed, advantage = rows(0.5, 1, 2, 1.1).reshape(2, 2), rows(1, -2, 3, -4).reshape(2, 2)
    assert torch.autograd.gradcheck(lambda x: cispo(x, fixed, advantage).loss, (log_prob,))


@DTYPES
def test_losses_are_finite_at_the_largest_ratio(dtype):
    ratio = rows(math.exp(-10), math.exp(10), dtype=dtype)
    for loss in (surrogate.unclipped, clip, symmetric_clip, dual_clip):
        for sign in (-10.0, 10.0):
            assert loss(ratio, torch.full_like(ratio, sign)).loss.isfinite().all()


def test_shape_errors_name_the_argument():
    x, short = torch.ones(2, 3), torch.ones(3)
    for loss in (surrogate.unclipped, clip, symmetric_clip, dual_clip):
        with pytest.raises(ShapeError, match=r"advantage: expected shape \[2, 3\] .*ratio.*\[3\]"):
            loss(x, short)
    with pytest.raises(ShapeError, match=r"log_prob: expected shape \[2, 3\] \(that of ratio\)"):
        cispo(short, x, x)
    with pytest.raises(ShapeError, match=r"advantage: expected shape \[2, 3\] \(that of ratio\)"):
        cispo(x, x, short)
    with pytest.raises(ShapeError, match=r"log_ratio: expected \[B, L\], got shape \[3\]"):
        sequence_log_ratio(short, short)
    with pytest.raises(ShapeError, match=r"weight: expected shape \[2, 3\] \(that of log_ratio\)"):
        sequence_log_ratio(x, short)


@pytest.mark.parametrize(("loss", "backend"), [(clip, "inductor"), (dual_clip, "aot_eager")])
def test_a_policy_loss_compiles_into_one_graph_with_its_gradient(loss, backend):
    def step(log_prob, old_log_prob, advantage, high):
        ratio = policy_ratio(log_prob, old_log_prob)
        result = loss(ratio.ratio, advantage, low=0.2, high=high)  # a number beside a schedule
        return aggregate(result.loss, ratio.weight), result.clipped, ratio_report(ratio)

    def run(function):
        log_prob, high = rows(-1, -5, 40, -2, math.nan).requires_grad_(), torch.tensor(0.28)
        outputs = function(log_prob, rows(-2, -1, 0, -2, 0), rows(1, -1, -2, 0.5, 3), high)
        outputs[0].backward()
        return *outputs, log_prob.grad

    assert_close(run(torch.compile(step, fullgraph=True, backend=backend)), run(step))
