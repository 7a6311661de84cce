"""Groups within which advantages are normalized: where they come from, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from keel.config import Advantage
from keel.errors import InputError
from keel.experience.rollout import Rollout
from keel.experience.targets import check_groups, group_of

GROUPED = Advantage(normalize="group")


def rollout(*lead: int, **more: Any) -> Rollout:
    zero = torch.zeros(lead)
    obs = more.pop("obs", {"obs": zero})
    return Rollout(obs, zero, zero, {}, zero, zero, zero, torch.ones(lead), {}, **more)


def too_few(obs: dict[str, np.ndarray]) -> np.ndarray:
    return np.zeros(3, np.int64)


def fractions(obs: dict[str, np.ndarray]) -> np.ndarray:
    return np.ones((2, 3))


def below_zero(obs: dict[str, np.ndarray]) -> np.ndarray:
    return np.full((2, 3), -1)


def thirds(obs: dict[str, np.ndarray]) -> np.ndarray:
    return np.broadcast_to(np.arange(3), (2, 3))


@pytest.mark.parametrize("name", ["too_few", "fractions", "below_zero"])
def test_groups_are_whole_numbers_for_every_row(name: str) -> None:
    config = Advantage(normalize="group", group=f"{__name__}:{name}")
    with pytest.raises(InputError, match=rf"{name}: expected whole numbers from 0, \[2, 3\]"):
        group_of(rollout(2, 3), config)


def test_groups_of_a_function() -> None:
    found = group_of(rollout(2, 3), Advantage(normalize="group", group=f"{__name__}:thirds"))
    assert found is not None
    assert found.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_every_agent_is_a_group_where_no_other_is_named() -> None:
    agents = group_of(rollout(2, 1, 3, group_axis=2), GROUPED)
    assert agents is not None
    assert agents.tolist() == [[[0, 1, 2]], [[0, 1, 2]]]
    own = torch.full((2, 1, 3), 5)
    named = group_of(rollout(2, 1, 3, group_axis=2, obs={"group": own}), GROUPED)
    assert named is not None
    assert torch.equal(named, own)


def test_groups_have_to_be_known_only_where_they_are_needed() -> None:
    with pytest.raises(InputError, match="the environment names no group"):
        check_groups(GROUPED, {"obs"}, many=False)
    check_groups(GROUPED, {"obs"}, many=True)
    check_groups(GROUPED, {"obs", "group"}, many=False)
    check_groups(Advantage(normalize="batch"), {"obs"}, many=False)
