"""Exact divergences: the value, the gradient, the extremes and the refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import mpmath
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    MixtureSameFamily,
    Normal,
    TanhTransform,
    TransformedDistribution,
    kl_divergence,
)

from keel.errors import ShapeError
from keel.functional import (
    bernoulli_kl,
    categorical_entropy,
    categorical_kl,
    distribution_kl,
    gaussian_kl,
    jensen_shannon,
    kl_terms,
    multi_categorical_kl,
    squashed_gaussian_kl,
    total_variation,
)
from keel.functional.divergence import exp_minus_linear

INF = math.inf


class Family(NamedTuple):
    kl: Callable[..., Tensor]
    distribution: Callable[..., Distribution]
    parameters: int


def gaussian(mean: Tensor, log_std: Tensor) -> Distribution:
    return Independent(Normal(mean, log_std.exp()), 1)


FAMILIES = {
    "categorical": Family(categorical_kl, lambda logits: Categorical(logits=logits), 1),
    "bernoulli": Family(bernoulli_kl, lambda z: Independent(Bernoulli(logits=z), 1), 1),
    "gaussian": Family(gaussian_kl, gaussian, 2),
    "squashed gaussian": Family(
        squashed_gaussian_kl,
        lambda mean, log_std: TransformedDistribution(gaussian(mean, log_std), TanhTransform()),
        2,
    ),
}
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


# --- values -------------------------------------------------------------------------------------


@each_family
@each_dtype
def test_both_directions_agree_with_torch(family: Family, dtype: torch.dtype):
    p, q = randn(2, family.parameters, 3, 4, 5, dtype=dtype)
    for one, other in ((p, q), (q, p)):
        expected = kl_divergence(family.distribution(*one), family.distribution(*other))
        torch.testing.assert_close(family.kl(*one, *other), expected)


def test_the_two_directions_differ():
    p, q = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.5, 0.5]).log()
    forward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    backward = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert categorical_kl(p, q).item() == pytest.approx(forward, rel=1e-5)
    assert categorical_kl(q, p).item() == pytest.approx(backward, rel=1e-5)


def test_multi_categorical_adds_its_parts():
    p, q = randn(2, 3, 4, 5)
    parts = categorical_kl(p[..., :2], q[..., :2]) + categorical_kl(p[..., 2:], q[..., 2:])
    torch.testing.assert_close(multi_categorical_kl(p, q, [2, 3]), parts)


def test_multi_categorical_splits_its_mask_too():
    p, q = randn(2, 3, 4, 5)
    mask = torch.tensor([True, True, True, False, True]).expand(3, 4, 5)
    legal = [2, 4]
    parts = categorical_kl(p[..., :2], q[..., :2]) + categorical_kl(p[..., legal], q[..., legal])
    torch.testing.assert_close(multi_categorical_kl(p, q, [2, 3], mask), parts)


def test_squashing_leaves_the_kl_as_it_is():
    """∫ p(a) log(p(a)/q(a)) da over actions a = tanh(u) is the KL of the Gaussians of u."""
    means, stds = (0.3, -0.2), (0.5, 0.8)

    def density(a: float, mean: float, std: float) -> float:
        return float(norm.pdf(math.atanh(a), mean, std)) / (1.0 - a * a)

    def integrand(a: float) -> float:
        p, q = (density(a, *arguments) for arguments in zip(means, stds, strict=True))
        return p * math.log(p / q)

    integral, _ = quad(integrand, -1.0 + 1e-9, 1.0 - 1e-9)
    p, q = (
        (torch.tensor([m], dtype=torch.float64), torch.tensor([s], dtype=torch.float64).log())
        for m, s in zip(means, stds, strict=True)
    )
    assert squashed_gaussian_kl(*p, *q).item() == pytest.approx(integral, rel=1e-7)


def test_gaussian_by_hand():
    """log(σ_q/σ_p) + (σ_p² + (μ_p − μ_q)²)/(2σ_q²) − ½ with N(1, 1) and N(3, 2²)."""
    expected = math.log(2.0) + (1.0 + 4.0) / 8.0 - 0.5
    one, three, two = torch.tensor([[1.0], [3.0], [2.0]], dtype=torch.float64)
    assert gaussian_kl(one, one.log(), three, two.log()).item() == pytest.approx(expected)


@each_dtype
def test_equal_gaussians_give_exactly_zero_however_narrow(dtype: torch.dtype):
    mean, log_std = randn(2, 12, dtype=dtype) * 5.0
    assert gaussian_kl(mean, log_std, mean, log_std).item() == 0.0


def test_entropy_is_torchs():
    logits = randn(3, 4, 5)
    torch.testing.assert_close(categorical_entropy(logits), Categorical(logits=logits).entropy())


def test_entropy_counts_legal_outcomes_only():
    logits = torch.tensor([0.0, 0.0, 50.0])
    entropy = categorical_entropy(logits, torch.tensor([True, True, False]))
    assert entropy.item() == pytest.approx(math.log(2.0))


def test_total_variation_by_hand():
    p, q = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.3, 0.4, 0.3]).log()
    assert total_variation(p, q).item() == pytest.approx(0.5 * (0.2 + 0.1 + 0.1))


def test_jensen_shannon_by_hand():
    """m = ((.9+.5)/2, (.1+.5)/2) = (.7, .3)."""
    p, q = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.5, 0.5]).log()
    from_p = 0.9 * math.log(0.9 / 0.7) + 0.1 * math.log(0.1 / 0.3)
    from_q = 0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3)
    assert jensen_shannon(p, q).item() == pytest.approx(0.5 * (from_p + from_q), rel=1e-5)


@pytest.mark.parametrize("divergence", [total_variation, jensen_shannon])
def test_other_divergences_respect_the_mask(divergence: Callable[..., Tensor]):
    p, q = randn(2, 6)
    mask = torch.tensor([True, False, True, True, False, True])
    torch.testing.assert_close(divergence(p, q, mask), divergence(p[mask], q[mask]))


# --- relative precision of small KLs in float32 -------------------------------------------------


def precise_kl(p_logits: Tensor, q_logits: Tensor) -> float:
    """KL of exactly these logits, with 50 digits."""
    with mpmath.workdps(50):
        p, q = ([mpmath.exp(x) for x in logits.tolist()] for logits in (p_logits, q_logits))
        p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
        return float(sum(a * mpmath.log(a / b) for a, b in zip(p, q, strict=True)))


def test_a_tiny_kl_keeps_its_digits_where_the_textbook_loses_them():
    """Log-prob gaps of 10⁻³ make a KL of 5·10⁻⁷, no larger than float32's rounding of log p."""
    ours, textbook = [], []
    for seed in range(20):
        p, noise = randn(2, 8, dtype=torch.float32, seed=seed)
        q = p + 1e-3 * noise
        exact = precise_kl(p, q)
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        ours.append(categorical_kl(p, q).item() / exact)
        textbook.append((log_p.exp() * (log_p - log_q)).sum().item() / exact)
    assert ours == pytest.approx([1.0] * 20, rel=1e-3)
    assert max(abs(ratio - 1.0) for ratio in textbook) > 0.5


