"""Laws that every divergence obeys, on whatever logits hypothesis can think of."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from keel.functional import (
    bernoulli_kl,
    categorical_entropy,
    categorical_kl,
    gaussian_kl,
    jensen_shannon,
    multi_categorical_kl,
    total_variation,
)

close = torch.testing.assert_close


def vectors(count: int, bound: float = 20.0, max_size: int = 6) -> st.SearchStrategy[Tensor]:
    """`count` vectors of one length, `[count, K]`, in float64."""
    return st.integers(1, max_size).flatmap(
        lambda size: arrays(np.float64, (count, size), elements=st.floats(-bound, bound)).map(
            torch.from_numpy
        )
    )


shifts = st.floats(-50.0, 50.0)


@given(vectors(2))
def test_kl_is_never_negative_and_zero_from_itself(logits: Tensor):
    p, q = logits
    assert categorical_kl(p, q).item() >= 0.0
    assert bernoulli_kl(p, q).item() >= 0.0
    assert categorical_kl(p, p).item() == bernoulli_kl(p, p).item() == 0.0


@given(vectors(4, bound=5.0))
def test_gaussian_kl_is_never_negative_and_zero_only_from_itself(parameters: Tensor):
    p_mean, p_log_std, q_mean, q_log_std = parameters
    kl = gaussian_kl(p_mean, p_log_std, q_mean, q_log_std).item()
    gap = max((p_mean - q_mean).abs().max().item(), (p_log_std - q_log_std).abs().max().item())
    assert kl >= 0.0
    assert gaussian_kl(p_mean, p_log_std, p_mean, p_log_std).item() == 0.0
    assert gap < 1e-6 or kl > 0.0


@given(vectors(2))
def test_pinsker_bounds_total_variation(logits: Tensor):
    """TV ≤ √(KL/2): hence KL = 0 only for equal distributions."""
    p, q = logits
    variation = total_variation(p, q).item()
    assert -1e-12 <= variation <= 1.0 + 1e-12
    assert variation <= math.sqrt(0.5 * categorical_kl(p, q).item()) + 1e-12


@given(vectors(2), st.randoms(use_true_random=False))
def test_the_order_of_the_outcomes_does_not_matter(logits: Tensor, random):
    order = random.sample(range(logits.shape[1]), logits.shape[1])
    close(categorical_kl(*logits[:, order]), categorical_kl(*logits))


@given(vectors(2), shifts, shifts)
def test_a_constant_added_to_all_logits_does_not_matter(logits: Tensor, a: float, b: float):
    p, q = logits
    close(categorical_kl(p + a, q + b), categorical_kl(p, q), rtol=1e-6, atol=1e-12)


@given(vectors(2), vectors(2))
def test_independent_parts_add(one: Tensor, other: Tensor):
    """The joint distribution of two independent choices has the sum of their KLs."""
    joint = (one[:, :, None] + other[:, None, :]).flatten(1)
    sizes = [one.shape[1], other.shape[1]]
    added = multi_categorical_kl(*torch.cat([one, other], 1), sizes)
    close(added, categorical_kl(*one) + categorical_kl(*other))
    close(added, categorical_kl(*joint), rtol=1e-6, atol=1e-12)


@given(vectors(2).filter(lambda logits: logits.shape[1] >= 2))
def test_merging_outcomes_never_increases_kl(logits: Tensor):
    """The data-processing inequality: who sees less can tell less apart."""
    merged = torch.cat([logits[:, :2].logsumexp(1, keepdim=True), logits[:, 2:]], 1)
    fine, coarse = categorical_kl(*logits).item(), categorical_kl(*merged).item()
    assert coarse <= fine * (1.0 + 1e-9) + 1e-12


@given(vectors(3))
def test_a_mask_is_a_smaller_distribution(tensors: Tensor):
    mask = tensors[2] >= tensors[2].median()
    p, q = tensors[:2].clone().requires_grad_().unbind()
    kl = categorical_kl(p, q, mask)
    gradients = torch.stack(torch.autograd.grad(kl, (p, q)))
    close(kl, categorical_kl(p[mask], q[mask]))
    assert (gradients[:, ~mask] == 0.0).all()


@given(vectors(2))
def test_a_bernoulli_is_a_categorical_of_two(logits: Tensor):
    pairs = torch.stack([logits, torch.zeros_like(logits)], -1)
    close(bernoulli_kl(*logits), categorical_kl(*pairs).sum(), rtol=1e-6, atol=1e-12)


@given(vectors(4, bound=3.0), shifts, st.floats(0.1, 10.0))
def test_units_do_not_matter_to_a_gaussian(parameters: Tensor, shift: float, scale: float):
    """x ↦ scale·x + shift is a bijection of both, and KL knows nothing of bijections."""
    p_mean, p_log_std, q_mean, q_log_std = parameters
    log_scale = math.log(scale)
    moved = gaussian_kl(
        scale * p_mean + shift, p_log_std + log_scale, scale * q_mean + shift, q_log_std + log_scale
    )
    close(moved, gaussian_kl(p_mean, p_log_std, q_mean, q_log_std), rtol=1e-6, atol=1e-9)


@given(vectors(2))
def test_jensen_shannon_is_symmetric_and_at_most_log_two(logits: Tensor):
    p, q = logits
    distance = jensen_shannon(p, q)
    close(distance, jensen_shannon(q, p))
    assert 0.0 <= distance.item() <= math.log(2.0) + 1e-12


@given(vectors(1))
def test_entropy_is_what_is_missing_to_uniform(logits: Tensor):
    """H(p) = log K − KL(p‖uniform)."""
    missing = math.log(logits.shape[1]) - categorical_kl(logits, torch.zeros_like(logits))
    close(categorical_entropy(logits), missing, rtol=1e-9, atol=1e-9)
