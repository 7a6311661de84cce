"""Fisher matrices are symmetric and never bend down; conjugate gradient solves what it is given."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keel.functional import (
    bernoulli_fisher,
    categorical_fisher,
    conjugate_gradient,
    flatten,
    gaussian_fisher,
    line_search,
    unflatten,
)

seeds, sizes = st.integers(0, 2**31), st.integers(1, 6)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def masked_fisher(z: Tensor, u: Tensor) -> Tensor:
    return categorical_fisher(z, u, z >= z.median())


def gaussian_mean_fisher(z: Tensor, u: Tensor) -> Tensor:
    return gaussian_fisher(z, u, u)[0]


FISHERS = [categorical_fisher, masked_fisher, bernoulli_fisher, gaussian_mean_fisher]


@pytest.mark.parametrize("fisher", FISHERS)
@given(seed=seeds, size=sizes, scale=st.floats(0.01, 30.0))
def test_a_fisher_matrix_is_symmetric_and_positive(fisher, seed: int, size: int, scale: float):
    z, u, v = randn(seed, 3, size)
    curved_u, curved_v = fisher(scale * z, u), fisher(scale * z, v)
    torch.testing.assert_close(v @ curved_u, u @ curved_v)
    assert (u @ curved_u).item() >= -1e-13


@given(seeds, st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4))
def test_unflatten_inverts_flatten(seed: int, shapes: list[list[int]]):
    tree = {str(i): randn(seed + i, *shape) for i, shape in enumerate(shapes)}
    torch.testing.assert_close(unflatten(flatten(tree), tree), tree)


@given(seeds, st.integers(1, 8))
def test_conjugate_gradient_solves_every_positive_definite_system(seed: int, size: int):
    root, b = randn(seed, size, size), randn(seed + 1, size)
    matrix = root @ root.T + torch.eye(size, dtype=torch.float64)
    result = conjugate_gradient(matrix.mv, b, iterations=2 * size, tolerance=1e-12)
    exact = torch.linalg.solve(matrix, b)
    eigenvalues = torch.linalg.eigvalsh(matrix)
    torch.testing.assert_close(result.solution, exact, rtol=1e-6, atol=1e-9)
    assert result.stopped == "converged"
    assert result.curvature == pytest.approx((exact @ matrix @ exact).item())
    assert result.min_curvature >= eigenvalues[0].item() * (1.0 - 1e-9)


@given(seeds, st.integers(2, 8), st.integers(0, 8))
def test_the_report_is_that_of_the_solution_it_returns(seed: int, size: int, iterations: int):
    root, b = randn(seed, size, size), randn(seed + 1, size)
    matrix = root @ root.T + torch.eye(size, dtype=torch.float64)
    scale = 1.0 + matrix.diag()
    result = conjugate_gradient(
        matrix.mv, b, iterations=iterations, preconditioner=lambda r: r / scale
    )
    x = result.solution
    residual = ((b - matrix @ x).norm() / b.norm()).item()
    assert result.iterations <= iterations
    assert result.residual == pytest.approx(residual, rel=1e-6, abs=1e-9)
    assert result.curvature == pytest.approx((x @ matrix @ x).item(), rel=1e-6, abs=1e-9)


@given(
    st.lists(st.tuples(st.floats(-2.0, 2.0), st.floats(0.0, 0.02)), min_size=1, max_size=6),
    st.floats(0.1, 0.9),
    st.floats(0.0, 1.0),
)
def test_a_line_search_takes_the_first_step_that_holds(outcomes, shrink: float, ratio: float):
    remaining = iter(outcomes)
    result = line_search(
        lambda _: next(remaining),
        expected=1.0,
        max_kl=0.01,
        shrink=shrink,
        max_trials=len(outcomes),
        accept_ratio=ratio,
    )
    holds = [
        kl <= 0.01 and gain > 0.0 and gain >= ratio * shrink**i
        for i, (gain, kl) in enumerate(outcomes)
    ]
    assert result.accepted == any(holds)
    assert result.iterations == (holds.index(True) + 1 if any(holds) else len(outcomes))
