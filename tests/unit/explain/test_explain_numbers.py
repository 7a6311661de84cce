"""Explanations: numbers that can be checked by hand, and clear words for bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib import image

from keel.errors import InputError
from keel.explain import (
    Explanation,
    explain_advantage,
    explain_clip,
    explain_code_length,
    explain_estimators,
    explain_gaussian_kl,
    explain_kl,
    explain_landscape,
    explain_penalty,
    explain_projection,
    explain_sequence,
    explain_states,
    explain_trust_region,
)
from keel.explain.explanation import bits, number
from keel.explain.figures import save_picture
from keel.explain.inputs import parse_gaussian, parse_numbers

EXPLANATIONS: dict[str, Callable[[], Explanation]] = {
    "kl": lambda: explain_kl([0.8, 0.2], [0.7, 0.3], names=["heads", "tails"]),
    "kl with a sample": lambda: explain_kl(
        [0.6, 0.3, 0.1], [0.7, 0.2, 0.1], sample=["a", "b", "c", "a"], digits=2
    ),
    "sample of one": lambda: explain_kl([0.5, 0.5], [0.4, 0.6], sample=["a"]),
    "sample of the impossible": lambda: explain_kl([0.5, 0.5], [1.0, 0.0], sample=["a", "b"]),
    "infinite kl": lambda: explain_kl([0.5, 0.5], [1.0, 0.0]),
    "infinite reverse kl": lambda: explain_kl([1.0, 0.0], [0.5, 0.5]),
    "equal": lambda: explain_kl([0.5, 0.5], [0.5, 0.5]),
    "gaussian": lambda: explain_gaussian_kl((0.0, 1.0), (1.0, 2.0)),
    "clip": lambda: explain_clip(2.0, 1.0),
    "dual clip": lambda: explain_clip(10.0, -1.0, dual=3.0),
    "zero advantage": lambda: explain_clip(1.0, 0.0),
    "sequence": explain_sequence,
    "masked sequence": lambda: explain_sequence((0.1, -0.5), mask=(1, 0)),
    "sequence of KLs": lambda: explain_sequence((0.1, 0.2), terms="kl"),
    "long sequence": lambda: explain_sequence([0.1] * 40),
    "code length": explain_code_length,
    "right map": lambda: explain_code_length([0.5, 0.5], [0.5, 0.5]),
    "no road": lambda: explain_code_length([0.5, 0.5], [1.0, 0.0]),
    "place without visits": lambda: explain_code_length([1.0, 0.0], [0.5, 0.5]),
    "projection": explain_projection,
    "independent parts": lambda: explain_projection(((0.3, 0.7),)),
    "projection with zeros": lambda: explain_projection(((0.5, 0.0), (0.0, 0.5))),
    "large projection": lambda: explain_projection([[1 / 400] * 20] * 20),
    "states": explain_states,
    "equal policies": lambda: explain_states([[0.5, 0.5]], [[0.5, 0.5]]),
    "state without visits": lambda: explain_states(visits=[1.0, 0.0], max_kl=3.0),
    "landscape": explain_landscape,
    "flat landscape": lambda: explain_landscape(rewards=(1.0, 1.0, 1.0)),
    "steep landscape": lambda: explain_landscape(beta=0.001),
    "penalty": explain_penalty,
    "trust region": explain_trust_region,
    "estimators": lambda: explain_estimators(policies=4),
    "advantage": explain_advantage,
    "one step": lambda: explain_advantage((1.0,), (0.4,)),
}


@pytest.mark.parametrize("name", EXPLANATIONS)
def test_every_explanation_is_whole_and_draws_its_picture(name: str, tmp_path: Path) -> None:
    explanation = EXPLANATIONS[name]()
    assert explanation.title
    assert explanation.idea
    assert explanation.formula
    assert explanation.meaning.endswith(".")
    for table in explanation.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
    save_picture(explanation, tmp_path / "picture.png")
    height, width, _ = image.imread(tmp_path / "picture.png").shape
    assert (width, height) == (1440, 672)


DOLLARS = ["$a^{$", "$b", "c"]
NAMED: dict[str, Callable[[], Explanation]] = {
    "kl": lambda: explain_kl([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], names=DOLLARS),
    "code length": lambda: explain_code_length(names=DOLLARS),
    "projection": lambda: explain_projection([[0.2, 0.3, 0.5]], rows=DOLLARS[:1], columns=DOLLARS),
    "sequence": lambda: explain_sequence([0.1, 0.2, 0.3], names=DOLLARS),
    "penalty": lambda: explain_penalty(names=DOLLARS),
    "landscape": lambda: explain_landscape(names=DOLLARS),
    "trust region": lambda: explain_trust_region((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), names=DOLLARS),
    "states": lambda: explain_states(states=DOLLARS[:2], names=[DOLLARS[:2], DOLLARS[1:]]),
}


@pytest.mark.parametrize("name", NAMED)
def test_dollar_signs_in_names_are_no_formulas(name: str, tmp_path: Path) -> None:
    save_picture(NAMED[name](), tmp_path / "picture.png")


def test_kl_of_the_coin() -> None:
    """0.8 ln(8/7) + 0.2 ln(2/3) = 0.106825 − 0.081093; entropy −0.8 ln 0.8 − 0.2 ln 0.2."""
    numbers = explain_kl([0.8, 0.2], [0.7, 0.3]).numbers
    assert numbers["kl_nats"] == pytest.approx(0.8 * math.log(8 / 7) + 0.2 * math.log(2 / 3))
    assert numbers["reverse_kl_nats"] == pytest.approx(
        0.7 * math.log(7 / 8) + 0.3 * math.log(3 / 2)
    )
    assert numbers["kl_bits"] == pytest.approx(0.0371238, abs=1e-6)
    assert numbers["entropy_p_nats"] == pytest.approx(0.5004024, abs=1e-6)
    assert numbers["cross_entropy_nats"] == pytest.approx(
        -0.8 * math.log(0.7) - 0.2 * math.log(0.3)
    )
    assert numbers["total_variation"] == pytest.approx(0.1)


def test_estimates_lie_within_four_standard_errors_of_the_exact_value() -> None:
    numbers = explain_kl([0.5, 0.3, 0.2], [0.4, 0.4, 0.2], samples=20_000, seed=3).numbers
    for name in ("k1", "k3"):  # k2 is biased
        estimate = numbers["estimators"][name]
        assert abs(estimate["mean"] - numbers["kl_nats"]) < 4 * estimate["standard_error"]


def test_the_seed_decides_the_samples() -> None:
    first, again, other = (
        explain_kl([0.8, 0.2], [0.7, 0.3], seed=seed).numbers["estimators"] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_an_impossible_outcome_is_said_in_words() -> None:
    explanation = explain_kl([0.8, 0.2], [1.0, 0.0], names=["heads", "tails"])
    assert explanation.numbers["kl_nats"] == math.inf
    assert "Q says 'tails' can never happen, yet under P it happens 20.00%" in explanation.meaning
    assert "∞" in {cell for table in explanation.tables for row in table.rows for cell in row}


def test_the_other_direction_may_be_infinite_alone() -> None:
    explanation = explain_kl([1.0, 0.0], [0.5, 0.5])
    assert explanation.numbers["kl_nats"] == pytest.approx(math.log(2))
    assert "other direction is infinite" in explanation.meaning


def test_gaussian_kl_splits_into_mean_and_spread() -> None:
    """N(0,1) against N(1,2): spread ln 2 + 1/8 − ½ = 0.318147, mean 1/(2·4) = 0.125."""
    numbers = explain_gaussian_kl((0.0, 1.0), (1.0, 2.0)).numbers
    assert numbers["kl_from_spread_nats"] == pytest.approx(math.log(2) + 1 / 8 - 1 / 2)
    assert numbers["kl_from_mean_nats"] == pytest.approx(0.125)
    assert numbers["kl_nats"] == pytest.approx(math.log(2) + 1 / 4 - 1 / 2)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "word"),
    [
        (2.0, 1.0, -1.2, 0.0, "Clipped"),
        (1.1, 1.0, -1.1, -1.0, "Inside"),
        (0.5, 1.0, -0.5, -1.0, "wrong side"),
        (0.5, -1.0, 0.8, 0.0, "Clipped"),
        (2.0, -1.0, 2.0, 1.0, "wrong side"),
    ],
)
def test_the_four_corners_of_the_clip(
    ratio: float, advantage: float, loss: float, gradient: float, word: str
) -> None:
    explanation = explain_clip(ratio, advantage)
    assert explanation.numbers["loss"] == pytest.approx(loss)
    assert explanation.numbers["gradient"] == pytest.approx(gradient)
    assert word in explanation.meaning


def test_dual_clip_bounds_the_loss_of_a_bad_action() -> None:
    assert explain_clip(10.0, -1.0, dual=3.0).numbers["loss"] == 3.0


def test_penalty_of_the_note() -> None:
    """1 − 0.1·ln(0.6/0.3) = 1 − 0.0693 = 0.9307."""
    numbers = explain_penalty(0.3, 0.6, beta=0.1).numbers
    assert numbers["penalised_reward"] == pytest.approx(1 - 0.1 * math.log(2))


def test_the_best_policy_under_a_penalty_is_the_gibbs_distribution() -> None:
    """Two actions, rewards 1 and 0, uniform reference, β = 1: e/(e+1)."""
    numbers = explain_penalty(reference=(0.5, 0.5), rewards=(1.0, 0.0), beta=1.0).numbers
    assert numbers["optimal_policy"]["a"] == pytest.approx(math.e / (math.e + 1))


@pytest.mark.parametrize(("probability", "word"), [(0.6, "likelier"), (0.1, "rarer"), (0.3, "as")])
def test_penalty_says_who_pays(probability: float, word: str) -> None:
    assert word in explain_penalty(0.3, probability).meaning


def test_strategy_a_of_the_note_breaks_its_bound() -> None:
    numbers = explain_trust_region(max_kl=0.01).numbers
    assert numbers["kl_requested_nats"] == pytest.approx(0.0335, abs=5e-5)
    assert numbers["inside"] is False
    assert numbers["kl_kept_nats"] <= 0.01
    assert 0.4 < numbers["fraction_kept"] < 0.6
    assert sum(numbers["kept_policy"].values()) == pytest.approx(1.0)


def test_a_policy_inside_the_bound_stands() -> None:
    explanation = explain_trust_region(max_kl=0.1)
    assert explanation.numbers["fraction_kept"] == 1.0
    assert "Inside: the update spends 33%" in explanation.meaning


def test_advantages_by_hand() -> None:
    """γ = λ = ½, terminated: δ₀ = 0 + ½·0 − ½, δ₁ = 1 + 0 − 0, A₀ = δ₀ + ¼·δ₁."""
    numbers = explain_advantage((0.0, 1.0), (0.5, 0.0), gamma=0.5, lam=0.5).numbers
    assert numbers["deltas"] == [-0.5, 1.0]
    assert numbers["advantages"] == [-0.5 + 0.25 * 1.0, 1.0]


def test_truncation_bootstraps_and_termination_does_not() -> None:
    ended = explain_advantage((1.0,), (0.0,), last_value=2.0, gamma=0.5, end="terminated").numbers
    cut = explain_advantage((1.0,), (0.0,), last_value=2.0, gamma=0.5, end="truncated").numbers
    going = explain_advantage((1.0,), (0.0,), last_value=2.0, gamma=0.5, end="running").numbers
    assert ended["advantages"] == [1.0]
    assert cut["advantages"] == going["advantages"] == [2.0]


BAD = {
    "P: -0.2 is not a probability": lambda: explain_kl([1.2, -0.2], [0.5, 0.5]),
    "Q: the probabilities sum to 0.9, not 1": lambda: explain_kl([0.5, 0.5], [0.5, 0.4]),
    "differ in length: 2 and 3": lambda: explain_kl([0.5, 0.5], [0.2, 0.3, 0.5]),
    "P: empty": lambda: explain_kl([], []),
    "names: got 3 names for 2 outcomes": lambda: explain_kl([1, 0], [1, 0], names=["a", "b", "c"]),
    "samples: expected 2 to 10,000,000, got 1": lambda: explain_kl([1.0], [1.0], samples=1),
    "Q sigma: expected a number above 0": lambda: explain_gaussian_kl((0, 1), (0, 0)),
    "ratio: expected a number above 0, got -1": lambda: explain_clip(-1.0),
    "advantage: expected a finite number": lambda: explain_clip(1.0, math.nan),
    "clip: expected a number below 1": lambda: explain_clip(low=1.5),
    "dual: expected a number above 1": lambda: explain_clip(dual=0.5),
    "probability: expected a probability above 0": lambda: explain_penalty(0.3, 0.0),
    "beta: expected a number above 0": lambda: explain_penalty(beta=0.0),
    "every action needs some probability, or KL": lambda: explain_penalty(
        reference=(1.0, 0.0), rewards=(0.0, 1.0)
    ),
    "every action needs some probability in both": lambda: explain_trust_region(
        (1.0, 0.0), (0.5, 0.5)
    ),
    "max-kl: expected a number above 0": lambda: explain_trust_region(max_kl=-1.0),
    "rewards: empty": lambda: explain_advantage((), ()),
    "lam: expected a number from 0 to 1, got 2": lambda: explain_advantage(lam=2.0),
    "end: 'truncatd' is not one of .* did you mean 'truncated'": lambda: explain_advantage(
        end="truncatd"
    ),
    "P: 'x' is not a number": lambda: parse_numbers("P", "0.5,x"),
    "P: '1/0' is not a number": lambda: parse_numbers("P", "1/0"),
    "P: 'nan' is not finite": lambda: parse_numbers("P", "nan"),
    "P: empty; expected numbers": lambda: parse_numbers("P", " "),
    "P: expected MU,SIGMA, got 3": lambda: parse_gaussian("P", "1,2,3"),
    "must end in .png": lambda: save_picture(explain_clip(), Path("x.bmp")),
    "does not exist": lambda: save_picture(explain_clip(), Path("no/such/folder/x.png")),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named(message: str) -> None:
    with pytest.raises(InputError, match=message):
        BAD[message]()


def test_fractions_are_numbers() -> None:
    assert parse_numbers("P", "1/6, 1/3,1/2") == [1 / 6, 1 / 3, 1 / 2]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.025732, "0.02573"),
        (-1.5, "−1.50000"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (math.nan, "–"),
        (0.0, "0.00000"),
        (1.2e-7, "1.20e−07"),
    ],
)
def test_numbers_are_written_for_people(value: float, text: str) -> None:
    assert number(value) == text


def test_a_bit_is_ln_2_nats() -> None:
    assert bits(math.log(2)) == pytest.approx(1.0)
