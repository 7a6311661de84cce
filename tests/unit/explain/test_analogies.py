"""KL as a detour, a projection, a spring, and over the states of a game: numbers by hand."""

from __future__ import annotations

import math
from math import log, log2

import pytest
import torch

from keel.errors import InputError
from keel.explain import (
    explain_code_length,
    explain_kl,
    explain_landscape,
    explain_penalty,
    explain_projection,
    explain_states,
    explain_trust_region,
)


def test_the_detour_of_a_wrong_map() -> None:
    """Places 1 bit away each; the map has them at 2 and log₂(4/3) bits: (1 + 0.415 − 1) / 2."""
    numbers = explain_code_length([0.5, 0.5], [0.25, 0.75]).numbers
    assert numbers["shortest_bits"] == pytest.approx(1.0)
    assert numbers["detour_bits"] == pytest.approx((2.0 + log2(4 / 3)) / 2 - 1.0)
    assert [place["weighted_detour"] for place in numbers["outcomes"]] == pytest.approx(
        [0.5, (log2(4 / 3) - 1) / 2]
    )


def test_the_detour_is_the_kl_in_bits() -> None:
    p, q = [0.7, 0.2, 0.1], [0.5, 0.3, 0.2]
    numbers = explain_code_length(p, q).numbers
    assert numbers["detour_bits"] == pytest.approx(explain_kl(p, q).numbers["kl_bits"])
    assert numbers["mapped_bits"] == pytest.approx(1.2796, abs=5e-5)


def test_a_place_without_a_road_is_infinitely_far() -> None:
    explanation = explain_code_length([0.5, 0.5], [1.0, 0.0], names=["here", "there"])
    assert explanation.numbers["detour_bits"] == math.inf
    assert "no road to 'there'" in explanation.meaning


def test_a_place_that_is_never_visited_costs_nothing() -> None:
    """−log₂ ½ = 1 bit to the only place that counts, where 0 would do."""
    numbers = explain_code_length([1.0, 0.0], [0.5, 0.5]).numbers
    assert numbers["shortest_bits"] == 0.0
    assert numbers["detour_bits"] == pytest.approx(1.0)


def test_a_projection_loses_the_mutual_information() -> None:
    """Shadows 0.6, 0.4: Q = 0.36, 0.24, 0.24, 0.16."""
    numbers = explain_projection(((0.5, 0.1), (0.1, 0.3))).numbers
    lost = 0.5 * log(0.5 / 0.36) + 0.2 * log(0.1 / 0.24) + 0.3 * log(0.3 / 0.16)
    assert numbers["projection"] == [pytest.approx([0.36, 0.24]), pytest.approx([0.24, 0.16])]
    assert numbers["kl_nats"] == pytest.approx(lost)
    assert numbers["kl_nats"] == pytest.approx(
        numbers["entropy_rows_nats"] + numbers["entropy_columns_nats"]
        - numbers["entropy_joint_nats"]
    )  # fmt: skip


def test_parts_that_decide_each_other_lose_a_whole_bit() -> None:
    assert explain_projection(((0.5, 0.0), (0.0, 0.5))).numbers["kl_bits"] == pytest.approx(1.0)


def test_independent_parts_lose_nothing() -> None:
    explanation = explain_projection(((0.06, 0.14), (0.24, 0.56)))
    assert explanation.numbers["kl_nats"] == pytest.approx(0.0, abs=1e-12)
    assert "Nothing is lost" in explanation.meaning


def test_no_other_independent_distribution_is_nearer() -> None:
    """KL(P‖R) = KL(P‖Q) + KL(Q‖R) for R of independent parts; here R has shadows 0.5 and 0.7."""
    p = [0.5, 0.1, 0.1, 0.3]
    numbers = explain_projection((p[:2], p[2:])).numbers
    q = [x for row in numbers["projection"] for x in row]
    r = [0.5 * 0.7, 0.5 * 0.3, 0.5 * 0.7, 0.5 * 0.3]
    other, rest = explain_kl(p, r).numbers["kl_nats"], explain_kl(q, r).numbers["kl_nats"]
    assert other == pytest.approx(numbers["kl_nats"] + rest)


def test_the_kl_of_each_state_of_the_game() -> None:
    """0.9 log 9 − 0.1 log 9 = 0.8 log 9, and 0.8 log 4 − 0.2 log 4 = 0.6 log 4."""
    numbers = explain_states().numbers
    assert [state["kl_nats"] for state in numbers["states"]] == pytest.approx(
        [0.8 * log(9), 0.6 * log(4)]
    )
    assert numbers["mean_kl_nats"] == pytest.approx(0.4 * log(9) + 0.3 * log(4))
    assert numbers["inside"] is False
    assert 0.005 <= numbers["mean_kl_kept_nats"] <= 0.01


