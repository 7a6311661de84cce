"""Every reduction on one small example: x = 1…6 in two sequences, with weights on 1, 2 and 4."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from keel.errors import InputError, ShapeError
from keel.functional import aggregate, denominator
from keel.functional.reduce import REDUCTIONS

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
WEIGHT = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
EVERY = pytest.mark.parametrize("reduction", REDUCTIONS)


def options(reduction: str) -> dict:
    return {"reduction": reduction} | ({"constant": 4.0} if reduction == "constant" else {})


@DTYPES
@pytest.mark.parametrize(
    ("reduction", "value", "divisor"),
    [
        ("token-mean", 7 / 3, 3),  # (1 + 2 + 4) / 3 tokens
        ("token-sum", 7, 1),
        ("seq-mean-token-sum", 7 / 2, 2),  # (3 + 4) / 2 sequences
        ("seq-mean-token-mean", 2.75, 2),  # (1.5 + 4) / 2 sequences
        ("constant", 7 / 8, 8),  # (3 + 4) / (2 sequences × 4)
    ],
)
def test_every_reduction_by_hand(reduction, value, divisor, dtype):
    result = aggregate(X.to(dtype), WEIGHT, **options(reduction))
    assert_close(result, torch.tensor(value, dtype=dtype))
    assert denominator(WEIGHT, **options(reduction)) == divisor


@pytest.mark.parametrize(
    ("reduction", "value"),
    [
        ("token-mean", (1.5, 4)),
        ("token-sum", (3, 4)),
        ("seq-mean-token-sum", (3, 4)),
        ("seq-mean-token-mean", (1.5, 4)),
        ("constant", (0.75, 1)),
    ],
)
@pytest.mark.parametrize("axis", [0, -2])
def test_a_group_axis_is_kept(reduction, value, axis):
    result = aggregate(X, WEIGHT, group_axis=axis, **options(reduction))
    assert_close(result, torch.tensor(value, dtype=torch.float64))


def test_tokens_can_be_groups_where_no_sequence_is_counted():
    assert aggregate(X, WEIGHT, "token-sum", group_axis=-1).tolist() == [5, 2, 0]
    assert aggregate(X, WEIGHT, group_axis=1).tolist() == [2.5, 2, 0]


def test_without_weights_every_element_counts_once():
    assert aggregate(X) == 3.5
    assert aggregate(X, reduction="seq-mean-token-sum") == 10.5
    assert aggregate(X[0]) == 2


@DTYPES
def test_weights_may_be_fractions(dtype):
    x, weight = torch.tensor([[2.0, 4.0]], dtype=dtype), torch.tensor([[0.5, 1.5]])
    assert aggregate(x, weight) == 3.5  # (1 + 6) / 2
    assert aggregate(x, weight / 4) == 3.5  # also where the weights sum to less than 1
    assert aggregate(x, weight / 4, "seq-mean-token-mean") == 3.5
    assert aggregate(x, weight, "seq-mean-token-sum") == 7


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_weights_may_be_counted_as_booleans_or_integers(kind):
    assert_close(aggregate(X, WEIGHT.to(kind)), aggregate(X, WEIGHT))
    assert denominator(WEIGHT.to(kind)) == 3
    assert denominator(WEIGHT.to(kind), "seq-mean-token-sum") == 2


@EVERY
def test_what_has_no_weight_cannot_be_seen_in_value_or_gradient(reduction):
    clean = X.clone().requires_grad_()
    broken = torch.where(WEIGHT > 0, X, torch.tensor([math.nan, math.inf, -math.inf]))
    broken.requires_grad_()
    values = [aggregate(x, WEIGHT, **options(reduction)) for x in (clean, broken)]
    for value in values:
        value.backward()
    assert torch.equal(*values)
    assert torch.equal(clean.grad, broken.grad)


@pytest.mark.parametrize(
    ("reduction", "gradient"),
    [
        ("token-mean", [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0]]),
        ("token-sum", [[1, 1, 0], [1, 0, 0]]),
        ("seq-mean-token-sum", [[1 / 2, 1 / 2, 0], [1 / 2, 0, 0]]),
        ("seq-mean-token-mean", [[1 / 4, 1 / 4, 0], [1 / 2, 0, 0]]),
        ("constant", [[1 / 8, 1 / 8, 0], [1 / 8, 0, 0]]),
    ],
)
def test_the_gradient_is_the_share_of_every_token(reduction, gradient):
    x = X.clone().requires_grad_()
    aggregate(x, WEIGHT, **options(reduction)).backward()
    assert_close(x.grad, torch.tensor(gradient, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x: aggregate(x, WEIGHT, **options(reduction)), (x,))


@EVERY
@pytest.mark.parametrize("axis", [None, 0])
def test_a_batch_without_weight_is_zero_with_zero_gradient(reduction, axis):
    x = torch.full((2, 3), math.nan).requires_grad_()
    result = aggregate(x, torch.zeros(2, 3), group_axis=axis, **options(reduction))
    result.sum().backward()
    assert not result.any()
    assert torch.equal(x.grad, torch.zeros(2, 3))


def test_the_denominator_without_weight_is_one():
    nothing = torch.zeros(2, 3)
    for reduction in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"):
        assert denominator(nothing, reduction) == 1
    assert denominator(nothing, "constant", constant=4.0) == 4
    assert denominator(WEIGHT - WEIGHT[0], group_axis=0).tolist() == [1, 1]


def test_micro_batches_add_up_with_the_denominator_of_the_batch():
    whole = denominator(WEIGHT)
    parts = [aggregate(x, w, denominator_of_batch=whole) for x, w in zip(X, WEIGHT, strict=True)]
    assert_close(sum(parts), aggregate(X, WEIGHT))
    # Their means are 3/2 and 4: averaging those would weigh one token as much as two.
    assert aggregate(X, WEIGHT) != (1.5 + 4) / 2


@DTYPES
def test_large_losses_stay_finite(dtype):
    x = torch.full((4, 8), torch.finfo(dtype).max / 64, dtype=dtype)
    for reduction in REDUCTIONS:
        assert aggregate(x, **options(reduction)).isfinite()


def test_errors_name_the_argument():
    with pytest.raises(
        ShapeError, match=r"weight: expected shape \[2, 3\] \(that of x\), got \[3\]"
    ):
        aggregate(X, WEIGHT[0])
    with pytest.raises(
        ShapeError, match=r"denominator_of_batch: expected shape \[\] \(the groups\), got \[2\]"
    ):
        aggregate(X, WEIGHT, denominator_of_batch=denominator(WEIGHT, group_axis=0))
    with pytest.raises(InputError, match=r"reduction: 'token-meen' is not .* mean 'token-mean'"):
        aggregate(X, WEIGHT, "token-meen", denominator_of_batch=denominator(WEIGHT))
    with pytest.raises(InputError, match="reduction: 'mean' is not one of token-mean"):
        denominator(WEIGHT, "mean")
    for call in (aggregate, denominator):
        for wrong in ({"reduction": "constant"}, {"constant": 2.0}):
            with pytest.raises(InputError, match="constant: goes with reduction 'constant'"):
                call(X, **wrong)


@pytest.mark.parametrize("reduction", REDUCTIONS[2:])
def test_reductions_over_sequences_need_sequences(reduction):
    with pytest.raises(ShapeError, match=r"weight: expected \[\*sequences, L\], got shape \[3\]"):
        denominator(WEIGHT[0], **options(reduction))
    with pytest.raises(InputError, match="group_axis: the last axis holds tokens"):
        aggregate(X, WEIGHT, group_axis=-1, **options(reduction))
    if reduction == "seq-mean-token-mean":  # the only one that looks at the token axis itself
        with pytest.raises(ShapeError, match=r"x: expected \[\*sequences, L\], got shape \[3\]"):
            aggregate(X[0], denominator_of_batch=torch.tensor(1.0), reduction=reduction)


def test_aggregate_compiles_into_one_graph():
    def all_of_them(x, weight):
        return [
            aggregate(x, weight, group_axis=axis, **options(reduction))
            for reduction in REDUCTIONS
            for axis in (None, 0)
        ]

    compiled = torch.compile(all_of_them, fullgraph=True, backend="aot_eager")
    assert_close(compiled(X, WEIGHT), all_of_them(X, WEIGHT))