def test_a_tiny_bernoulli_kl_keeps_its_digits():
    p, q = torch.tensor([0.7]), torch.tensor([0.701])
    exact = precise_kl(torch.cat([p, p - p]), torch.cat([q, q - q]))
    assert bernoulli_kl(p, q).item() == pytest.approx(exact, rel=1e-3)


def test_a_tiny_gaussian_kl_keeps_its_digits():
    """Only σ differs: ½φ(2·10⁻³) = 10⁻⁶ + ⅔·10⁻⁹ + …, while σ_p²/(2σ_q²) − ½ + … rounds away."""
    mean, log_std = torch.zeros(1), torch.zeros(1)
    kl = gaussian_kl(mean, log_std + 1e-3, mean, log_std)
    assert kl.item() == pytest.approx(1e-6 + 2e-9 / 3, rel=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float64, 2e-14)])
def test_exp_minus_linear_is_precise_on_both_sides_of_its_switch(
    dtype: torch.dtype, tolerance: float
):
    edges = torch.tensor([1e-12, 1e-6, 1e-3, 0.0499, 0.05, 0.0501, 0.3, 1.0, 20.0], dtype=dtype)
    x = torch.cat([-edges, edges])
    with mpmath.workdps(50):
        exact = [float(mpmath.expm1(v) - v) for v in x.tolist()]
    assert exp_minus_linear(x).tolist() == pytest.approx(exact, rel=tolerance, abs=0.0)


