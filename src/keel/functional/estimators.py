"""KL from samples: k1, k2, k3, |Δ|, and the forms that are right in a reward or in a loss.

Δ = log π(a) − log π_ref(a) for actions a sampled from π (Schulman 2020, "Approximating KL
divergence"). As *values* k1 and k3 are unbiased estimates of KL(π‖π_ref), k3 on the condition that
π can reach all that π_ref can (else it misses the mass of π_ref it never samples). As *terms of a
loss* most of them do not have its gradient; `keel.functional.certificate` proves which do:

* in the reward, k1;
* in the loss, `weighted_k2`, `ratio_k3`, `straight_through`, or the exact KL (`full`); on-policy,
  also plain `k2`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from keel.errors import EstimatorWarning, InputError, check_choice, expect_same
from keel.functional.divergence import exp_minus_linear

Placement = Literal["reward", "loss"]
Sampling = Literal["on-policy", "off-policy"]

ALIASES = {"kl": "k1", "mse": "k2"}
"""verl's names."""

ESTIMATORS = ("k1", "k2", "k3", "abs")
LOW_VAR_KL = "low_var_kl"
"""k3 with verl's clamps, an estimator of its own: beyond them it has neither k3's value nor its
gradient."""
LOSS_FORMS = ("weighted_k2", "ratio_k3", "straight_through")
EXACT = "full"
RIGHT: Mapping[tuple[Placement, Sampling], tuple[str, ...]] = {
    ("reward", "on-policy"): ("k1",),
    ("reward", "off-policy"): (),
    ("loss", "on-policy"): ("k2", *LOSS_FORMS, EXACT),
    ("loss", "off-policy"): (*LOSS_FORMS, EXACT),
}
"""Estimators that descend KL(π‖π_ref), exactly these; a test holds it against the certificate."""

MAX_EXPONENT = 20.0
VERL_MAX_LOG_RATIO, VERL_MAX_KL = 20.0, 10.0
"""Clamps of verl's `low_var_kl`, on the log-ratio and on the result."""


def canonical(name: str) -> str:
    """Return the canonical name of an estimator: verl's names are translated, others checked.

    Args:
        name: k1, k2, k3, abs, low_var_kl, a loss form, `full`, or one of `ALIASES`.
    """
    name = ALIASES.get(name, name)
    return check_choice("estimator", name, (*ESTIMATORS, LOW_VAR_KL, *LOSS_FORMS, EXACT))


