"""The KL of a sequence: per token, summed and averaged, by hand."""

from __future__ import annotations

import math
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.errors import InputError
from keel.explain import explain_sequence


def test_the_sequence_of_the_note() -> None:
    """0.1 + 0.5 + 0.2 − 0.1 = 0.7, over four tokens 0.175; k3 = e^(−Δ) − 1 + Δ."""
    numbers = explain_sequence([0.1, 0.5, 0.2, -0.1]).numbers
    assert numbers["sum_nats"] == pytest.approx(0.7)
    assert numbers["mean_nats"] == pytest.approx(0.175)
    assert numbers["sum_bits"] == pytest.approx(0.7 / math.log(2))
    assert numbers["k3_sum_nats"] == pytest.approx(
        exp(-0.1) + exp(-0.5) + exp(-0.2) + exp(0.1) - 3.3
    )
    assert numbers["likelihood_ratio"] == pytest.approx(exp(0.7))
    running = [token["running_sum_nats"] for token in numbers["tokens"]]
    assert running == pytest.approx([0.1, 0.6, 0.8, 0.7])


def test_a_mask_leaves_out_of_sum_and_mean() -> None:
    """(0.1 + 0.5 + 0.2) / 3 = 0.8 / 3."""
    numbers = explain_sequence([0.1, 0.5, 0.2, -0.1], mask=[1, 1, 1, 0]).numbers
    assert numbers["counted_tokens"] == 3
    assert numbers["sum_nats"] == pytest.approx(0.8)
    assert numbers["mean_nats"] == pytest.approx(0.8 / 3)


@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=8),
    st.lists(st.floats(-1e30, 1e30), max_size=4),
)
def test_masked_tokens_do_not_exist(values: list[float], padding: list[float]) -> None:
    mask = [1] * len(values) + [0] * len(padding)
    short = explain_sequence(values).numbers
    padded = explain_sequence([*values, *padding], mask=mask).numbers
    for key in ("sum_nats", "mean_nats", "k3_sum_nats", "k3_mean_nats", "likelihood_ratio"):
        assert padded[key] == pytest.approx(short[key], rel=1e-12, abs=1e-12)


def test_exact_kls_have_no_k3_and_no_likelihood_ratio() -> None:
    explanation = explain_sequence([0.1, 0.3], terms="kl")
    assert explanation.numbers["mean_nats"] == pytest.approx(0.2)
    assert not {"k3_sum_nats", "likelihood_ratio"} & set(explanation.numbers)
    assert "less noise than log-ratios" in explanation.meaning


def test_each_number_says_what_it_estimates() -> None:
    _, table = explain_sequence([0.1, 0.5, 0.2, -0.1]).tables
    estimates = {row[0]: row[-1] for row in table.rows}
    assert estimates["sum of Δ"] == estimates["sum of k3"] == "KL(π‖π_ref) of whole sequences"
    assert estimates["masked mean of Δ"] == "KL(π‖π_ref) a token"


def test_a_negative_sum_is_called_a_sample() -> None:
    assert "A sample below 0 is no negative KL" in explain_sequence([-0.1]).meaning
    assert "below 0" not in explain_sequence([0.1]).meaning


def test_a_likelihood_ratio_beyond_floats_is_infinite() -> None:
    explanation = explain_sequence([500.0, 500.0])
    assert explanation.numbers["likelihood_ratio"] == math.inf
    assert "e^1000.0 times" in explanation.meaning


BAD = {
    "terms: empty; a sequence needs": lambda: explain_sequence([]),
    "token 2: expected a finite number, got nan": lambda: explain_sequence([0.1, math.nan]),
    "mask: got 1 numbers for 2 tokens": lambda: explain_sequence([0.1, 0.2], mask=[1]),
    "mask: 0.5 is neither 1": lambda: explain_sequence([0.1], mask=[0.5]),
    "mask: nan is neither 1": lambda: explain_sequence([0.1], mask=[math.nan]),
    "mask: all 0; at least one of the tokens": lambda: explain_sequence([0.1], mask=[0]),
    "names: got 1 names for 2 tokens": lambda: explain_sequence([0.1, 0.2], names=["a"]),
    "token 1: 1e\\+09 nats is no log-ratio": lambda: explain_sequence([1e9]),
    "token 1: -0.1 is negative, and no KL is": lambda: explain_sequence([-0.1], terms="kl"),
    "terms: 'kll' is not one of .* did you mean 'kl'": lambda: explain_sequence(terms="kll"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named(message: str) -> None:
    with pytest.raises(InputError, match=message):
        BAD[message]()