# --- gradients ----------------------------------------------------------------------------------


@each_family
def test_gradients_are_the_derivatives(family: Family):
    arguments = randn(2 * family.parameters, 2, 4).requires_grad_().unbind()
    assert torch.autograd.gradcheck(family.kl, arguments)


@pytest.mark.parametrize("divergence", [total_variation, jensen_shannon])
def test_other_divergences_have_their_derivatives(divergence: Callable[..., Tensor]):
    assert torch.autograd.gradcheck(divergence, randn(2, 2, 4).requires_grad_().unbind())


def test_entropy_has_its_derivative():
    mask = torch.tensor([True, True, False, True])
    assert torch.autograd.gradcheck(
        lambda x: categorical_entropy(x, mask), randn(4).requires_grad_()
    )


def test_masked_gradients_are_the_derivatives():
    mask = torch.tensor([[True, False, True, True], [False, True, False, True]])
    arguments = randn(2, 2, 4).requires_grad_().unbind()
    assert torch.autograd.gradcheck(lambda p, q: categorical_kl(p, q, mask), arguments)


def test_gradient_formulas():
    """∂KL/∂z_q = q − p and ∂KL/∂z_p = p·(log p − log q − KL)."""
    z_p, z_q = randn(2, 5).requires_grad_().unbind()
    kl = categorical_kl(z_p, z_q)
    grad_p, grad_q = torch.autograd.grad(kl, (z_p, z_q))
    p, q = z_p.softmax(-1), z_q.softmax(-1)
    torch.testing.assert_close(grad_q, q - p)
    torch.testing.assert_close(grad_p, p * ((p / q).log() - kl))


def test_gradient_vanishes_at_equality():
    z = randn(5, dtype=torch.float32)
    new = z.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(categorical_kl(z, new), new)
    assert gradient.abs().max().item() < 1e-7


# --- masks and impossible outcomes --------------------------------------------------------------


def test_a_mask_leaves_the_kl_of_the_legal_logits():
    p, q = randn(2, 6)
    mask = torch.tensor([True, False, True, True, False, False])
    torch.testing.assert_close(categorical_kl(p, q, mask), categorical_kl(p[mask], q[mask]))


@pytest.mark.parametrize("garbage", [INF, -INF, math.nan, 1e30])
def test_illegal_logits_neither_count_nor_learn(garbage: float):
    p = torch.tensor([0.1, garbage, 0.3], requires_grad=True)
    q = torch.tensor([0.2, -garbage, 0.1], requires_grad=True)
    categorical_kl(p, q, torch.tensor([True, False, True])).backward()
    for gradient in (p.grad, q.grad):
        assert gradient.isfinite().all()
        assert gradient[1] == 0.0
        assert gradient[0] != 0.0


def test_a_row_without_a_legal_outcome_is_silent():
    p, q = randn(2, 2, 3).requires_grad_().unbind()
    mask = torch.tensor([[False, False, False], [True, True, True]])
    kl = categorical_kl(p, q, mask)
    gradients = torch.stack(torch.autograd.grad(kl.sum(), (p, q)))
    assert kl[0] == 0.0
    assert (gradients[:, 0] == 0.0).all()
    assert (gradients[:, 1] != 0.0).all()


def test_no_mass_where_p_has_some_is_infinitely_far():
    """And poisons no gradient, so that one such row does not end a run."""
    p = torch.zeros(2, requires_grad=True)
    q = torch.tensor([0.0, -INF], requires_grad=True)
    kl = categorical_kl(p, q)
    assert kl.item() == INF
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(kl, (p, q)))


