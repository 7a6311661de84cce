"""Estimators on every small softmax: expectations and expected gradients by enumeration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from keel.functional import categorical_kl, k1, k3, kl_loss, kl_reward

close = torch.testing.assert_close

logits = st.integers(2, 6).flatmap(
    lambda size: arrays(np.float64, (3, size), elements=st.floats(-3.0, 3.0)).map(torch.from_numpy)
)
"""Of the policy, the reference and the policy that sampled, `[3, K]`."""


def kl_gradient(policy: Tensor, reference: Tensor) -> Tensor:
    leaf = policy.clone().requires_grad_()
    return torch.autograd.grad(categorical_kl(leaf, reference), leaf)[0]


def expected_gradient(term: Tensor, sampler: Tensor, leaf: Tensor) -> Tensor:
    """∇ Σ_a sampler(a)·term(a), the sampler held fixed."""
    return torch.autograd.grad((sampler.softmax(-1).detach() * term).sum(), leaf)[0]


@given(logits)
def test_k1_and_k3_are_unbiased(tables: Tensor):
    p, reference, _ = tables.log_softmax(-1)
    kl = categorical_kl(p, reference)
    close((p.exp() * k1(p, reference)).sum(), kl, rtol=1e-9, atol=1e-12)
    close((p.exp() * k3(p, reference)).sum(), kl, rtol=1e-9, atol=1e-12)


@given(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4))
def test_k3_is_never_negative(log_prob: float, reference: float):
    value = k3(torch.tensor(log_prob), torch.tensor(reference))
    assert 0.0 <= value.item() < float("inf")


@pytest.mark.parametrize("form", ["k2", "weighted_k2", "ratio_k3", "straight_through"])
@given(tables=logits)
def test_on_policy_the_right_forms_descend_kl(form: str, tables: Tensor):
    policy, reference = tables[0].clone().requires_grad_(), tables[1]
    term = kl_loss(form, policy.log_softmax(-1), reference.log_softmax(-1))
    got = expected_gradient(term, policy, policy)
    close(got, kl_gradient(tables[0], reference), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("form", ["weighted_k2", "ratio_k3", "straight_through"])
@given(tables=logits)
def test_off_policy_the_right_forms_descend_kl(form: str, tables: Tensor):
    policy, reference, sampler = tables[0].clone().requires_grad_(), tables[1], tables[2]
    log_prob = policy.log_softmax(-1)
    log_ratio = log_prob - sampler.log_softmax(-1)
    term = kl_loss(form, log_prob, reference.log_softmax(-1), log_ratio)
    got = expected_gradient(term, sampler, policy)
    close(got, kl_gradient(tables[0], reference), rtol=1e-8, atol=1e-10)


@given(logits)
def test_k1_as_a_penalty_descends_kl(tables: Tensor):
    """E[∇log π · Δ] = ∇KL(π‖π_ref)."""
    policy, reference = tables[0].clone().requires_grad_(), tables[1]
    log_prob = policy.log_softmax(-1)
    penalty = kl_reward("k1", log_prob, reference.log_softmax(-1))
    got = expected_gradient(log_prob * penalty, policy, policy)
    close(got, kl_gradient(tables[0], reference), rtol=1e-8, atol=1e-10)
