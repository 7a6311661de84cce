"""The gradient certificate: what each KL estimator really descends, by enumeration.

For small softmax policies every expectation is a finite sum, so the expected gradient of an
estimator is known exactly, without sampling. It is compared with the gradient of KL(π‖π_ref), and
with those of other objectives until one matches: the certificate's verdicts are computed, not
quoted.

* **on-policy**: actions come from π itself.
* **off-policy**: actions come from π_old ≠ π, as in the second and later epochs of PPO. In the loss
  the estimator sees the current π; in the reward it was computed once, with π_old, and its gradient
  comes through the importance ratio π/π_old.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from keel.errors import EstimatorWarning
from keel.functional.divergence import categorical_kl, total_variation
from keel.functional.estimators import (
    ESTIMATORS,
    EXACT,
    LOSS_FORMS,
    Placement,
    Sampling,
    kl_estimate,
    kl_loss,
)

TOLERANCE = 1e-9


class Certificate(NamedTuple):
    """The objective that one estimator descends in one place under one way of sampling."""

    estimator: str
    placement: Placement
    sampling: Sampling
    descends: str
    """the objective whose gradient it has"""
    cosine: float
    """to ∇KL(π‖π_ref): the worst over the policies tried; 0 when the gradient vanishes"""
    gradient_bias: float
    """‖E[gradient] − ∇KL‖ / ‖∇KL‖: the worst over the policies tried"""
    value_bias: float
    """|E[value] − KL(π‖π_ref)| / KL: the worst over the policies tried"""
    right: bool
    """its gradient is that of KL(π‖π_ref)"""


class _Case(NamedTuple):
    """Logits of the current, the reference and the sampling policy, `[K]` each, in float64."""

    policy: Tensor
    reference: Tensor
    sampler: Tensor


def certificate(*, actions: int = 6, policies: int = 16, seed: int = 0) -> list[Certificate]:
    """Certify every estimator in reward and loss, on- and off-policy, on random softmaxes.

    Args:
        actions: number of actions K of each softmax, over which expectations are enumerated.
        policies: number of random policies on which every estimator is tried.
        seed: seed of the random policies.
    """
    generator = torch.Generator().manual_seed(seed)
    cases: dict[Sampling, list[_Case]] = {
        "on-policy": [_draw(actions, generator, drift=0.0) for _ in range(policies)],
        "off-policy": [_draw(actions, generator, drift=0.5) for _ in range(policies)],
    }
    names: dict[Placement, tuple[str, ...]] = {
        "reward": (*ESTIMATORS, EXACT),
        "loss": (*ESTIMATORS, *LOSS_FORMS, EXACT),
    }
    return [
        _certify(name, placement, sampling, cases[sampling])
        for placement in names
        for sampling in cases
        for name in names[placement]
    ]


def _draw(actions: int, generator: torch.Generator, drift: float) -> _Case:
    policy, reference, noise = torch.randn(3, actions, generator=generator, dtype=torch.float64)
    return _Case(policy, reference, sampler=policy + drift * noise)


def _certify(
    name: str, placement: Placement, sampling: Sampling, cases: list[_Case]
) -> Certificate:
    pairs = [(_expected_gradient(name, placement, case), case) for case in cases]
    truths = [_gradient(OBJECTIVES["KL(π‖ref)"], case) for case in cases]
    cosines = [_cosine(gradient, truth) for (gradient, _), truth in zip(pairs, truths, strict=True)]
    biases = [
        ((gradient - truth).norm() / truth.norm()).item()
        for (gradient, _), truth in zip(pairs, truths, strict=True)
    ]
    return Certificate(
        estimator=name,
        placement=placement,
        sampling=sampling,
        descends=_identify(pairs),
        cosine=min(cosines),
        gradient_bias=max(biases),
        value_bias=max(_value_bias(name, placement, case) for case in cases),
        right=max(biases) < TOLERANCE,
    )


def _expected_gradient(name: str, placement: Placement, case: _Case) -> Tensor:
    """Return ∇_θ of the expectation over actions of the sampler, which itself is held fixed."""

    def expectation(logits: Tensor) -> Tensor:
        log_prob, ref, old = _log_probs(case._replace(policy=logits))
        per_action = _term(name, placement, log_prob, ref, old)
        if placement == "reward":
            # The score-function gradient of a detached penalty, through the importance ratio.
            per_action = (log_prob - old).exp() * per_action.detach()
        return (old.exp() * per_action).sum()

    return _derivative(expectation, case.policy)


def _value_bias(name: str, placement: Placement, case: _Case) -> float:
    log_prob, ref, old = _log_probs(case)
    value = (old.exp() * _term(name, placement, log_prob, ref, old)).sum()
    kl = categorical_kl(case.policy, case.reference)
    return ((value - kl).abs() / kl).item()


def _term(name: str, placement: Placement, log_prob: Tensor, ref: Tensor, old: Tensor) -> Tensor:
    """The estimator's value at every action, `[K]`."""
    source = old if placement == "reward" else log_prob
    if name == EXACT:
        return categorical_kl(source, ref).expand_as(source)
    if placement == "reward":
        return kl_estimate(name, source, ref)
    with warnings.catch_warnings():  # wrong combinations are the subject here
        warnings.simplefilter("ignore", EstimatorWarning)
        return kl_loss(name, source, ref, log_prob - old)


