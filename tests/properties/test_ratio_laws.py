"""Laws of the ratio: inverses, and samples that do not exist."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from keel.functional import policy_ratio, ratio_report

# Probabilities down to underflow, and everything a broken network can say.
HEALTHY = st.floats(-60, 0)
SICK = st.sampled_from([math.nan, math.inf, -math.inf])
PAIRS = st.lists(st.tuples(HEALTHY, HEALTHY), min_size=1, max_size=8)
OTHERS = st.one_of(  # new, old and weight of samples that must not matter
    st.tuples(SICK, HEALTHY, st.just(1.0)),
    st.tuples(HEALTHY, SICK, st.just(1.0)),
    st.tuples(st.one_of(SICK, HEALTHY), HEALTHY, st.just(0.0)),
)


def columns(pairs: list[tuple[float, ...]]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True)]


@given(PAIRS)
def test_exchanging_the_policies_inverts_the_ratio(pairs):
    new, old = columns(pairs)
    there, back = policy_ratio(new, old), policy_ratio(old, new)
    assert_close(there.ratio * back.ratio, torch.ones_like(new), rtol=1e-12, atol=0)
    assert torch.equal(there.log_ratio, -back.log_ratio)


@given(PAIRS, st.floats(0.1, 20))
def test_the_ratio_stays_between_its_bounds(pairs, bound):
    ratio = policy_ratio(*columns(pairs), max_log_ratio=bound)
    assert (ratio.log_ratio.abs() <= bound).all()
    report = ratio_report(ratio, max_log_ratio=bound)
    assert math.exp(-bound) * 0.999 <= report.ratio_min <= report.ratio_max
    assert report.ratio_max <= math.exp(bound) * 1.001
    assert report.share_clamped == (ratio.raw_log_ratio.abs() > bound).float().mean()


@given(PAIRS)
def test_the_effective_share_lies_between_one_sample_and_all(pairs):
    share = ratio_report(policy_ratio(*columns(pairs))).effective_sample_size
    assert 1 / len(pairs) - 1e-9 <= share <= 1 + 1e-9


@given(st.data(), PAIRS)
def test_sick_and_uncounted_samples_change_nothing_for_the_others(data, pairs):
    others = data.draw(st.lists(OTHERS, max_size=5))
    mixed = data.draw(st.permutations([(*pair, 1.0) for pair in pairs] + others))
    new, old, weight = columns(mixed)
    new.requires_grad_()
    kept = (weight > 0) & new.isfinite() & old.isfinite()
    alone = new[kept].detach().clone().requires_grad_()

    full, plain = policy_ratio(new, old, weight), policy_ratio(alone, old[kept])
    assert torch.equal(full.ratio[kept], plain.ratio)
    assert full.quarantined.sum() == len(others) - (weight == 0).sum()

    for ratio in (full, plain):
        (ratio.ratio * ratio.weight).sum().backward()
    assert torch.equal(new.grad[kept], alone.grad)
    assert not new.grad[~kept].any()

    with_them, without = (ratio_report(ratio)._asdict() for ratio in (full, plain))
    for name in with_them.keys() - {"non_finite_count", "non_finite_share"}:
        assert_close(with_them[name], without[name], rtol=1e-12, atol=0)
