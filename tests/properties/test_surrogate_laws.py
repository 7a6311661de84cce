"""Laws of the surrogates: pessimism, bounds, and where the gradient may be."""

from __future__ import annotations

import math

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.testing import assert_close

from keel.functional import aggregate, policy_ratio
from keel.functional.surrogate import (
    cispo,
    clip,
    dual_clip,
    sequence_log_ratio,
    symmetric_clip,
    unclipped,
)

LOSSES = st.sampled_from([unclipped, clip, symmetric_clip, dual_clip])
ADVANTAGE = st.floats(-10, 10).filter(lambda a: a == 0 or abs(a) > 1e-9)
PAIRS = st.lists(st.tuples(st.floats(0.01, 20), ADVANTAGE), min_size=1, max_size=8)


def columns(pairs: list[tuple[float, ...]]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True)]


@given(PAIRS, st.floats(0.01, 0.9), st.floats(0.01, 3))
def test_the_clip_is_pessimistic_and_bounds_what_can_be_gained(pairs, low, high):
    ratio, advantage = columns(pairs)
    loss = clip(ratio, advantage, low, high).loss
    assert (loss >= unclipped(ratio, advantage).loss).all()
    best = torch.maximum((1 + high) * advantage, (1 - low) * advantage)
    assert (-loss <= best + 1e-12).all()


@given(PAIRS, st.floats(1.5, 5))
def test_dual_clip_only_lowers_and_only_for_bad_actions(pairs, bound):
    ratio, advantage = columns(pairs)
    once, twice = clip(ratio, advantage).loss, dual_clip(ratio, advantage, bound=bound).loss
    assert (twice <= once).all()
    assert torch.equal(twice[advantage >= 0], once[advantage >= 0])
    assert (twice <= torch.maximum(once.new_tensor(0), -bound * advantage)).all()


@given(PAIRS, LOSSES)
def test_the_gradient_is_minus_the_advantage_or_nothing(pairs, loss):
    ratio, advantage = columns(pairs)
    for edge in (0.8, 1 / 1.2, 1.2, 3.0):  # where both branches round to the same loss
        assume(((ratio - edge).abs() > 1e-9).all())
    ratio.requires_grad_()
    result = loss(ratio, advantage)
    result.loss.sum().backward()
    assert torch.equal(ratio.grad, torch.where(result.clipped, 0.0, -advantage))


@given(PAIRS, LOSSES)
def test_a_policy_that_did_not_change_has_the_plain_policy_gradient(pairs, loss):
    _, advantage = columns(pairs)
    log_prob = torch.full_like(advantage, -1.0).requires_grad_()
    ratio = policy_ratio(log_prob, log_prob.detach()).ratio
    losses = loss(ratio, advantage).loss, cispo(log_prob, ratio, advantage).loss
    for value in losses:
        (gradient,) = torch.autograd.grad(value.sum(), log_prob, retain_graph=True)
        assert torch.equal(gradient, -advantage)


@given(PAIRS, st.floats(0.01, 0.9), st.floats(0.01, 3))
def test_cispo_has_a_clipped_weight_and_a_gradient_everywhere(pairs, low, high):
    ratio, advantage = columns(pairs)
    log_prob = ratio.log().requires_grad_()
    result = cispo(log_prob, log_prob.exp(), advantage, low, high)
    result.loss.sum().backward()
    weight = ratio.clamp(1 - low, 1 + high)
    assert_close(log_prob.grad, -weight * advantage, rtol=1e-12, atol=1e-12)


@given(st.data(), PAIRS, LOSSES, st.sampled_from([math.nan, math.inf, -math.inf, 1e300]))
def test_inserted_samples_of_weight_zero_do_not_change_the_loss(data, pairs, loss, garbage):
    ghosts = [(garbage, garbage, 0.0)] * data.draw(st.integers(1, 4))
    mixed = data.draw(st.permutations([(math.log(r), a, 1.0) for r, a in pairs] + ghosts))

    def value_and_gradient(samples):
        log_prob, advantage, weight = columns(samples)
        log_prob.requires_grad_()
        ratio = policy_ratio(log_prob, torch.zeros_like(log_prob), weight)
        value = aggregate(loss(ratio.ratio, advantage).loss, ratio.weight)
        value.backward()
        return value.detach(), log_prob.grad, weight > 0

    full, gradient, kept = value_and_gradient(mixed)
    plain, alone, _ = value_and_gradient([sample for sample in mixed if sample[2]])
    assert_close(full, plain, rtol=1e-12, atol=1e-12)
    assert_close(gradient[kept], alone, rtol=1e-12, atol=1e-12)
    assert not gradient[~kept].any()


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 6))
def test_the_sequence_ratio_is_the_loop_over_tokens(seed, sequences, length):
    generator = torch.Generator().manual_seed(seed)
    log_ratio = torch.randn(sequences, length, generator=generator, dtype=torch.float64)
    weight = torch.rand(sequences, length, generator=generator).round()
    result = sequence_log_ratio(torch.where(weight > 0, log_ratio, math.nan), weight)
    for row in range(sequences):
        counted = [x for x, w in zip(log_ratio[row], weight[row], strict=True) if w > 0]
        expected = weight[row].double() * (sum(counted) / max(1, len(counted)))
        assert_close(result[row], expected, rtol=1e-12, atol=1e-12)
