"""Weights of demonstrations: by hand, and free of the unit of reward."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.errors import InputError
from keel.functional import cloning_weight

ADVANTAGE = torch.tensor([-3.0, 0.0, 1.0, 5.0])


def test_plain_takes_all_alike():
    found = cloning_weight(ADVANTAGE, "plain")
    assert found.weight.tolist() == [1.0, 1.0, 1.0, 1.0]
    assert found.used.item() == 1.0
    assert found.at_cap.item() == 0.0


def test_filtered_takes_only_what_was_better_than_expected():
    found = cloning_weight(ADVANTAGE, "filtered")
    assert found.weight.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert found.used.item() == 0.5


def test_weights_by_hand():
    """rms of (3, 4, 0, 0) is √(25/4) = 2.5; at temperature 2: exp(3/5), exp(4/5), 1, 1."""
    found = cloning_weight(torch.tensor([3.0, 4.0, 0.0, 0.0]), "weighted", temperature=2.0, cap=2.0)
    expected = [math.exp(0.6), 2.0, 1.0, 1.0]
    assert found.weight.tolist() == pytest.approx(expected)
    assert found.at_cap.item() == 0.25
    assert found.used.item() == 1.0


@pytest.mark.parametrize("unit", [1.0, 0.01])
def test_the_temperature_is_one_unless_told_in_any_unit(unit):
    """Again rms 2.5 units: exp(3/2.5), exp(4/2.5)."""
    found = cloning_weight(unit * torch.tensor([3.0, 4.0, 0.0, 0.0]), "weighted")
    assert found.weight.tolist() == pytest.approx([math.exp(1.2), math.exp(1.6), 1.0, 1.0])


def test_the_cap_is_twenty_unless_told_and_no_weight_is_above_e_to_the_fifty():
    """One step of 3,600 is better: its advantage is √3600 = 60 times the root mean square."""
    advantage = torch.zeros(3600, dtype=torch.float64)
    advantage[0] = 7.0
    assert cloning_weight(advantage, "weighted").weight[0].item() == 20.0
    far = cloning_weight(advantage, "weighted", cap=1e30).weight[0].item()
    assert far == pytest.approx(math.exp(50))


@pytest.mark.parametrize("size", [0, 1])
def test_shares_of_one_step_or_none(size):
    found = cloning_weight(torch.ones(size), "weighted", cap=1.0)
    assert (found.used.item(), found.at_cap.item()) == (size, size)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20),
    st.floats(0.01, 100.0),
    st.floats(0.1, 50.0),
    st.floats(1e-3, 1e3),
)
def test_weights_do_not_depend_on_the_unit_of_reward(values, temperature, cap, unit):
    advantage = torch.tensor(values, dtype=torch.float64)
    if advantage.square().mean().sqrt() < 1e-6:
        return
    a = cloning_weight(advantage, "weighted", temperature=temperature, cap=cap)
    b = cloning_weight(advantage * unit, "weighted", temperature=temperature, cap=cap)
    torch.testing.assert_close(a.weight, b.weight, rtol=1e-6, atol=1e-12)
    assert (a.weight <= cap).all()
    order = advantage.argsort()
    assert (a.weight[order].diff() >= -1e-12).all()


def test_without_any_advantage_all_weigh_the_same():
    assert cloning_weight(torch.zeros(3), "weighted").weight.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"cap": 0.0}, {"cap": math.nan}])
def test_impossible_settings_are_named(wrong):
    with pytest.raises(InputError, match="above 0"):
        cloning_weight(ADVANTAGE, "weighted", **wrong)
    with pytest.raises(InputError, match="did you mean 'weighted'"):
        cloning_weight(ADVANTAGE, "weightd")  # type: ignore[arg-type]