def _log_probs(case: _Case) -> tuple[Tensor, Tensor, Tensor]:
    """log π (differentiable), log π_ref and log π_old (fixed)."""
    return (
        case.policy.log_softmax(-1),
        case.reference.log_softmax(-1).detach(),
        case.sampler.log_softmax(-1).detach(),
    )


def _reverse(case: _Case) -> Tensor:
    return categorical_kl(case.policy, case.reference)


def _forward(case: _Case) -> Tensor:
    return categorical_kl(case.reference, case.policy)


def _mean_k2(case: _Case) -> Tensor:
    log_prob, ref, _ = _log_probs(case)
    return (log_prob.exp() * 0.5 * (log_prob - ref) ** 2).sum()


def _under_sampler(name: str) -> Callable[[_Case], Tensor]:
    def objective(case: _Case) -> Tensor:
        log_prob, ref, old = _log_probs(case)
        return (old.exp() * kl_estimate(name, log_prob, ref)).sum()

    return objective


def _stale(name: str) -> Callable[[_Case], Tensor]:
    def objective(case: _Case) -> Tensor:
        log_prob, ref, old = _log_probs(case)
        return (log_prob.exp() * kl_estimate(name, old, ref)).sum()

    return objective


OBJECTIVES: Mapping[str, Callable[[_Case], Tensor]] = {
    "KL(π‖ref)": _reverse,
    "KL(ref‖π)": _forward,
    "2·TV(π, ref)": lambda case: 2.0 * total_variation(case.policy, case.reference),
    "KL(π‖ref) − KL(ref‖π)": lambda case: _reverse(case) - _forward(case),
    "E_π[k2] − KL(π‖ref)": lambda case: _mean_k2(case) - _reverse(case),
    "−KL(old‖π)": lambda case: -categorical_kl(case.sampler, case.policy),
    "KL(π‖ref) − KL(π‖old)": lambda case: (
        _reverse(case) - categorical_kl(case.policy, case.sampler.detach())
    ),
    **{f"E_old[{name}(π)]": _under_sampler(name) for name in ("k2", "k3", "abs")},
    **{f"E_π[{name}(old)]": _stale(name) for name in ("k2", "k3", "abs")},
}
"""Candidates, in the order in which they are tried; each is a function of π's logits."""


def _identify(pairs: list[tuple[Tensor, _Case]]) -> str:
    """Return the first objective that has the measured gradient on every policy."""
    if all(gradient.norm().item() < TOLERANCE for gradient, _ in pairs):
        return "nothing (zero gradient)"
    for label, objective in OBJECTIVES.items():
        candidates = [_gradient(objective, case) for _, case in pairs]
        if all(
            (gradient - candidate).norm().item() < TOLERANCE * (1.0 + candidate.norm().item())
            for (gradient, _), candidate in zip(pairs, candidates, strict=True)
        ):
            return label
    return "no known objective"


def _gradient(objective: Callable[[_Case], Tensor], case: _Case) -> Tensor:
    fixed = case._replace(sampler=case.sampler.detach())
    return _derivative(lambda logits: objective(fixed._replace(policy=logits)), case.policy)


def _derivative(function: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    leaf = logits.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf), leaf)
    return gradient


def _cosine(a: Tensor, b: Tensor) -> float:
    if a.norm().item() < TOLERANCE:
        return 0.0
    return torch.nn.functional.cosine_similarity(a, b, dim=0).item()
