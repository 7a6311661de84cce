"""Critic losses by hand, in value and in gradient."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import norm
from torch.testing import assert_close

from keel.errors import InputError, ShapeError
from keel.functional import value

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def rows(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@DTYPES
def test_the_gradient_of_the_squared_loss_is_the_error(dtype):
    prediction = rows(1, 2, 5, dtype=dtype).requires_grad_()
    loss = value.squared(prediction, rows(3, 2, 1, dtype=dtype))
    assert torch.equal(loss, rows(2, 0, 8, dtype=dtype))
    loss.sum().backward()
    assert torch.equal(prediction.grad, rows(-2, 0, 4, dtype=dtype))


@DTYPES
def test_the_clipped_loss_is_the_larger_of_two(dtype):
    prediction = rows(1.0, 1.5, 3.0, -1.0, 3.0, dtype=dtype).requires_grad_()
    old_value, target = torch.ones(5, dtype=dtype), rows(2, 2, 2, 2, 9, dtype=dtype)
    result = value.clipped(prediction, old_value, target, clip=0.5)
    # V_clip is 1, 1.5, 1.5, 0.5, 1.5. Row 2: ½(3−2)² > ½(1.5−2)². Row 4: ½(1.5−9)² > ½(3−9)².
    assert torch.equal(result.loss, rows(0.5, 0.125, 0.5, 4.5, 28.125, dtype=dtype))
    assert result.clipped.tolist() == [False, False, False, False, True]
    result.loss.sum().backward()
    assert torch.equal(prediction.grad, rows(-1, -0.5, 1, -3, 0, dtype=dtype))


def test_nothing_is_clipped_inside_the_clip_however_the_difference_rounds():
    # In float32, 0.1 + (0.7 − 0.1) is not 0.7: PPO2's own formula sees a clip where there is none.
    old_value, prediction = torch.linspace(-1, 1, 101), torch.linspace(-1.3, 1.7, 101)
    assert not value.clipped(prediction, old_value, torch.zeros(101), clip=1.0).clipped.any()


def test_midpoints():
    assert value.midpoints(4, rows(0)).tolist() == [0.125, 0.375, 0.625, 0.875]
    assert value.midpoints(1, torch.zeros(1)).dtype == torch.float32


@DTYPES
@pytest.mark.parametrize(
    ("kappa", "losses"),
    [
        # u = target − quantile = (3, −½); τ = ¼, ¾: the tilts are ¼ and ¼
        (1.0, (2.5, 0.125)),  # 3 − ½ and ½·¼
        (2.0, (2.0, 0.0625)),  # 3 − 1 and ½·¼/2
        (0.0, (3.0, 0.5)),  # the plain quantile loss |u|
    ],
)
def test_the_quantile_huber_loss_by_hand(kappa, losses, dtype):
    quantiles = torch.tensor([[0.0, 3.5]], dtype=dtype)
    loss = value.quantile_huber(quantiles, rows(3, dtype=dtype), kappa=kappa)
    assert torch.equal(loss, rows(0.25 * sum(losses) / 2, dtype=dtype))


def test_a_single_median_pays_half_the_huber_loss():
    for target, loss in ((0.5, 0.0625), (-0.5, 0.0625), (3.0, 1.25), (-3.0, 1.25)):
        result = value.quantile_huber(torch.zeros(1), torch.tensor(target))
        assert result == loss


def test_quantile_levels_can_be_chosen_and_samples_are_averaged():
    levels = rows(0.25)
    target = torch.tensor([[4.0, -2.0]], dtype=torch.float64)
    loss = value.quantile_huber(torch.zeros(1, 1).double(), target, kappa=0.0, levels=levels)
    assert loss == (0.25 * 4 + 0.75 * 2) / 2


def test_the_gradient_of_the_quantile_loss_is_its_tilt():
    quantiles = torch.zeros(2, dtype=torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(value.quantile_huber(quantiles, rows(9)[0]), quantiles)
    assert_close(gradient, rows(-0.25, -0.75) / 2)  # target above: up, in proportion to τ
    (gradient,) = torch.autograd.grad(value.quantile_huber(quantiles, rows(-9)[0]), quantiles)
    assert_close(gradient, rows(0.75, 0.25) / 2)


SUPPORT = (-2.0, -1.0, 1.0, 5.0)  # two_hot does not need even steps


@DTYPES
@pytest.mark.parametrize(
    ("target", "shares"),
    [
        (-1.5, (0.5, 0.5, 0, 0)),
        (2.0, (0, 0, 0.75, 0.25)),
        (0.5, (0, 0.25, 0.75, 0)),
        (-2.0, (1, 0, 0, 0)),  # on an atom, all of it
        (-1.0, (0, 1, 0, 0)),
        (5.0, (0, 0, 0, 1)),
        (-9.0, (1, 0, 0, 0)),  # beyond the ends, the end
        (99.0, (0, 0, 0, 1)),
    ],
)
def test_two_hot_shares_a_target_between_its_neighbours(target, shares, dtype):
    result = value.two_hot(torch.tensor(target, dtype=dtype), rows(*SUPPORT, dtype=dtype))
    assert torch.equal(result, rows(*shares, dtype=dtype))


def test_a_target_that_is_not_a_number_stays_visible():
    for encoded in (
        value.two_hot(rows(math.nan), rows(*SUPPORT)),
        value.hl_gauss(rows(math.nan), rows(-1, 0, 1), 1.0),
    ):
        assert encoded.sum(-1).isnan().all()


@DTYPES
def test_hl_gauss_is_the_histogram_of_a_normal_distribution(dtype):
    support = torch.linspace(-2, 2, 9, dtype=dtype)
    target, sigma = torch.tensor([[0.3, -1.9], [2.0, 0.0]], dtype=dtype), 0.4
    edges = [-2.25 + 0.5 * k for k in range(10)]
    cdf = torch.tensor(norm.cdf(edges, target[..., None], sigma), dtype=dtype)
    expected = cdf.diff() / (cdf[..., -1:] - cdf[..., :1])
    assert_close(value.hl_gauss(target, support, sigma), expected, rtol=1e-4, atol=1e-6)


def test_hl_gauss_moves_targets_beyond_the_ends_to_the_ends():
    support = torch.linspace(-2, 2, 9)
    beyond, ends = value.hl_gauss(torch.tensor([[-7.0, 7.0], [-2.0, 2.0]]), support, 0.4)
    assert torch.equal(beyond, ends)


@DTYPES
def test_hl_gauss_with_any_sigma(dtype):
    support, target = torch.linspace(-2, 2, 5, dtype=dtype), torch.tensor([0.2, -2, 2], dtype=dtype)
    narrow, wide = (value.hl_gauss(target, support, sigma) for sigma in (1e-6, 1e9))
    assert torch.equal(narrow, torch.eye(5, dtype=dtype)[[2, 0, 4]])  # one bin
    assert_close(wide, torch.full((3, 5), 0.2, dtype=dtype))  # all bins alike


@DTYPES
def test_categorical_is_torch_cross_entropy(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, generator=generator, dtype=dtype)
    probabilities = torch.rand(4, 6, generator=generator, dtype=dtype).softmax(-1)
    expected = torch.nn.functional.cross_entropy(logits, probabilities, reduction="none")
    assert_close(value.categorical(logits, probabilities), expected)
    assert_close(value.categorical(rows(0, 0), rows(0.5, 0.5)), torch.tensor(math.log(2)).double())


def test_the_gradient_of_the_cross_entropy_is_the_difference_of_the_distributions():
    logits, target = rows(1, -2, 0.5).requires_grad_(), rows(0.2, 0.3, 0.5)
    value.categorical(logits, target).backward()
    assert_close(logits.grad, logits.detach().softmax(0) - target)


def test_categorical_mean_is_the_expected_atom():
    logits, support = rows(0, math.log(3)), rows(-1, 7)
    assert_close(value.categorical_mean(logits, support), rows(5)[0])  # −1/4 + 7·3/4
    assert_close(value.categorical_mean(logits.repeat(2, 1), support), rows(5, 5))


def test_a_critic_that_matches_its_encoded_target_has_its_value():
    support, target = torch.linspace(-3, 3, 13).double(), rows(-2.9, 0.1, 1.7)
    two_hot = value.two_hot(target, support)
    assert_close(value.categorical_mean(two_hot.log(), support), target)


@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0])
def test_losses_pass_the_numerical_gradient_check(kappa):
    generator = torch.Generator().manual_seed(0)
    prediction, old_value, target = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    prediction.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: value.clipped(x, old_value, target, 0.3).loss, (prediction,)
    )
    quantiles = torch.randn(3, 4, generator=generator, dtype=torch.float64).requires_grad_()
    samples = target.reshape(3, 2).clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda q, y: value.quantile_huber(q, y, kappa=kappa), (quantiles, samples)
    )
    encoded = value.hl_gauss(rows(0.1, -0.4, 0.8), torch.linspace(-1, 1, 4).double(), 0.5)
    assert torch.autograd.gradcheck(value.categorical, (quantiles, encoded))
    support = rows(-1, 0, 2, 3)
    assert torch.autograd.gradcheck(value.categorical_mean, (quantiles, support))


@DTYPES
def test_losses_are_finite_at_the_extremes(dtype):
    huge = torch.tensor([1e18, -1e18], dtype=dtype).requires_grad_()
    losses = (
        value.squared(huge, torch.zeros_like(huge)),
        value.clipped(huge, torch.zeros_like(huge), torch.zeros_like(huge), 0.2).loss,
        value.quantile_huber(1e18 * huge, torch.zeros((), dtype=dtype)),
        value.categorical(huge, rows(0.5, 0.5, dtype=dtype)),
    )
    for loss in losses:
        assert loss.isfinite().all()
        (gradient,) = torch.autograd.grad(loss.sum(), huge, retain_graph=True)
        assert gradient.isfinite().all()


def test_shape_errors_name_the_argument():
    x, short = torch.zeros(2, 3), torch.zeros(3)
    with pytest.raises(ShapeError, match=r"value: expected shape \[2, 3\] \(that of target\)"):
        value.squared(short, x)
    with pytest.raises(ShapeError, match=r"old_value: expected shape \[2, 3\] \(that of target\)"):
        value.clipped(x, short, x, 0.2)
    with pytest.raises(ShapeError, match=r"quantiles: expected \[\*lead, Q\], got shape \[\]"):
        value.quantile_huber(short[0], short[0])
    for target in (short, short[0], torch.zeros(5, 4)):
        with pytest.raises(ShapeError, match=r"target: expected shape \[2.*\[\*lead, K\]\), got"):
            value.quantile_huber(x, target)
    with pytest.raises(ShapeError, match=r"levels: expected shape \[3\] \(one per quantile\)"):
        value.quantile_huber(x, x, levels=torch.zeros(2))
    with pytest.raises(ShapeError, match=r"target_probabilities: expected shape \[2, 3\] .*logits"):
        value.categorical(x, short)
    with pytest.raises(ShapeError, match=r"support: expected shape \[3\] .*last axis of logits"):
        value.categorical_mean(x, torch.zeros(4))


@pytest.mark.parametrize("encode", [value.two_hot, lambda x, s: value.hl_gauss(x, s, 1.0)])
def test_a_support_needs_two_atoms_on_one_axis(encode):
    with pytest.raises(ShapeError, match=r"support: expected \[K\], got shape \[\]"):
        encode(torch.zeros(2), torch.tensor(1.0))
    for support in (torch.zeros(1), torch.zeros(2, 2)):
        with pytest.raises(InputError, match="support: expected at least two sorted atoms"):
            encode(torch.zeros(2), support)


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan])
def test_sigma_must_be_positive(sigma):
    with pytest.raises(InputError, match="sigma: expected a positive number, got"):
        value.hl_gauss(torch.zeros(2), torch.linspace(-1, 1, 3), sigma)
