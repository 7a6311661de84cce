"""Laws of the public functions that no other file of this folder covers."""

from __future__ import annotations

import math

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, Normal

from keel.functional import (
    categorical_fisher,
    categorical_kl,
    certificate,
    distribution_kl,
    fisher_vector_product,
    gaussian_kl,
    kl_estimate,
    kl_terms,
    performance_profile,
    reinforce_pp,
    squashed_gaussian_kl,
    stratified_bootstrap,
    value,
)
from keel.functional.estimators import RIGHT

seeds = st.integers(0, 2**31 - 1)


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@settings(max_examples=10)
@given(seeds, st.integers(3, 8))
def test_the_certificate_does_not_depend_on_the_policies_drawn(seed: int, actions: int) -> None:
    rows = certificate(actions=actions, policies=3, seed=seed)
    for place, names in RIGHT.items():
        found = {r.estimator for r in rows if r.right and (r.placement, r.sampling) == place}
        assert found == set(names)


@given(seeds, st.integers(2, 6))
def test_kl_terms_are_never_negative_and_sum_to_the_kl(seed: int, outcomes: int) -> None:
    p, q = 5 * normal(seed, 2, outcomes)
    terms = kl_terms(p.log_softmax(-1), q.log_softmax(-1))
    assert (terms >= 0).all()
    torch.testing.assert_close(terms.sum(), categorical_kl(p, q))


@given(seeds)
def test_a_distribution_with_a_closed_form_is_exact_and_equal_to_it(seed: int) -> None:
    p, q = normal(seed, 2, 4, 3)
    found = distribution_kl(Categorical(logits=p), Categorical(logits=q), torch.zeros(4))
    assert found.is_exact
    torch.testing.assert_close(found.kl, categorical_kl(p, q))


@given(seeds)
def test_an_estimated_divergence_is_never_negative(seed: int) -> None:
    """A pair for which torch knows no closed form: a mixture against itself, moved."""
    from torch.distributions import MixtureSameFamily

    def mixture(shift: float) -> MixtureSameFamily:
        weights = Categorical(logits=torch.zeros(2, dtype=torch.float64))
        means = torch.tensor([-1.0, 1.0], dtype=torch.float64) + shift
        return MixtureSameFamily(weights, Normal(means, torch.ones_like(means)))

    found = distribution_kl(mixture(0.0), mixture(0.3), normal(seed, 16))
    assert not found.is_exact
    assert (found.kl >= 0).all()


@given(seeds)
def test_names_in_use_mean_the_same_estimator(seed: int) -> None:
    p, q = normal(seed, 2, 8)
    for ours, theirs in (("k1", "kl"), ("k2", "mse")):
        assert torch.equal(kl_estimate(ours, p, q), kl_estimate(theirs, p, q))
    clamped = kl_estimate("k3", p, q).clamp(max=10.0)
    torch.testing.assert_close(kl_estimate("low_var_kl", p, q), clamped)
    assert (kl_estimate("abs", p, q) >= kl_estimate("k1", p, q)).all()


@given(seeds)
def test_squashing_leaves_the_kl_alone(seed: int) -> None:
    args = normal(seed, 4, 5, 2).unbind()
    assert torch.equal(squashed_gaussian_kl(*args), gaussian_kl(*args))


@settings(max_examples=25)
@given(seeds, st.floats(0.0, 1.0))
def test_a_fisher_product_is_linear_symmetric_and_never_negative(seed: int, damping: float) -> None:
    weights, inputs = {"w": normal(seed, 3, 4)}, normal(seed + 1, 7, 4)
    product = fisher_vector_product(
        lambda tree: {"logits": inputs @ tree["w"].T},
        weights,
        lambda out, tangent: {"logits": categorical_fisher(out["logits"], tangent["logits"])},
        damping=damping,
    )
    u, v = normal(seed + 2, 2, 12)
    torch.testing.assert_close(u @ product(v), v @ product(u))
    torch.testing.assert_close(product(u + 2 * v), product(u) + 2 * product(v))
    assert (u @ product(u)).item() >= damping * (u @ u).item() - 1e-9


@given(seeds, st.integers(2, 30))
def test_reinforce_pp_has_mean_0_and_standard_deviation_1(seed: int, size: int) -> None:
    score = normal(seed, size)
    advantage = reinforce_pp(score)
    assert abs(advantage.mean().item()) < 1e-9
    assert math.isclose(advantage.std().item(), 1.0, rel_tol=1e-9)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(reinforce_pp(score[order]), advantage[order])


@given(seeds, st.integers(1, 6), st.integers(1, 4))
def test_a_performance_profile_falls_from_1_to_0(seed: int, runs: int, tasks: int) -> None:
    scores = normal(seed, runs, tasks)
    ends = torch.tensor([-100.0, 100.0], dtype=torch.float64)
    thresholds = torch.cat([ends[:1], normal(seed + 1, 9).sort().values, ends[1:]])
    profile = performance_profile(scores, thresholds)
    assert profile[0] == 1.0
    assert profile[-1] == 0.0
    assert (profile[1:] <= profile[:-1]).all()


@settings(max_examples=20)
@given(seeds, st.integers(2, 6), st.integers(1, 3))
def test_a_bootstrap_interval_lies_within_the_scores(seed: int, runs: int, tasks: int) -> None:
    scores = normal(seed, runs, tasks)
    found = stratified_bootstrap(
        torch.mean, scores, generator=torch.Generator().manual_seed(seed), resamples=200
    )
    # three times the same number, averaged, may round to its neighbour
    assert scores.min() - 1e-12 <= found.low <= found.high <= scores.max() + 1e-12
    assert found.estimate == scores.mean()


@given(seeds, st.integers(2, 9))
def test_cross_entropy_is_least_where_the_critic_is_right(seed: int, atoms: int) -> None:
    """H(p, q) = H(p) + KL(p‖q) ≥ H(p, p)."""
    p, q = normal(seed, 2, atoms)
    assume(not torch.allclose(p, q))
    target = p.softmax(-1)
    gap = value.categorical(q, target) - value.categorical(p, target)
    torch.testing.assert_close(gap, categorical_kl(p, q))


@given(seeds, st.integers(2, 9))
def test_the_mean_of_a_categorical_critic_lies_on_its_support(seed: int, atoms: int) -> None:
    support = normal(seed, atoms).sort().values
    mean = value.categorical_mean(normal(seed + 1, 5, atoms), support)
    assert ((mean >= support[0]) & (mean <= support[-1])).all()
