"""Laws of critic losses: loops agree, minimisers are quantiles, encodings keep the mean."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from keel.functional import aggregate, value

SEED = st.integers(0, 2**32)
NUMBERS = st.lists(st.floats(-100, 100), min_size=1, max_size=8)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(SEED, st.floats(0.01, 3))
def test_the_clipped_loss_is_the_formula_of_ppo2(seed, clip):
    prediction, old_value, target = normal(seed, 3, 16)
    prediction.requires_grad_()
    result = value.clipped(prediction, old_value, target, clip)
    bounded = old_value + (prediction - old_value).clamp(-clip, clip)
    expected = 0.5 * torch.maximum((prediction - target) ** 2, (bounded - target) ** 2)
    assert_close(result.loss, expected, rtol=1e-12, atol=1e-12)
    assert (result.loss >= value.squared(prediction, target)).all()

    result.loss.sum().backward()
    error = (prediction - target).detach()
    assert_close(prediction.grad, torch.where(result.clipped, 0.0, error), rtol=0, atol=0)
    inside = (prediction - old_value).abs() < clip - 1e-9
    assert not result.clipped[inside].any()


@given(SEED, st.integers(1, 4), st.integers(1, 3), st.sampled_from([0.0, 0.3, 1.0, 5.0]))
def test_quantile_huber_is_the_double_loop(seed, count, samples, kappa):
    quantiles, target = normal(seed, 2, count), 2 * normal(seed + 1, 2, samples)
    expected = torch.zeros(2, dtype=torch.float64)
    for row in range(2):
        for i in range(count):
            tau = (i + 0.5) / count
            for sample in target[row].tolist():
                u = sample - quantiles[row, i].item()
                huber = 0.5 * u * u / kappa if abs(u) <= kappa else abs(u) - 0.5 * kappa
                expected[row] += abs(tau - (u < 0)) * huber / (count * samples)
    assert_close(value.quantile_huber(quantiles, target, kappa=kappa), expected)


@given(SEED, st.integers(1, 4))
def test_one_sample_needs_no_axis_of_its_own(seed, count):
    quantiles, target = normal(seed, 2, 3, count), normal(seed + 1, 2, 3)
    loss = value.quantile_huber(quantiles, target)
    assert loss.shape == (2, 3)
    assert torch.equal(loss, value.quantile_huber(quantiles, target.unsqueeze(-1)))


@given(SEED, st.integers(1, 5), st.integers(3, 40))
def test_the_quantile_loss_is_smallest_at_the_quantiles_of_the_samples(seed, count, size):
    samples = normal(seed, size)
    levels = value.midpoints(count, samples)
    for step, sign in ((-1e-6, -1), (1e-6, 1)):  # downhill towards the quantile from both sides
        best = torch.quantile(samples, levels, interpolation="lower" if sign < 0 else "higher")
        quantiles = (best + step).requires_grad_()
        loss = value.quantile_huber(quantiles, samples, kappa=0.0)
        (gradient,) = torch.autograd.grad(loss, quantiles)
        assert (gradient * sign >= -1e-12).all()


def test_descending_the_quantile_loss_finds_the_quantiles():
    samples = normal(0, 4001)
    quantiles = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    for _ in range(300):
        loss = value.quantile_huber(quantiles, samples, kappa=0.0)
        quantiles.data -= 4.0 * torch.autograd.grad(loss, quantiles)[0]
    expected = torch.quantile(samples, value.midpoints(4, samples))
    assert_close(quantiles.detach(), expected, rtol=0, atol=1e-2)


@st.composite
def supports(draw) -> torch.Tensor:
    """Sorted atoms with uneven steps."""
    steps = draw(st.lists(st.floats(0.01, 10), min_size=1, max_size=8))
    return tensor([draw(st.floats(-10, 10)), *steps]).cumsum(0)


@given(NUMBERS, supports())
def test_two_hot_is_a_distribution_with_the_mean_of_its_target(numbers, support):
    target = tensor(numbers)
    result = value.two_hot(target, support)
    assert (result >= 0).all()
    assert ((result > 0).sum(-1) <= 2).all()
    assert_close(result.sum(-1), torch.ones_like(target), rtol=1e-15, atol=0)
    inside = target.clamp(support[0], support[-1])
    assert_close(result @ support, inside, rtol=1e-12, atol=1e-12)


@given(SEED, st.integers(4, 60), st.floats(0.5, 1.5), st.floats(0.1, 10))
def test_hl_gauss_is_a_distribution_with_nearly_the_mean_of_its_target(seed, atoms, steps, width):
    support = torch.linspace(-width, width, atoms, dtype=torch.float64)
    step = (support[1] - support[0]).item()
    target = width * normal(seed, 20).clamp(-2, 2)
    result = value.hl_gauss(target, support, steps * step)
    assert (result >= 0).all()
    assert_close(result.sum(-1), torch.ones_like(target), rtol=1e-12, atol=0)

    interior = target.abs() < width - 6 * steps * step  # no mass beyond the ends
    error = (result @ support - target)[interior].abs() / step
    assert (error < 0.01).all()


@given(SEED, st.sampled_from([math.nan, math.inf, 1e300]))
def test_a_broken_target_of_weight_zero_touches_no_other_row(seed, garbage):
    prediction, old_value, target = normal(seed, 3, 6)
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    kept = weight > 0
    for loss in (
        value.squared,
        lambda v, r: value.clipped(v, old_value, r, 0.2).loss,
        lambda v, r: value.quantile_huber(torch.stack([v, v + 1], -1), r),
    ):
        full, plain = (prediction.clone().requires_grad_() for _ in range(2))
        losses = (
            aggregate(loss(full, torch.where(kept, target, garbage)), weight),
            aggregate(loss(plain, target), weight),
        )
        sum(losses).backward()
        assert torch.equal(*losses)
        assert torch.equal(full.grad[kept], plain.grad[kept])
