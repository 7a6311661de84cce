"""The natural gradient: Fisher-vector products, conjugate gradient, an honest line search.

Fisher matrices of single distributions stand in `keel.functional.divergence`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from keel.errors import InputError, ShapeError, expect_same

Tree = Mapping[str, Tensor]


def flatten(tree: Tree) -> Tensor:
    """Concatenate all tensors of `tree`, in its order, into one vector `[P]`.

    Args:
        tree: tensors of any shape, by name.
    """
    return torch.cat([tensor.reshape(-1) for tensor in tree.values()])


def unflatten(vector: Tensor, like: Tree) -> dict[str, Tensor]:
    """Split a vector into tensors with the names and shapes of `like`: the inverse of `flatten`.

    Args:
        vector: `[P]`.
        like: tensors by name, P numbers in all.
    """
    sizes = [tensor.numel() for tensor in like.values()]
    if vector.ndim != 1 or vector.shape[0] != sum(sizes):
        raise ShapeError(
            f"vector: expected [{sum(sizes)}] (the parameters), got {list(vector.shape)}"
        )
    parts = torch.split(vector, sizes)
    return {
        name: part.reshape(tensor.shape)
        for (name, tensor), part in zip(like.items(), parts, strict=True)
    }


class Linear(NamedTuple):
    """The first-order model of a function at a point."""

    outputs: dict[str, Tensor]
    """its value there, `[*lead, K]` each"""
    push: Callable[[Tensor], dict[str, Tensor]]
    """J v: a direction of the parameters, as one vector, to the tangents of the outputs"""
    pull: Callable[[dict[str, Tensor]], Tensor]
    """Jᵀ u: back again"""


def linearize(function: Callable[[Tree], Tree], params: Tree) -> Linear:
    """Linearize a function at `params`: J by forward mode, Jᵀ by a reverse pass built only once.

    Args:
        function: maps parameters to outputs `[*lead, K]`, both by name.
        params: the point, tensors by name.
    """
    params = {name: tensor.detach() for name, tensor in params.items()}
    primal, transpose = torch.func.vjp(function, params)[:2]

    def push(vector: Tensor) -> dict[str, Tensor]:
        tangent: dict[str, Tensor] = torch.func.jvp(
            function, (params,), (unflatten(vector, params),)
        )[1]
        return tangent

    def pull(cotangent: dict[str, Tensor]) -> Tensor:
        return flatten(transpose(cotangent)[0])

    return Linear({name: value.detach() for name, value in primal.items()}, push, pull)


def fisher_vector_product(
    function: Callable[[Tree], Tree] | Linear,
    params: Tree,
    fisher: Callable[[dict[str, Tensor], dict[str, Tensor]], Tree],
    *,
    weight: Tensor | None = None,
    damping: float = 0.0,
) -> Callable[[Tensor], Tensor]:
    """Return v ↦ (Jᵀ F J + damping·I) v, the curvature of the mean KL(old‖new) at `params`.

    J v is one forward-mode pass, Jᵀ one reverse pass: no second derivative, no graph of the
    gradient's graph (Martens 2010; Schraudolph 2002).

    Args:
        function: maps parameters to distribution parameters `[*lead, K]`; or its `Linear` model at
            `params`, where something faster than torch has made it.
        params: the point, tensors by name; vectors are P numbers in this order.
        fisher: `fisher(outputs, tangent)` multiplies by the distribution's own Fisher matrix F.
        damping: multiple of the identity that is added.
        weight: `[*lead]`, 0 for rows that do not count; the mean is over the rest.
    """
    linear = function if isinstance(function, Linear) else linearize(function, params)
    outputs = linear.outputs
    lead = tuple(next(iter(outputs.values())).shape[:-1])
    expect_same("the leading axes of the outputs", lead, weight=weight)
    share: Tensor | float
    if weight is None:
        share = 1.0 / max(1, math.prod(lead))
    else:
        share = (weight / weight.sum().clamp(min=1e-12)).unsqueeze(-1)

    def product(vector: Tensor) -> Tensor:
        curved = fisher(outputs, linear.push(vector))
        pulled = linear.pull({name: value * share for name, value in curved.items()})
        return pulled + damping * vector

    return product


class ConjugateGradient(NamedTuple):
    """An approximate solution of A x = b, and how far it can be trusted."""

    solution: Tensor
    residual: float
    """‖b − A x‖ / ‖b‖"""
    curvature: float
    """xᵀ A x: what the step length is computed from"""
    min_curvature: float
    """the smallest dᵀAd / dᵀd met on the way; ≤ 0 means A is not positive definite"""
    iterations: int
    stopped: Literal["converged", "iterations", "non_positive_curvature", "non_finite"]


def conjugate_gradient(
    matvec: Callable[[Tensor], Tensor],
    b: Tensor,
    *,
    iterations: int = 10,
    tolerance: float = 1e-10,
    preconditioner: Callable[[Tensor], Tensor] | None = None,
) -> ConjugateGradient:
    """Solve A x = b for symmetric positive definite A (Hestenes and Stiefel 1952).

    Stops at ‖residual‖ ≤ `tolerance`·‖b‖, and *before* a direction of non-positive or non-finite
    curvature, with the last good x.

    Args:
        matvec: v ↦ A v, both `[P]`.
        b: `[P]`.
        iterations: largest number of products with A.
        tolerance: relative residual at which to stop.
        preconditioner: r ↦ M⁻¹ r, both `[P]`; None for the identity.
    """
    if b.ndim != 1:
        raise ShapeError(f"b: expected one vector [P], got {list(b.shape)}")
    x, residual = torch.zeros_like(b), b.clone()
    z = residual if preconditioner is None else preconditioner(residual)
    direction = z.clone()
    inner, scale = residual @ z, b.norm().item()
    min_curvature, max_curvature = math.inf, 0.0
    stopped: Literal["converged", "iterations", "non_positive_curvature", "non_finite"]
    stopped = "iterations"
    for done in range(iterations + 1):
        if residual.norm().item() <= tolerance * scale:
            stopped = "converged"
            break
        if done == iterations:
            break
        image = matvec(direction)
        curvature = (direction @ image).item()
        if not math.isfinite(curvature):
            stopped = "non_finite"
            break
        bend = curvature / (direction @ direction).item()
        min_curvature, max_curvature = min(min_curvature, bend), max(max_curvature, abs(bend))
        # Below rounding the sign means nothing, and dividing by it would make a step of 1e16.
        if bend <= torch.finfo(b.dtype).eps * max_curvature:
            stopped = "non_positive_curvature"
            break
        step = inner / curvature
        x = x + step * direction
        residual = residual - step * image
        z = residual if preconditioner is None else preconditioner(residual)
        inner, previous = residual @ z, inner
        direction = z + (inner / previous) * direction
    return ConjugateGradient(
        solution=x,
        residual=residual.norm().item() / scale if scale > 0 else 0.0,
        curvature=(x @ (b - residual)).item(),  # A x = b − residual, without another product
        min_curvature=min_curvature,
        iterations=done,
        stopped=stopped,
    )


class Trial(NamedTuple):
    """A step length of a line search, and its measurements."""

    fraction: float
    improvement: float
    kl: float
    verdict: Literal["accepted", "kl_above_bound", "too_little_improvement", "non_finite"]


class LineSearch(NamedTuple):
    """The outcome of a line search; a rejection is a rejection, never a KL of 0."""

    accepted: bool
    fraction: float
    """Accepted share of the full step; 0 when rejected."""
    kl: float
    """KL of the accepted step; NaN when rejected."""
    improvement: float
    """actual, of the accepted step; NaN when rejected"""
    predicted: float
    """first-order, at the fraction of the last trial"""
    reason: str
    """`accepted`, or why the last and smallest trial failed"""
    trials: tuple[Trial, ...]

    @property
    def iterations(self) -> int:
        """Number of step lengths that were evaluated."""
        return len(self.trials)

    @property
    def gain_ratio(self) -> float:
        """Actual / predicted improvement: near 1 while the linear model holds."""
        return self.improvement / self.predicted if self.predicted else math.nan


def line_search(
    evaluate: Callable[[float], tuple[float, float]],
    *,
    expected: float,
    max_kl: float,
    shrink: float = 0.8,
    max_trials: int = 10,
    accept_ratio: float = 0.1,
) -> LineSearch:
    """Backtrack from the full step until improvement *and* KL hold (Schulman et al. 2015, App. C).

    A trial is accepted when KL ≤ `max_kl` and improvement > 0 and improvement ≥
    `accept_ratio`·fraction·`expected`; the ratio is not compounded from trial to trial.

    Args:
        evaluate: maps a fraction to (improvement of the objective, KL(old‖new)) at old +
            fraction·step; it must measure the objective that gave the direction, entropy included.
        expected: first-order improvement of the full step, gradient·step.
        max_kl: largest KL that is accepted.
        shrink: factor from one trial to the next, between 0 and 1.
        max_trials: number of step lengths to try, at least 1.
        accept_ratio: share of the first-order improvement that is required.
    """
    if not 0.0 < shrink < 1.0:
        raise InputError(f"shrink: expected a number between 0 and 1, got {shrink}")
    if max_trials < 1:
        raise InputError(f"max_trials: expected at least 1, got {max_trials}")
    trials: list[Trial] = []
    for attempt in range(max_trials):
        fraction = shrink**attempt
        improvement, kl = evaluate(fraction)
        trials.append(
            Trial(
                fraction,
                improvement,
                kl,
                _judge(improvement, kl, accept_ratio * fraction * expected, max_kl),
            )
        )
        if trials[-1].verdict == "accepted":
            return LineSearch(
                True, fraction, kl, improvement, fraction * expected, "accepted", tuple(trials)
            )
    last = trials[-1]
    return LineSearch(
        False, 0.0, math.nan, math.nan, last.fraction * expected, last.verdict, tuple(trials)
    )


def _judge(
    improvement: float, kl: float, required: float, max_kl: float
) -> Literal["accepted", "kl_above_bound", "too_little_improvement", "non_finite"]:
    if not (math.isfinite(improvement) and math.isfinite(kl)):
        return "non_finite"
    if kl > max_kl:
        return "kl_above_bound"
    return "accepted" if improvement > 0.0 and improvement >= required else "too_little_improvement"