def test_no_mass_in_p_costs_nothing():
    """KL((1, 0)‖(½, ½)) = log 2; an outcome impossible under both changes nothing."""
    certain, fair = torch.tensor([0.0, -INF, -INF]), torch.tensor([0.0, 0.0, -INF])
    assert categorical_kl(certain, fair).item() == pytest.approx(math.log(2.0))


def test_gradients_pass_by_impossible_outcomes():
    p = torch.tensor([1.0, 0.0, -INF, -INF], requires_grad=True)
    q = torch.tensor([0.0, 0.5, 0.0, -INF], requires_grad=True)
    grad_p, grad_q = torch.autograd.grad(categorical_kl(p, q), (p, q))
    torch.testing.assert_close(grad_q, (q.softmax(-1) - p.softmax(-1)).detach())
    assert grad_p.isfinite().all()
    assert (grad_p[2:] == 0.0).all()


def test_kl_terms_of_impossible_outcomes():
    """p = 0 < q contributes q, p = q = 0 nothing, q = 0 < p infinity."""
    log_p, log_q = torch.tensor([[0.0, 0.5, 0.0], [0.25, 0.0, 0.0]]).log()
    torch.testing.assert_close(kl_terms(log_p, log_q), torch.tensor([0.25, INF, 0.0]))


# --- extremes -----------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("kl", [categorical_kl, bernoulli_kl])
def test_opposite_certainties_stay_finite(kl: Callable[..., Tensor], dtype: torch.dtype):
    p = torch.tensor([1e4, -1e4], dtype=dtype, requires_grad=True)
    q = torch.tensor([-1e4, 1e4], dtype=dtype, requires_grad=True)
    value = kl(p, q)
    gradients = torch.stack(torch.autograd.grad(value, (p, q)))
    assert value.item() == pytest.approx(2e4)
    assert gradients.isfinite().all()
    torch.testing.assert_close(gradients[1], torch.tensor([-1.0, 1.0], dtype=dtype))


@each_dtype
@pytest.mark.parametrize(("p_log_std", "q_log_std"), [(20.0, -20.0), (-20.0, 20.0)])
def test_extreme_spreads_stay_finite(p_log_std: float, q_log_std: float, dtype: torch.dtype):
    """Going wide costs about e^80/2, going narrow about 40 − ½."""
    means_and_stds = [
        torch.tensor([x], dtype=dtype, requires_grad=True) for x in (0.0, p_log_std, 1.0, q_log_std)
    ]
    kl = gaussian_kl(*means_and_stds)
    gradients = torch.cat(torch.autograd.grad(kl, means_and_stds))
    expected = 39.5 if p_log_std < q_log_std else 0.5 * (math.exp(80.0) + math.exp(40.0) - 81.0)
    assert kl.item() == pytest.approx(expected, rel=1e-5)
    assert gradients.isfinite().all()
    assert (gradients != 0.0).all()


# --- torch.distributions ------------------------------------------------------------------------


def mixture(*means: float) -> Distribution:
    equal = Categorical(logits=torch.zeros(len(means), dtype=torch.float64))
    return MixtureSameFamily(equal, Normal(torch.tensor(means, dtype=torch.float64), 1.0))


def test_distribution_kl_is_exact_where_torch_has_a_closed_form():
    p, q = Normal(torch.zeros(3), 1.0), Normal(torch.ones(3), 1.0)
    divergence = distribution_kl(p, q, p.sample())
    assert divergence.is_exact
    torch.testing.assert_close(divergence.kl, torch.full((3,), 0.5))


def test_distribution_kl_says_when_it_only_estimates():
    """e^x − 1 − x at x = log q(a) − log p(a)."""
    p, q, action = mixture(-1.0, 1.0), mixture(-0.5, 1.0), torch.tensor([0.3, -2.0]).double()
    divergence = distribution_kl(p, q, action)
    x = q.log_prob(action) - p.log_prob(action)
    assert not divergence.is_exact
    torch.testing.assert_close(divergence.kl, x.exp() - 1.0 - x)


