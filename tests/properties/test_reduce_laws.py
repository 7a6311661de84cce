"""Laws of averaging: micro-batches add up, groups are slices, weight 0 is absence."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from keel.functional import aggregate, denominator
from keel.functional.reduce import REDUCTIONS

REDUCTION = st.sampled_from(REDUCTIONS).map(
    lambda name: {"reduction": name} | ({"constant": 7.0} if name == "constant" else {})
)


@st.composite
def batches(draw, dyadic: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss and its weight, `[B, G, L]`; `dyadic`: eighths, whose sums do not round."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = (draw(st.integers(1, 6)), 2, draw(st.integers(1, 5)))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    weight = torch.rand(shape, generator=generator, dtype=torch.float64).mul(2)
    weight = torch.where(torch.rand(shape, generator=generator) < 0.4, 0.0, weight)
    return ((8 * x).round() / 8, weight.round()) if dyadic else (x, weight)


@st.composite
def partitions(draw, size: int) -> list[torch.Tensor]:
    """The rows 0 … size − 1, dealt out to three micro-batches; some may be empty."""
    dealt = torch.tensor(draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)))
    return [(dealt == part).nonzero()[:, 0] for part in range(3)]


def gradient_of(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(sum(value.sum() for value in values), x)[0]


@given(st.data(), batches(), REDUCTION, st.sampled_from([None, 1]))
def test_micro_batches_add_up_in_value_and_gradient(data, batch, reduction, axis):
    x, weight = batch
    x.requires_grad_()
    options = {"group_axis": axis} | reduction
    whole = denominator(weight, **options)
    parts = [
        aggregate(x[rows], weight[rows], denominator_of_batch=whole, **options)
        for rows in data.draw(partitions(len(x)))
    ]
    full = aggregate(x, weight, **options)
    assert_close(sum(parts), full, rtol=1e-12, atol=1e-12)
    assert_close(gradient_of(x, *parts), gradient_of(x, full), rtol=1e-12, atol=1e-12)


@given(st.data(), batches(dyadic=True))
def test_micro_batches_of_numbers_that_do_not_round_add_up_exactly(data, batch):
    x, weight = batch
    whole = 2.0 ** denominator(weight).log2().ceil()  # dividing by a power of two is exact
    parts = [
        aggregate(x[rows], weight[rows], denominator_of_batch=whole)
        for rows in data.draw(partitions(len(x)))
    ]
    assert sum(parts) == aggregate(x, weight, denominator_of_batch=whole)


@given(batches(), REDUCTION)
def test_a_group_is_averaged_as_if_it_were_alone(batch, reduction):
    x, weight = batch
    alone = [aggregate(x[:, g], weight[:, g], **reduction) for g in range(2)]
    together = aggregate(x, weight, group_axis=1, **reduction)
    assert_close(together, torch.stack(alone), rtol=1e-12, atol=1e-12)


@given(batches(), REDUCTION)
def test_the_reduction_is_the_loop_over_sequences(batch, reduction):
    x, weight = (tensor.flatten(0, 1) for tensor in batch)
    name, constant = reduction["reduction"], reduction.get("constant", 1.0)
    total, tokens, sequences = 0.0, 0.0, 0
    for losses, weights in zip(x.tolist(), weight.tolist(), strict=True):
        mass = sum(weights)
        part = sum(w * loss for w, loss in zip(weights, losses, strict=True))
        total += part / (mass or 1.0) if name == "seq-mean-token-mean" else part
        tokens, sequences = tokens + mass, sequences + (mass > 0)
    divisor = {"token-mean": tokens, "token-sum": 1.0}.get(name, sequences * constant)
    expected = torch.tensor(total / (divisor or 1.0), dtype=torch.float64)
    assert_close(aggregate(x, weight, **reduction), expected, rtol=1e-12, atol=1e-12)


@given(
    st.data(),
    batches(),
    REDUCTION,
    st.sampled_from([None, 1]),
    st.sampled_from([0, 2]),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e300]),
)
def test_inserting_what_has_no_weight_changes_nothing(data, batch, reduction, axis, along, garbage):
    x, weight = batch
    x.requires_grad_()
    size = x.shape[along]
    place = torch.tensor(sorted(data.draw(st.permutations(range(size + 3)))[:size]))

    def insert(tensor: torch.Tensor, filler: float) -> torch.Tensor:
        shape = list(tensor.shape)
        shape[along] += 3
        return tensor.new_full(shape, filler).index_copy(along, place, tensor)

    plain = aggregate(x, weight, group_axis=axis, **reduction)
    longer = aggregate(insert(x, garbage), insert(weight, 0.0), group_axis=axis, **reduction)
    assert_close(longer, plain, rtol=1e-12, atol=1e-12)
    assert_close(gradient_of(x, longer), gradient_of(x, plain), rtol=1e-12, atol=1e-12)


@given(batches(), REDUCTION)
def test_a_mean_of_equal_losses_is_that_loss(batch, reduction):
    _, weight = batch
    if reduction["reduction"] in ("token-mean", "seq-mean-token-mean") and weight.any():
        result = aggregate(torch.full_like(weight, 2.5), weight, **reduction)
        assert_close(result.item(), 2.5, rtol=1e-12, atol=0)
