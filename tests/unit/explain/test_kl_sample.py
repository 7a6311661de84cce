"""A KL from outcomes that were drawn: the estimate, its error, and which KL it estimates."""

from __future__ import annotations

import math
from math import log

import pytest

from keel.errors import InputError
from keel.explain import explain_kl

REFERENCE, POLICY = [0.6, 0.3, 0.1], [0.7, 0.2, 0.1]
NAMES = ["search", "think", "answer"]
DRAWN = ["search", "think", "answer", "search"]


def test_the_four_tokens_of_the_note() -> None:
    """2 log(6/7) + log(3/2) + log 1 = 0.097164, over four tokens 0.024291."""
    sample = explain_kl(REFERENCE, POLICY, names=NAMES, sample=DRAWN).numbers["sample"]
    mean = (2 * log(6 / 7) + log(3 / 2)) / 4
    assert sample["count"] == 4
    assert sample["k1"]["mean"] == pytest.approx(mean)
    assert sample["log_q_minus_log_p"]["mean"] == pytest.approx(-mean)
    assert f"{mean:.4f}" == "0.0243"


def test_the_number_of_the_note_has_logarithms_of_two_digits() -> None:
    """(2·(−0.36 + 0.51) + (−1.61 + 1.20) + 0) / 4 = −0.11 / 4 = −0.0275."""
    sample = explain_kl(REFERENCE, POLICY, sample=DRAWN, digits=2).numbers["sample"]
    assert sample["rounded_log_q_minus_log_p"]["mean"] == pytest.approx(-0.0275, abs=1e-12)
    assert sample["rounded_log_q_minus_log_p"]["digits"] == 2


def test_the_standard_error_by_hand() -> None:
    """√(Σ (x − mean)² / 3) / √4 with x = −0.15415, 0.40547, 0, −0.15415: 0.13215."""
    x = [log(6 / 7), log(3 / 2), 0.0, log(6 / 7)]
    mean = sum(x) / 4
    error = math.sqrt(sum((value - mean) ** 2 for value in x) / 3 / 4)
    sample = explain_kl(REFERENCE, POLICY, sample=DRAWN).numbers["sample"]
    assert sample["k1"]["standard_error"] == pytest.approx(error)
    assert f"{error:.5f}" == "0.13215"


def test_k3_of_the_four_tokens() -> None:
    """Q/P − 1 sums to 1/6 − 1/3 + 0 + 1/6 = 0, so that k3 has the mean of k1 here."""
    sample = explain_kl(REFERENCE, POLICY, sample=DRAWN).numbers["sample"]
    assert sample["k3"]["mean"] == pytest.approx(sample["k1"]["mean"])
    assert sample["k3"]["standard_error"] < sample["k1"]["standard_error"] / 5


def test_how_many_samples_bring_the_error_down_to_the_kl() -> None:
    """0.6 log²(6/7) + 0.3 log²(3/2) − KL² = 0.062729, over KL² = 0.029149² 73.8."""
    sample = explain_kl(REFERENCE, POLICY, sample=DRAWN).numbers["sample"]
    kl = 0.6 * log(6 / 7) + 0.3 * log(3 / 2)
    variance = 0.6 * log(6 / 7) ** 2 + 0.3 * log(3 / 2) ** 2 - kl**2
    assert sample["samples_until_error_is_kl"] == math.ceil(variance / kl**2) == 74


def test_a_sample_in_the_right_shares_gives_the_exact_kl() -> None:
    drawn = ["a"] * 6 + ["b"] * 3 + ["c"]
    numbers = explain_kl(REFERENCE, POLICY, sample=drawn).numbers
    assert numbers["sample"]["k1"]["mean"] == pytest.approx(numbers["kl_nats"])


def test_the_table_says_what_is_estimated_by_who_drew() -> None:
    table = explain_kl(REFERENCE, POLICY, sample=DRAWN, digits=2).tables[-1]
    estimates = {row[0].strip(): row[-2:] for row in table.rows}
    assert estimates["log P − log Q, or k1"] == ("KL(P‖Q)", "−KL(Q‖P)")
    assert estimates["log Q − log P"] == ("−KL(P‖Q)", "KL(Q‖P)")
    assert {row[0]: row[1] for row in table.rows}["exact KL(P‖Q)"] == "0.02915"
    assert {row[0].strip(): row[1] for row in table.rows}["with logs of 2 digits"] == "−0.02750"


def test_the_meaning_says_that_four_are_too_few() -> None:
    meaning = explain_kl(REFERENCE, POLICY, sample=DRAWN).meaning
    assert "Your 4 samples say 0.0243 ± 0.1322 where KL(P‖Q) is 0.0291" in meaning
    assert "too few to tell even the sign; about 74 bring" in meaning


def test_without_names_the_sample_names_the_outcomes_in_its_order() -> None:
    explanation = explain_kl(REFERENCE, POLICY, sample=DRAWN)
    assert [row["name"] for row in explanation.numbers["outcomes"]] == NAMES
    assert explanation.tables[0].title == "Outcome by outcome, named in the order of the sample"
    named = explain_kl(REFERENCE, POLICY, names=NAMES, sample=DRAWN)
    assert named.numbers == explanation.numbers
    assert named.tables[0].title == "Outcome by outcome"


def test_letters_of_the_outcomes_keep_their_places() -> None:
    """Without names outcomes are a, b, c: a sample that begins with c does not rename them."""
    sample = explain_kl(REFERENCE, POLICY, sample=["c", "b"]).numbers["sample"]
    assert sample["k1"]["mean"] == pytest.approx(log(3 / 2) / 2)


def test_one_sample_has_no_standard_error() -> None:
    explanation = explain_kl(REFERENCE, POLICY, sample=["a"])
    assert math.isnan(explanation.numbers["sample"]["k1"]["standard_error"])
    assert "One sample has no standard error" in explanation.meaning


def test_an_outcome_that_q_rules_out_makes_the_estimate_infinite() -> None:
    explanation = explain_kl([0.5, 0.5], [1.0, 0.0], sample=["a", "b"])
    assert explanation.numbers["sample"]["k1"]["mean"] == math.inf
    assert "holds an outcome that Q rules out" in explanation.meaning


def test_equal_distributions_need_no_sample() -> None:
    explanation = explain_kl([0.5, 0.5], [0.5, 0.5], sample=["a", "b"])
    assert explanation.numbers["sample"]["k1"]["mean"] == 0.0
    assert "bring the standard error" not in explanation.meaning


BAD = {
    "sample: 'thnk' is not one of search, .* did you mean 'think'": {
        "names": NAMES,
        "sample": ["search", "thnk"],
    },
    "sample: 'search' is not one of a, b, c; name the outcomes with --names": {
        "sample": ["search", "think"],
    },
    "sample: 'x' is not one of a, b, c": {"sample": ["b", "a", "x"]},
    "sample: empty": {"sample": [""]},
    "names: 'x' names two outcomes": {"names": ["x", "x", "y"], "sample": ["x"]},
    "digits: expected 0 to 15, got 99": {"sample": ["a"], "digits": 99},
    "digits: rounds the logarithms of a sample": {"digits": 2},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_samples_are_named(message: str) -> None:
    with pytest.raises(InputError, match=message):
        explain_kl(REFERENCE, POLICY, **BAD[message])


def test_p_cannot_draw_what_it_rules_out() -> None:
    with pytest.raises(InputError, match="'c' has probability 0 under P, so P cannot draw it"):
        explain_kl([0.5, 0.5, 0.0], [0.4, 0.4, 0.2], sample=["a", "c"])