def test_the_estimate_is_unbiased():
    p, q = mixture(-1.0, 1.0), mixture(-0.5, 1.5)

    def integrand(a: float) -> float:
        log_p, log_q = (d.log_prob(torch.tensor(a, dtype=torch.float64)).item() for d in (p, q))
        return math.exp(log_p) * (log_p - log_q)

    exact, _ = quad(integrand, -12.0, 12.0)
    torch.manual_seed(0)
    samples = distribution_kl(p, q, p.sample((200_000,))).kl
    standard_error = samples.std().item() / math.sqrt(samples.numel())
    assert samples.mean().item() == pytest.approx(exact, abs=4.0 * standard_error)


# --- refusals -----------------------------------------------------------------------------------

row, wrong, scalar = torch.zeros(2, 3), torch.zeros(3), torch.tensor(0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: categorical_kl(row, wrong), r"q_logits: .*\[2, 3\] \(that of p_logits\).*\[3\]"),
        (lambda: categorical_kl(row, row, wrong.bool()), r"mask: expected shape \[2, 3\]"),
        (lambda: categorical_kl(scalar, scalar), r"p_logits: expected \[\*lead, K\]"),
        (lambda: multi_categorical_kl(row, row, [1, 1]), r"p_logits: .*last axis of 2.*\[1, 1\]"),
        (lambda: multi_categorical_kl(row, wrong, [1, 2]), r"q_logits: expected shape \[2, 3\]"),
        (lambda: multi_categorical_kl(row, row, [3], wrong), r"mask: expected shape \[2, 3\]"),
        (lambda: multi_categorical_kl(scalar, scalar, [1]), r"p_logits: expected \[\*lead, Σ"),
        (lambda: bernoulli_kl(row, wrong), r"q_logits: expected shape \[2, 3\]"),
        (lambda: bernoulli_kl(scalar, scalar), r"p_logits: expected \[\*lead, D\]"),
        (lambda: gaussian_kl(row, wrong, row, row), r"p_log_std: expected shape \[2, 3\]"),
        (lambda: gaussian_kl(row, row, wrong, row), r"q_mean: expected shape \[2, 3\]"),
        (lambda: gaussian_kl(row, row, row, wrong), r"q_log_std: expected shape \[2, 3\]"),
        (lambda: gaussian_kl(*[scalar] * 4), r"p_mean: expected \[\*lead, D\]"),
        (lambda: total_variation(row, wrong), r"q_logits: expected shape \[2, 3\]"),
        (lambda: jensen_shannon(row, wrong), r"q_logits: expected shape \[2, 3\]"),
        (lambda: categorical_entropy(scalar), r"^logits: expected \[\*lead, K\]"),
        (lambda: categorical_entropy(row, wrong), r"mask: .* \(that of logits\)"),
    ],
)
def test_a_wrong_shape_is_named(call: Callable[[], Tensor], message: str):
    with pytest.raises(ShapeError, match=message):
        call()


# --- torch.compile ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "arguments", "backend"),
    [
        (categorical_kl, 2, "inductor"),
        (lambda p, q: categorical_kl(p, q, p > -0.5), 2, "aot_eager"),
        (lambda p, q: multi_categorical_kl(p, q, [2, 3]), 2, "aot_eager"),
        (bernoulli_kl, 2, "aot_eager"),
        (gaussian_kl, 4, "aot_eager"),
    ],
    ids=["categorical-inductor", "masked", "multi-categorical", "bernoulli", "gaussian"],
)
def test_compiles_without_a_graph_break(kl: Callable[..., Tensor], arguments: int, backend: str):
    inputs = randn(arguments, 3, 5).requires_grad_().unbind()
    eager = kl(*inputs)
    compiled = torch.compile(kl, fullgraph=True, backend=backend)(*inputs)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(
        torch.autograd.grad(compiled.sum(), inputs), torch.autograd.grad(eager.sum(), inputs)
    )
