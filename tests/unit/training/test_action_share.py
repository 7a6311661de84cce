"""How often the commonest action was taken."""

from __future__ import annotations

import torch

from keel.experience.rollout import Rollout
from keel.training.environments import _action_share


def rollout(action: torch.Tensor, weight: torch.Tensor) -> Rollout:
    nothing = torch.zeros(weight.shape)
    return Rollout({}, action, nothing, {}, nothing, nothing, nothing, weight, {})


def test_the_commonest_of_the_steps_that_count() -> None:
    """Of four steps that count, three took action 2; the fifth does not count."""
    action = torch.tensor([[2, 2], [2, 0], [0, 0]])
    weight = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    assert _action_share(rollout(action, weight)) == {"rollout/action_share_max": 0.75}


def test_there_is_none_of_other_actions() -> None:
    weight = torch.ones(3, 2)
    assert _action_share(rollout(torch.zeros(3, 2, 4), weight)) == {}
    assert _action_share(rollout(torch.zeros(3, 2, 4, dtype=torch.int64), weight)) == {}
    assert _action_share(rollout(torch.zeros(3, 2, dtype=torch.int64), 0.0 * weight)) == {}
