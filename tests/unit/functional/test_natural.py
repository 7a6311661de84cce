"""Fisher products against the explicit matrix, conjugate gradient, and a line search by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Normal

from keel.errors import InputError, ShapeError
from keel.functional import (
    bernoulli_fisher,
    bernoulli_kl,
    categorical_fisher,
    categorical_kl,
    conjugate_gradient,
    fisher_vector_product,
    flatten,
    gaussian_fisher,
    gaussian_kl,
    line_search,
    unflatten,
)

Tree = Mapping[str, Tensor]
Atoms = Iterator[tuple[Tensor, Tensor]]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- Fisher-vector products ---------------------------------------------------------------------
#
# A family is a small network, its Fisher matrix as Keel has it, its KL, and its *atoms*: pairs of
# (probability, log-probability) over all actions, from which F = Σ_a π(a) ∇log π(a) ∇log π(a)ᵀ.

OBS = randn(4, 3, seed=1)
MASK = torch.tensor(
    [[True, False, True], [True, True, True], [False, True, True], [True, False, False]]
)


class Family(NamedTuple):
    network: Callable[[Tree], Tree]
    params: Tree
    fisher: Callable[[Tree, Tree], Tree]
    kl: Callable[[Tree, Tree], Tensor]
    atoms: Callable[[Tree, Tree], Atoms]
    """of (fixed outputs, outputs): probabilities of the former, log-probabilities of the latter"""


def logits_network(params: Tree) -> Tree:
    return {"logits": torch.tanh(OBS @ params["first"]) @ params["second"]}


def gaussian_network(params: Tree) -> Tree:
    hidden = torch.tanh(OBS @ params["first"])
    return {"mean": hidden @ params["second"], "log_std": 0.3 * hidden @ params["third"]}


def gaussian_network_with_one_std(params: Tree) -> Tree:
    hidden = torch.tanh(OBS @ params["first"])
    return {"mean": hidden @ params["second"], "log_std": params["log_std"].expand(4, 2)}


def categorical_atoms(fixed: Tree, outputs: Tree, mask: Tensor | None = None) -> Atoms:
    hidden = torch.zeros(4, 3) if mask is None else torch.where(mask, 0.0, -1e9)
    for action in range(3):
        log_p, log_q = ((x["logits"] + hidden).log_softmax(-1)[:, action] for x in (fixed, outputs))
        yield log_p.exp(), log_q


def bernoulli_atoms(fixed: Tree, outputs: Tree) -> Atoms:
    for bits in itertools.product((0.0, 1.0), repeat=3):
        action = torch.tensor(bits, dtype=torch.float64).expand(4, 3)
        log_p, log_q = (
            Bernoulli(logits=x["logits"]).log_prob(action).sum(-1) for x in (fixed, outputs)
        )
        yield log_p.exp(), log_q


def gaussian_atoms(fixed: Tree, outputs: Tree) -> Atoms:
    """Squared scores are polynomials of degree 4 in the noise: 3 Gauss–Hermite points are exact."""
    points, weights = np.polynomial.hermite_e.hermegauss(3)
    shares = weights / weights.sum()
    for pair in itertools.product(range(3), repeat=2):
        noise = torch.tensor(points[list(pair)])
        action = fixed["mean"] + fixed["log_std"].exp() * noise
        log_prob = Normal(outputs["mean"], outputs["log_std"].exp()).log_prob(action).sum(-1)
        yield torch.full((4,), shares[list(pair)].prod()), log_prob


def categorical(mask: Tensor | None = None) -> Family:
    return Family(
        network=logits_network,
        params={"first": randn(3, 2, seed=2), "second": randn(2, 3, seed=3)},
        fisher=lambda out, u: {"logits": categorical_fisher(out["logits"], u["logits"], mask)},
        kl=lambda old, new: categorical_kl(old["logits"], new["logits"], mask),
        atoms=lambda fixed, outputs: categorical_atoms(fixed, outputs, mask),
    )


def gaussian(network: Callable[[Tree], Tree], **spread: Tensor) -> Family:
    def fisher(out: Tree, u: Tree) -> Tree:
        mean, log_std = gaussian_fisher(out["log_std"], u["mean"], u["log_std"])
        return {"mean": mean, "log_std": log_std}

    return Family(
        network=network,
        params={"first": randn(3, 2, seed=2), "second": randn(2, 2, seed=3), **spread},
        fisher=fisher,
        kl=lambda old, new: gaussian_kl(old["mean"], old["log_std"], new["mean"], new["log_std"]),
        atoms=gaussian_atoms,
    )


FAMILIES = {
    "categorical": categorical(),
    "masked": categorical(MASK),
    "bernoulli": Family(
        network=logits_network,
        params={"first": randn(3, 2, seed=2), "second": randn(2, 3, seed=3)},
        fisher=lambda out, u: {"logits": bernoulli_fisher(out["logits"], u["logits"])},
        kl=lambda old, new: bernoulli_kl(old["logits"], new["logits"]),
        atoms=bernoulli_atoms,
    ),
    "gaussian": gaussian(gaussian_network, third=randn(2, 2, seed=4)),
    "gaussian with one std": gaussian(gaussian_network_with_one_std, log_std=randn(2, seed=4)),
}
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
WEIGHT = torch.tensor([1.0, 0.0, 2.0, 0.5], dtype=torch.float64)
each_weight = pytest.mark.parametrize("weight", [None, WEIGHT], ids=["mean", "weighted"])


def share(weight: Tensor | None) -> Tensor:
    return torch.full((4,), 0.25).double() if weight is None else weight / weight.sum()


def measured_matrix(family: Family, **options) -> Tensor:
    size = flatten(family.params).numel()
    product = fisher_vector_product(family.network, family.params, family.fisher, **options)
    return torch.stack([product(unit) for unit in torch.eye(size, dtype=torch.float64)])


@each_weight
@each_family
def test_the_product_is_that_of_the_score_covariance(family: Family, weight: Tensor | None):
    fixed = family.network(family.params)
    prob = torch.stack([p for p, _ in family.atoms(fixed, fixed)])

    def log_probs(vector: Tensor) -> Tensor:
        outputs = family.network(unflatten(vector, family.params))
        return torch.stack([log_prob for _, log_prob in family.atoms(fixed, outputs)])

    scores = torch.func.jacrev(log_probs)(flatten(family.params))
    explicit = torch.einsum("b,ab,abi,abj->ij", share(weight), prob.double(), scores, scores)
    torch.testing.assert_close(measured_matrix(family, weight=weight), explicit)


@each_weight
@each_family
def test_the_product_is_that_of_the_kls_hessian(family: Family, weight: Tensor | None):
    old = family.network(family.params)

    def mean_kl(vector: Tensor) -> Tensor:
        return share(weight) @ family.kl(old, family.network(unflatten(vector, family.params)))

    hessian = torch.func.hessian(mean_kl)(flatten(family.params))
    torch.testing.assert_close(measured_matrix(family, weight=weight), hessian)


def test_damping_is_added_to_the_diagonal():
    plain, damped = (measured_matrix(categorical(), damping=d) for d in (0.0, 0.3))
    torch.testing.assert_close(damped - plain, 0.3 * torch.eye(12, dtype=torch.float64))


def test_rows_of_weight_zero_alone_leave_the_damping():
    matrix = measured_matrix(categorical(), weight=torch.zeros(4).double(), damping=0.3)
    torch.testing.assert_close(matrix, 0.3 * torch.eye(12, dtype=torch.float64))


def test_no_state_at_all_leaves_the_damping():
    def network(params):
        return {"logits": params["logits"].expand(0, 3)}

    params, u = {"logits": randn(3)}, randn(3, seed=1)
    product = fisher_vector_product(network, params, lambda _, tangent: tangent, damping=0.3)
    torch.testing.assert_close(product(u), 0.3 * u)


def test_one_state_needs_no_leading_axis():
    """F = diag(p) − ppᵀ of a single softmax in its own logits."""
    params = {"logits": randn(3)}
    product = fisher_vector_product(
        dict, params, lambda out, u: {"logits": categorical_fisher(out["logits"], u["logits"])}
    )
    p, u = params["logits"].softmax(-1), randn(3, seed=1)
    torch.testing.assert_close(product(u), (p.diag() - torch.outer(p, p)) @ u)


def test_products_carry_no_graph():
    """Else every iteration of conjugate gradient would keep the ones before it alive."""
    family = categorical()
    params = {name: tensor.clone().requires_grad_() for name, tensor in family.params.items()}
    product = fisher_vector_product(family.network, params, family.fisher)
    assert not product(randn(12)).requires_grad


def test_a_state_without_a_legal_action_has_no_curvature():
    mask = torch.tensor([[False, False], [True, True]])
    fisher = categorical_fisher(torch.zeros(2, 2), torch.tensor([[1.0, 2.0], [1.0, 3.0]]), mask)
    torch.testing.assert_close(fisher, torch.tensor([[0.0, 0.0], [-0.5, 0.5]]))


def test_illegal_garbage_has_no_curvature():
    logits, tangent = torch.tensor([0.0, math.nan, 0.0]), torch.tensor([1.0, math.inf, 3.0])
    fisher = categorical_fisher(logits, tangent, torch.tensor([True, False, True]))
    torch.testing.assert_close(fisher, torch.tensor([-0.5, 0.0, 0.5]))


def test_bernoulli_fisher_survives_certainty():
    fisher = bernoulli_fisher(torch.tensor([1e4, 0.0, -1e4]), torch.ones(3))
    assert fisher.tolist() == [0.0, 0.25, 0.0]


def test_gaussian_fisher_by_hand():
    """(u/σ², 2u) with σ = ½ and u = 3."""
    three = torch.full((1,), 3.0)
    mean, log_std = gaussian_fisher(torch.full((1,), 0.5).log(), three, three)
    assert (mean.item(), log_std.item()) == pytest.approx((12.0, 6.0))


# --- parameters as one vector -------------------------------------------------------------------


def test_flatten_keeps_the_order_and_unflatten_the_shapes():
    tree = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor(6.0)}
    vector = flatten(tree)
    assert vector.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert list(unflatten(vector, tree)) == ["b", "a"]
    torch.testing.assert_close(unflatten(vector, tree), tree)


# --- conjugate gradient -------------------------------------------------------------------------

A = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
B = torch.tensor([1.0, 2.0], dtype=torch.float64)
"""A x = b has the solution (1/11, 7/11)."""


def test_two_unknowns_take_two_iterations():
    result = conjugate_gradient(A.mv, B)
    assert result.solution.tolist() == pytest.approx([1 / 11, 7 / 11])
    assert (result.iterations, result.stopped) == (2, "converged")
    assert result.residual < 1e-10


def test_a_residual_of_zero_has_converged_whatever_the_tolerance():
    """A = 1: the first and only iteration ends at b itself."""
    result = conjugate_gradient(torch.clone, B, iterations=1, tolerance=0.0)
    assert torch.equal(result.solution, B)
    assert (result.residual, result.stopped) == (0.0, "converged")


def test_the_report_of_an_unfinished_solve():
    """One iteration along b: step bᵀb/bᵀAb = 5/20, hence x = b/4."""
    result = conjugate_gradient(A.mv, B, iterations=1)
    x = B / 4.0
    torch.testing.assert_close(result.solution, x)
    assert (result.iterations, result.stopped) == (1, "iterations")
    assert result.residual == pytest.approx(((B - A @ x).norm() / B.norm()).item())
    assert result.curvature == pytest.approx((x @ A @ x).item())
    assert result.min_curvature == pytest.approx(20.0 / 5.0)


def test_the_smallest_curvature_met_is_reported():
    """The two directions are b and (7, −6), conjugate to it since bᵀA = (6, 7)."""
    directions = (B, torch.tensor([7.0, -6.0], dtype=torch.float64))
    quotients = [((d @ A @ d) / (d @ d)).item() for d in directions]
    assert conjugate_gradient(A.mv, B).min_curvature == pytest.approx(min(quotients))


def test_a_generous_tolerance_stops_early():
    """After one iteration the relative residual is ½·√(1/5) = 0.22."""
    assert conjugate_gradient(A.mv, B, tolerance=0.3).iterations == 1
    assert conjugate_gradient(A.mv, B, tolerance=0.2).iterations == 2


@pytest.mark.parametrize("scale", [1e-3, 1e3])
@pytest.mark.parametrize("iterations", [1, 5])
def test_the_tolerance_is_relative_to_b(scale: float, iterations: int):
    result = conjugate_gradient(A.mv, scale * B, iterations=iterations, tolerance=0.3)
    assert (result.iterations, result.stopped) == (1, "converged")


def test_ten_iterations_unless_told_otherwise():
    """Twenty distinct eigenvalues would take twenty."""
    eigenvalues = torch.arange(1.0, 21.0, dtype=torch.float64)
    result = conjugate_gradient(lambda v: eigenvalues * v, torch.ones(20, dtype=torch.float64))
    assert (result.iterations, result.stopped) == (10, "iterations")


def test_the_last_allowed_iteration_may_converge():
    assert conjugate_gradient(A.mv, B, iterations=2).stopped == "converged"


def test_the_exact_inverse_as_preconditioner_needs_one_iteration():
    result = conjugate_gradient(A.mv, B, preconditioner=A.inverse().mv)
    assert result.solution.tolist() == pytest.approx([1 / 11, 7 / 11])
    assert (result.iterations, result.stopped) == (1, "converged")


def test_a_diagonal_preconditioner_changes_the_way_not_the_goal():
    result = conjugate_gradient(A.mv, B, preconditioner=lambda r: r / A.diag())
    assert result.solution.tolist() == pytest.approx([1 / 11, 7 / 11])


def test_nothing_to_solve():
    result = conjugate_gradient(A.mv, torch.zeros(2, dtype=torch.float64))
    assert result.solution.tolist() == [0.0, 0.0]
    assert (result.residual, result.curvature, result.iterations) == (0.0, 0.0, 0)
    assert (result.min_curvature, result.stopped) == (math.inf, "converged")


@pytest.mark.parametrize("last", [0.0, -1.0])
def test_non_positive_curvature_stops_with_the_last_good_solution(last: float):
    """A = diag(2, last), b = (1, 1): the second direction is flat or bends down."""
    diagonal = torch.tensor([2.0, last], dtype=torch.float64)
    result = conjugate_gradient(lambda v: diagonal * v, torch.ones(2, dtype=torch.float64))
    assert result.stopped == "non_positive_curvature"
    assert result.iterations == 1
    assert result.min_curvature <= 0.0
    step = 2.0 / (2.0 + last)  # bᵀb / bᵀAb
    assert result.solution.tolist() == pytest.approx([step, step])


def test_no_step_is_taken_along_a_direction_that_bends_down():
    result = conjugate_gradient(lambda v: -v, torch.ones(2))
    assert result.solution.tolist() == [0.0, 0.0]
    assert (result.iterations, result.min_curvature, result.residual) == (0, -1.0, 1.0)


def test_a_broken_product_stops_with_the_last_good_solution():
    products = iter([A @ B, math.nan * B])
    result = conjugate_gradient(lambda _: next(products), B)
    torch.testing.assert_close(result.solution, B / 4.0)
    assert (result.iterations, result.stopped) == (1, "non_finite")


# --- line search --------------------------------------------------------------------------------


def search(*outcomes: tuple[float, float], **options):
    """A line search whose trials turn out as told: (improvement, kl) each."""
    remaining = iter(outcomes)
    defaults = {"expected": 1.0, "max_kl": 0.01, "shrink": 0.5, "max_trials": len(outcomes)}
    return line_search(lambda _: next(remaining), **{**defaults, **options})


def test_a_good_full_step_is_taken_at_once():
    result = search((0.8, 0.009))
    assert (result.accepted, result.reason, result.iterations) == (True, "accepted", 1)
    assert (result.fraction, result.kl, result.improvement) == (1.0, 0.009, 0.8)
    assert (result.predicted, result.gain_ratio) == (1.0, 0.8)


def test_backtracking_by_hand():
    """Full step: KL too large; half: no gain; a quarter: not finite; an eighth: accepted."""
    result = search((0.9, 0.02), (-0.1, 0.005), (math.nan, 0.003), (0.1, 0.001), expected=2.0)
    assert [trial.verdict for trial in result.trials] == [
        "kl_above_bound",
        "too_little_improvement",
        "non_finite",
        "accepted",
    ]
    assert [trial.fraction for trial in result.trials] == [1.0, 0.5, 0.25, 0.125]
    assert (result.fraction, result.kl, result.iterations) == (0.125, 0.001, 4)
    assert result.predicted == 0.125 * 2.0
    assert result.gain_ratio == pytest.approx(0.1 / 0.25)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ((0.5, 0.0101), "kl_above_bound"),
        ((0.0, 0.001), "too_little_improvement"),
        ((0.0249, 0.001), "too_little_improvement"),
        ((math.inf, 0.001), "non_finite"),
        ((0.5, math.nan), "non_finite"),
    ],
)
def test_a_rejection_says_why_and_claims_no_kl(outcome: tuple[float, float], reason: str):
    """The last trial is at half the step; 0.1 · ½ · expected = 0.05 · 0.5 = 0.025 is required."""
    result = search((0.0, 1.0), outcome, expected=0.5)
    assert (result.accepted, result.reason, result.fraction) == (False, reason, 0.0)
    assert math.isnan(result.kl)
    assert math.isnan(result.improvement)
    assert math.isnan(result.gain_ratio)
    assert result.predicted == 0.25


def test_the_bounds_themselves_are_accepted():
    """KL = max_kl, and improvement = accept_ratio · fraction · expected."""
    assert search((0.25, 0.01), accept_ratio=0.25).accepted
    assert not search((0.25, math.nextafter(0.01, 1.0)), accept_ratio=0.25).accepted
    assert not search((math.nextafter(0.25, 0.0), 0.01), accept_ratio=0.25).accepted


def test_the_required_share_shrinks_with_the_step_and_no_faster():
    """At ¼ of the step ¼ of the full requirement holds; compounding would ask for 1/64 of it."""
    rejected = (0.0, 0.001)
    options = {"accept_ratio": 0.5, "expected": 1.0}
    assert search(rejected, rejected, (0.125, 0.001), **options).accepted
    assert not search(rejected, rejected, (0.124, 0.001), **options).accepted


def test_no_gain_is_never_enough():
    """Even where the linear model expects none."""
    assert not search((0.0, 0.001), expected=0.0).accepted
    assert not search((-0.1, 0.001), expected=-5.0).accepted
    assert search((0.1, 0.001), expected=0.0).accepted


def test_no_prediction_no_gain_ratio():
    assert math.isnan(search((0.1, 0.001), expected=0.0).gain_ratio)


def test_the_defaults_are_ten_trials_by_four_fifths():
    result = line_search(lambda _: (0.0, 0.0), expected=1.0, max_kl=0.01)
    assert [trial.fraction for trial in result.trials] == pytest.approx([0.8**i for i in range(10)])


def test_the_default_share_of_the_prediction_is_a_tenth():
    assert search((0.1, 0.001)).accepted
    assert not search((0.0999, 0.001)).accepted


# --- refusals -----------------------------------------------------------------------------------

two, three = torch.zeros(2), torch.zeros(3)
network = categorical()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: unflatten(three, {"w": two}), ShapeError, r"vector: expected \[2\].*got \[3\]"),
        (lambda: unflatten(two[None], {"w": two}), ShapeError, r"vector: expected \[2\]"),
        (lambda: categorical_fisher(two, three), ShapeError, r"tangent: expected shape \[2\]"),
        (lambda: categorical_fisher(two, two, three), ShapeError, r"mask: expected shape \[2\]"),
        (lambda: bernoulli_fisher(two, three), ShapeError, r"tangent: expected shape \[2\]"),
        (lambda: gaussian_fisher(two, three, two), ShapeError, r"mean_tangent: expected shape"),
        (lambda: gaussian_fisher(two, two, three), ShapeError, r"log_std_tangent: expected shape"),
        (lambda: measured_matrix(network, weight=three), ShapeError, r"weight: .*\[4\].*leading"),
        (lambda: conjugate_gradient(A.mv, A), ShapeError, r"b: expected one vector \[P\]"),
        (lambda: search((1.0, 0.0), shrink=1.0), InputError, r"shrink: .*between 0 and 1, got 1"),
        (lambda: search((1.0, 0.0), shrink=0.0), InputError, r"shrink: .*between 0 and 1, got 0"),
        (lambda: search((1.0, 0.0), max_trials=0), InputError, r"max_trials: .*at least 1, got 0"),
    ],
)
def test_a_refusal_names_the_argument(call: Callable, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()


def test_a_singular_matrix_does_not_make_a_giant_step() -> None:
    """diag(1, 0) with b = (1, 1): the flat direction ends the search; the step stays of size 1."""
    matrix = torch.diag(torch.tensor([1.0, 1e-20], dtype=torch.float64))
    result = conjugate_gradient(lambda v: matrix @ v, torch.ones(2, dtype=torch.float64))
    assert result.stopped == "non_positive_curvature"
    assert result.solution.norm().item() < 10.0