def test_a_careful_policy_stands() -> None:
    """Half of 0.9 log(0.9/0.92) + 0.1 log(0.1/0.08) + 0.8 log(0.8/0.83) + 0.2 log(0.2/0.17)."""
    explanation = explain_states(new=((0.92, 0.08), (0.83, 0.17)))
    first = 0.9 * log(0.9 / 0.92) + 0.1 * log(0.1 / 0.08)
    second = 0.8 * log(0.8 / 0.83) + 0.2 * log(0.2 / 0.17)
    assert explanation.numbers["mean_kl_nats"] == pytest.approx((first + second) / 2)
    assert explanation.numbers["fraction_kept"] == 1.0
    assert "Inside: the update spends 28%" in explanation.meaning


def test_visits_weigh_the_states() -> None:
    numbers = explain_states(visits=(0.25, 0.75)).numbers
    assert numbers["mean_kl_nats"] == pytest.approx(0.25 * 0.8 * log(9) + 0.75 * 0.6 * log(4))


def test_one_state_is_the_trust_region_of_one_policy() -> None:
    old, new = (0.4, 0.3, 0.2, 0.1), (0.45, 0.35, 0.15, 0.05)
    one, many = explain_trust_region(old, new).numbers, explain_states([old], [new]).numbers
    assert many["mean_kl_nats"] == pytest.approx(one["kl_requested_nats"])
    assert many["fraction_kept"] == pytest.approx(one["fraction_kept"])


def test_forces_are_in_balance_where_the_policy_rests() -> None:
    numbers = explain_landscape(beta=0.5).numbers
    assert numbers["spring"] == pytest.approx([-x for x in numbers["pull"]])
    assert numbers["policy"] == explain_penalty(beta=0.5).numbers["optimal_policy"]


def test_forces_are_the_gradients_in_the_logits() -> None:
    logits = torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64).log() + torch.tensor(
        [2.0, 0.0, 1.0]
    )
    logits = logits.detach().requires_grad_()
    p = logits.softmax(-1)
    (pull,) = torch.autograd.grad(p @ torch.tensor([1.0, 0.0, 0.5]).double(), logits)
    assert explain_landscape(beta=0.5).numbers["pull"] == pytest.approx(pull.tolist())


def test_a_flat_landscape_pulls_nowhere() -> None:
    explanation = explain_landscape(rewards=(2.0, 2.0, 2.0))
    assert explanation.numbers["kl_nats"] == pytest.approx(0.0, abs=1e-12)
    assert "nothing pulls" in explanation.meaning


BAD = {
    "P and Q differ in length": lambda: explain_code_length([0.5, 0.5], [1.0]),
    "P: nan is not a probability": lambda: explain_code_length([math.nan, 1.0], [0.5, 0.5]),
    "P: expected rows of the same length, got lengths 2, 1": lambda: explain_projection(
        ((0.5, 0.2), (0.3,))
    ),
    "P: expected rows of the same length, got lengths none": lambda: explain_projection(()),
    "P: the probabilities sum to 0.9": lambda: explain_projection(((0.5, 0.4),)),
    "names: got 1 names for 2 rows": lambda: explain_projection(rows=["a"]),
    "old: empty": lambda: explain_states((), ()),
    "old and new: got 2 and 1 states": lambda: explain_states(new=((0.5, 0.5),)),
    "names: got 1 names for 2 states": lambda: explain_states(states=["a"]),
    "new, state b: the probabilities sum to 0.9": lambda: explain_states(
        new=((0.5, 0.5), (0.5, 0.4)), states=["a", "b"]
    ),
    "state 1: every action needs some probability": lambda: explain_states(
        [[1.0, 0.0]], [[0.5, 0.5]]
    ),
    "names: got the actions of 1 states for 2": lambda: explain_states(names=[["a", "b"]]),
    "names: got 1 names for 2 actions of state 1": lambda: explain_states(names=[["a"], ["b"]]),
    "visits: got 1 numbers for 2 states": lambda: explain_states(visits=[1.0]),
    "max-kl: expected a number above 0": lambda: explain_states(max_kl=0.0),
    "landscape: expected 3 actions, got 2": lambda: explain_landscape((0.5, 0.5), (1.0, 0.0)),
    "every action needs some probability, or KL": lambda: explain_landscape((0.5, 0.5, 0.0)),
    "beta: expected a number above 0": lambda: explain_landscape(beta=-1.0),
    r"rewards\[0\]: expected a finite number": lambda: explain_landscape(
        rewards=(math.inf, 0.0, 0.0)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named(message: str) -> None:
    with pytest.raises(InputError, match=message):
        BAD[message]()
