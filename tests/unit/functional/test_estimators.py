"""Sample estimates of KL: hand numbers, the bound of k3, the forms of a loss, the warnings."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from keel.errors import EstimatorWarning, InputError, ShapeError
from keel.functional import k1, k2, k3, kl_estimate, kl_loss, kl_reward
from keel.functional.estimators import (
    LOSS_FORMS,
    RIGHT,
    canonical,
    low_var_kl,
    warn_unless_right,
)

LOG2 = math.log(2.0)
policy, reference = torch.tensor([0.6, 0.2]).log(), torch.tensor([0.3, 0.4]).log()
"""Δ = log 2 and −log 2."""


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "doubled", "halved"),
    [
        ("k1", LOG2, -LOG2),
        ("k2", 0.5 * LOG2**2, 0.5 * LOG2**2),
        ("k3", 0.5 - 1.0 + LOG2, 2.0 - 1.0 - LOG2),
        ("abs", LOG2, LOG2),
    ],
)
def test_estimates_by_hand(name: str, doubled: float, halved: float):
    estimate = kl_estimate(name, policy, reference)
    assert estimate.tolist() == pytest.approx([doubled, halved], rel=1e-5)


@pytest.mark.parametrize(
    ("alias", "name"), [("kl", "k1"), ("mse", "k2"), ("abs", "abs"), ("low_var_kl", "low_var_kl")]
)
def test_aliases(alias: str, name: str):
    assert canonical(alias) == name
    torch.testing.assert_close(
        kl_estimate(alias, policy, reference), kl_estimate(name, policy, reference)
    )


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    """Over π = (.7, .2, .1) and π_ref = (.5, .3, .2) the expectation is a sum of three terms."""
    pi, ref = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]], dtype=torch.float64).log()
    kl = 0.7 * math.log(0.7 / 0.5) + 0.2 * math.log(0.2 / 0.3) + 0.1 * math.log(0.1 / 0.2)
    mean_k1, mean_k2, mean_k3 = ((pi.exp() * k(pi, ref)).sum().item() for k in (k1, k2, k3))
    assert mean_k1 == pytest.approx(kl)
    assert mean_k3 == pytest.approx(kl)
    assert mean_k2 != pytest.approx(kl, rel=0.01)


@pytest.mark.parametrize("estimator", [k1, k2, k3])
def test_gradients_are_the_derivatives(estimator: Callable[[Tensor, Tensor], Tensor]):
    log_prob = torch.tensor([-0.1, -2.0, -5.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(estimator, (log_prob, ref))


# --- k3 beyond its bound ------------------------------------------------------------------------


def k3_and_slope(x: float, dtype: torch.dtype = torch.float64) -> tuple[float, float]:
    """k3 and its derivative at log π_ref − log π = x."""
    log_prob = torch.tensor(-x, dtype=dtype, requires_grad=True)
    value = k3(log_prob, torch.zeros_like(log_prob))
    value.backward()
    return value.item(), log_prob.grad.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_k3_goes_on_along_its_tangent(dtype: torch.dtype):
    """At the bound, 20, the value is e²⁰ − 21 and the slope e²⁰ − 1."""
    slope = math.exp(20.0) - 1.0
    value, derivative = k3_and_slope(1020.0, dtype)
    assert value == pytest.approx(slope - 20.0 + 1000.0 * slope, rel=1e-5)
    assert derivative == pytest.approx(-slope, rel=1e-5)


def test_k3_has_no_kink_at_its_bound():
    below, bound, above = (k3_and_slope(x) for x in (20.0 - 1e-9, 20.0, 20.0 + 1e-9))
    assert below == pytest.approx(bound, rel=1e-8)
    assert above == pytest.approx(bound, rel=1e-8)


def test_k3_is_bounded_where_one_says():
    """e¹ − 1 − 1 at the bound 1, and two more steps along the slope e − 1."""
    value = k3(torch.tensor(-3.0), torch.tensor(0.0), max_exponent=1.0)
    assert value.item() == pytest.approx((math.e - 2.0) + 2.0 * (math.e - 1.0), rel=1e-6)


def test_k3_is_not_bounded_on_its_linear_side():
    value, derivative = k3_and_slope(-1000.0)
    assert (value, derivative) == (999.0, 1.0)


# --- low_var_kl, as verl has it -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("x", "value", "slope"),
    [
        (LOG2, 2.0 - 1.0 - LOG2, -1.0),  # e^x − x − 1, and its slope in log π, 1 − e^x
        (-LOG2, 0.5 - 1.0 + LOG2, 0.5),
        (0.0, 0.0, 0.0),
        (2.5, math.exp(2.5) - 3.5, 1.0 - math.exp(2.5)),  # 8.68, still below the clamp
        (2.7, 10.0, 0.0),  # e^2.7 − 3.7 = 11.18
        (25.0, 10.0, 0.0),
        (1e4, 10.0, 0.0),
        (-10.5, math.exp(-10.5) + 9.5, 1.0 - math.exp(-10.5)),
        (-11.5, 10.0, 0.0),  # e^−11.5 + 10.5
        (-1e4, 10.0, 0.0),
    ],
)
def test_low_var_kl_by_hand(x: float, value: float, slope: float, dtype: torch.dtype):
    """At x = log π_ref − log π."""
    log_prob = torch.tensor(-x, dtype=dtype, requires_grad=True)
    found = low_var_kl(log_prob, torch.zeros_like(log_prob))
    found.backward()
    assert found.item() == pytest.approx(value, rel=1e-5, abs=1e-7)
    assert log_prob.grad.item() == pytest.approx(slope, rel=1e-5, abs=1e-7)


@pytest.mark.filterwarnings("ignore::keel.errors.EstimatorWarning")
def test_low_var_kl_is_clamped_and_k3_is_not():
    """π = e^−5, π_ref = e^−1: k3 is e⁴ − 5 = 49.6, with slope 1 − e⁴."""
    log_prob, ref = torch.tensor(-5.0, requires_grad=True), torch.tensor(-1.0)
    for name, value, slope in (
        ("low_var_kl", 10.0, 0.0),
        ("k3", math.exp(4.0) - 5.0, 1.0 - math.exp(4.0)),
    ):
        loss = kl_loss(name, log_prob, ref)
        assert loss.item() == pytest.approx(value)
        assert kl_estimate(name, log_prob, ref).item() == pytest.approx(value)
        assert kl_reward(name, log_prob, ref).item() == pytest.approx(value)
        assert torch.autograd.grad(loss, log_prob)[0].item() == pytest.approx(slope)


# --- in a reward --------------------------------------------------------------------------------


def test_the_reward_penalty_is_detached():
    penalty = kl_reward("k1", policy.clone().requires_grad_(), reference)
    assert not penalty.requires_grad
    assert penalty.tolist() == pytest.approx([LOG2, -LOG2])


# --- in a loss ----------------------------------------------------------------------------------


def value_and_gradient(name: str, log_ratio: Tensor | None = None) -> tuple[Tensor, Tensor]:
    log_prob = policy.clone().requires_grad_()
    offset = None if log_ratio is None else log_prob - log_prob.detach() + log_ratio
    value = kl_loss(name, log_prob, reference, offset)
    return value.detach(), torch.autograd.grad(value.sum(), log_prob)[0]


def test_k2_is_itself_in_a_loss():
    """½Δ² and its gradient Δ."""
    value, gradient = value_and_gradient("k2")
    assert value.tolist() == pytest.approx([0.5 * LOG2**2, 0.5 * LOG2**2])
    assert gradient.tolist() == pytest.approx([LOG2, -LOG2])


def test_weighted_k2_by_hand():
    """sg(r)·½Δ² with r = 2 has the value Δ² and the gradient 2Δ."""
    value, gradient = value_and_gradient("weighted_k2", torch.full((2,), LOG2))
    assert value.tolist() == pytest.approx([LOG2**2, LOG2**2])
    assert gradient.tolist() == pytest.approx([2.0 * LOG2, -2.0 * LOG2])


def test_ratio_k3_by_hand():
    """r·k3 with r = 2: the gradient is r·k3 + r·(1 − e^(−Δ)), and k3 + 1 − e^(−Δ) = Δ."""
    value, gradient = value_and_gradient("ratio_k3", torch.full((2,), LOG2))
    assert value.tolist() == pytest.approx([2.0 * (LOG2 - 0.5), 2.0 * (1.0 - LOG2)])
    assert gradient.tolist() == pytest.approx([2.0 * LOG2, -2.0 * LOG2])


def test_ratio_k3_learns_through_its_ratio():
    """With r = 2 held fixed only r·(1 − e^(−Δ)) is left of the gradient, and that is wrong."""
    log_prob = policy.clone().requires_grad_()
    value = kl_loss("ratio_k3", log_prob, reference, torch.full((2,), LOG2))
    (gradient,) = torch.autograd.grad(value.sum(), log_prob)
    assert gradient.tolist() == pytest.approx([2.0 * 0.5, 2.0 * -1.0])


@pytest.mark.parametrize("log_ratio", [None, torch.tensor([0.3, -0.7])], ids=["on", "off"])
def test_straight_through_has_one_value_and_another_gradient(log_ratio: Tensor | None):
    value, gradient = value_and_gradient("straight_through", log_ratio)
    torch.testing.assert_close(value, value_and_gradient("ratio_k3", log_ratio)[0])
    torch.testing.assert_close(gradient, value_and_gradient("weighted_k2", log_ratio)[1])


@pytest.mark.parametrize("form", LOSS_FORMS)
def test_no_ratio_means_on_policy(form: str):
    torch.testing.assert_close(value_and_gradient(form), value_and_gradient(form, torch.zeros(2)))


@pytest.mark.parametrize("form", ["k2", *LOSS_FORMS])
def test_loss_forms_compile_without_a_graph_break(form: str):
    inputs = torch.stack([policy, reference]).requires_grad_().unbind()

    def loss(log_prob: Tensor, ref: Tensor) -> Tensor:
        log_ratio = None if form == "k2" else log_prob - policy.add(0.1)
        return kl_loss(form, log_prob, ref, log_ratio)

    eager, compiled = (
        loss(*inputs),
        torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs),
    )
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(
        torch.autograd.grad(compiled.sum(), inputs), torch.autograd.grad(eager.sum(), inputs)
    )


# --- warnings and refusals ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["k1", "k3", "abs", "kl", "low_var_kl"])
def test_a_wrong_term_of_a_loss_warns_and_names_the_right_ones(name: str):
    right = "use k2 or weighted_k2 or ratio_k3 or straight_through or full"
    with pytest.warns(EstimatorWarning, match=f"'{name}' in the loss .* on-policy; {right}"):
        kl_loss(name, policy, reference)


def test_k2_is_right_on_policy_only():
    right = "use weighted_k2 or ratio_k3 or straight_through or full"
    with pytest.warns(EstimatorWarning, match=f"'k2' in the loss .* off-policy; {right}"):
        kl_loss("k2", policy, reference, torch.zeros(2))


@pytest.mark.parametrize("name", ["k2", "k3", "abs"])
def test_a_wrong_penalty_warns_and_names_k1(name: str):
    with pytest.warns(EstimatorWarning, match=r"in the reward .* on-policy; use k1 \(see"):
        kl_reward(name, policy, reference)


@pytest.mark.parametrize("call", [kl_loss, kl_reward])
def test_the_warning_points_at_the_caller(call: Callable[..., Tensor]):
    with pytest.warns(EstimatorWarning) as caught:
        call("k3", policy, reference)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("placement", "sampling", "name"),
    [(*place, name) for place, names in RIGHT.items() for name in names],
)
def test_the_right_ones_do_not_warn(placement: str, sampling: str, name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unless_right(name, placement, sampling)


@pytest.mark.parametrize(("typo", "meant"), [("k_3", "k3"), ("weightedk2", "weighted_k2")])
def test_a_misspelt_estimator_gets_a_suggestion(typo: str, meant: str):
    with pytest.raises(InputError, match=f"estimator: '{typo}' .* did you mean '{meant}'?"):
        kl_estimate(typo, policy, reference)


@pytest.mark.parametrize("name", ["full", *LOSS_FORMS])
def test_only_sample_estimates_can_be_estimated(name: str):
    with pytest.raises(InputError, match=f"'{name}' is no sample estimate .those are k1, k2"):
        kl_estimate(name, policy, reference)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: k1(policy, reference[:1]), r"ref_log_prob: .*\[2\] \(that of log_prob\).*\[1\]"),
        (lambda: k2(policy, reference[:1]), r"ref_log_prob: expected shape \[2\]"),
        (lambda: k3(policy, reference[:1]), r"ref_log_prob: expected shape \[2\]"),
        (lambda: low_var_kl(policy, reference[:1]), r"ref_log_prob: expected shape \[2\]"),
        (lambda: kl_estimate("abs", policy, reference[:1]), r"ref_log_prob: expected shape \[2\]"),
        (
            lambda: kl_loss("ratio_k3", policy, reference, torch.zeros(1)),
            r"log_ratio: expected shape \[2\]",
        ),
    ],
)
def test_a_wrong_shape_is_named(call: Callable[[], Tensor], message: str):
    with pytest.raises(ShapeError, match=message):
        call()