def k1(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return Δ = log π − log π_ref: unbiased, high variance, negative on half of the samples.

    Args:
        log_prob: log π of the actions, `[*lead]`.
        ref_log_prob: log π_ref of the same actions, `[*lead]`.
    """
    expect_same("log_prob", tuple(log_prob.shape), ref_log_prob=ref_log_prob)
    return log_prob - ref_log_prob


def absolute(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return |Δ|, which is not a KL; in a loss it descends twice the total variation.

    Args:
        log_prob: log π of the actions, `[*lead]`.
        ref_log_prob: log π_ref of the same actions, `[*lead]`.
    """
    return k1(log_prob, ref_log_prob).abs()


def k2(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return ½Δ²: biased as a value, but its on-policy gradient is exactly that of KL(π‖π_ref).

    Args:
        log_prob: log π of the actions, `[*lead]`.
        ref_log_prob: log π_ref of the same actions, `[*lead]`.
    """
    return 0.5 * k1(log_prob, ref_log_prob) ** 2


def k3(log_prob: Tensor, ref_log_prob: Tensor, *, max_exponent: float = MAX_EXPONENT) -> Tensor:
    """Return e^(−Δ) − 1 + Δ: never negative, low variance near 0.

    Unbiased where π reaches all of π_ref.

    Beyond `max_exponent` it goes on along its tangent: the exponent is bounded *before* exp, so no
    inf·0 in the backward pass, and the gradient lives on where drift is worst (an output clamp,
    as elsewhere, kills it there).

    Args:
        log_prob: log π of the actions, `[*lead]`.
        ref_log_prob: log π_ref of the same actions, `[*lead]`.
        max_exponent: bound on −Δ before it is exponentiated.
    """
    x = -k1(log_prob, ref_log_prob)
    bounded = x.clamp(max=max_exponent)
    slope = torch.expm1(bounded.detach())
    return exp_minus_linear(bounded) + (x - bounded) * slope


def low_var_kl(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return k3 as verl computes it (`core_algos.kl_penalty`): clamp(e^x − x − 1, ±10).

    x = log π_ref − log π is clamped to ±20 first. Beyond the clamp of the result, at x > 2.61 and
    x < −11, the value is 10 and the gradient 0; `k3` keeps both.

    Args:
        log_prob: log π of the actions, `[*lead]`.
        ref_log_prob: log π_ref of the same actions, `[*lead]`.

    Examples:
        >>> import torch
        >>> low_var_kl(torch.tensor(-5.0), torch.tensor(-1.0)).item()
        10.0
    """
    x = -k1(log_prob, ref_log_prob)
    bounded = x.clamp(-VERL_MAX_LOG_RATIO, VERL_MAX_LOG_RATIO)
    return exp_minus_linear(bounded).clamp(-VERL_MAX_KL, VERL_MAX_KL)


def kl_estimate(name: str, log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return the sample estimate `name` of KL(π‖π_ref), per element.

    Args:
        name: k1, k2, k3, abs, low_var_kl, or verl's name of one of them.
        log_prob: log π of the actions, `[*lead]`.
        ref_log_prob: log π_ref of the same actions, `[*lead]`.
    """
    name = canonical(name)
    if name in (EXACT, *LOSS_FORMS):
        raise InputError(
            f"estimator: {name!r} is no sample estimate (those are {', '.join(ESTIMATORS)}); "
            "the exact KL is in keel.functional.divergence and vocabulary"
        )
    estimators = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute, LOW_VAR_KL: low_var_kl}
    return estimators[name](log_prob, ref_log_prob)


def kl_reward(name: str, log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return the penalty to subtract from a reward, detached; anything but k1 warns.

    With `log_prob` of the policy that sampled, E[∇log π · Δ] = ∇KL(π‖π_ref): k1 is right here.

    Args:
        name: sample estimate, as in `kl_estimate`.
        log_prob: log π of the actions, `[*lead]`.
        ref_log_prob: log π_ref of the same actions, `[*lead]`.

    Examples:
        >>> import torch
        >>> penalty = kl_reward("k1", torch.tensor(0.6).log(), torch.tensor(0.3).log())
        >>> round((1.0 - 0.1 * penalty).item(), 3)
        0.931
    """
    warn_unless_right(name, "reward", "on-policy")
    return kl_estimate(name, log_prob, ref_log_prob).detach()


def kl_loss(
    name: str, log_prob: Tensor, ref_log_prob: Tensor, log_ratio: Tensor | None = None
) -> Tensor:
    """Return the term to add to a loss, per element; a form with another gradient than KL's warns.

    The right forms:

    * `weighted_k2`: sg(r)·½Δ².
    * `ratio_k3`: r·k3, exact because E_old[r·k3] = E_π[k3] for every π.
    * `straight_through`: the value of k3 with the gradient of `weighted_k2`. Sample by sample that
      is the gradient r·Δ·∇log π of `ratio_k3` too, but it needs no gradient through the ratio.

    Args:
        name: loss form or sample estimate.
        log_prob: log π of the actions, `[*lead]`.
        ref_log_prob: log π_ref of the same actions, `[*lead]`.
        log_ratio: log π − log π_old of the policy that sampled, `[*lead]` (from `policy_ratio`);
            None means on-policy.
    """
    warn_unless_right(name, "loss", "on-policy" if log_ratio is None else "off-policy")
    name = canonical(name)
    if name not in LOSS_FORMS:
        return kl_estimate(name, log_prob, ref_log_prob)
    expect_same("log_prob", tuple(log_prob.shape), log_ratio=log_ratio)
    ratio = (log_prob - log_prob.detach() if log_ratio is None else log_ratio).exp()
    if name == "ratio_k3":
        return ratio * k3(log_prob, ref_log_prob)
    gradient = ratio.detach() * k2(log_prob, ref_log_prob)
    if name == "weighted_k2":
        return gradient
    value = ratio * k3(log_prob, ref_log_prob)
    return value.detach() + gradient - gradient.detach()


def warn_unless_right(name: str, placement: Placement, sampling: Sampling) -> None:
    """Emit an `EstimatorWarning` that names the right estimators for this place.

    Args:
        name: estimator or loss form.
        placement: `reward` or `loss`.
        sampling: `on-policy` or `off-policy`.
    """
    right = RIGHT[placement, sampling]
    if canonical(name) not in right:
        remedy = f"use {' or '.join(right)}" if right else "penalise with the policy that samples"
        warnings.warn(
            f"{name!r} in the {placement} does not descend KL(π‖π_ref) {sampling}; {remedy} "
            "(see `keel explain estimators`)",
            EstimatorWarning,
            stacklevel=3,
        )
