from __future__ import annotations

import torch

from keel.functional import gae
from keel.rollout.faults import interleaved


def test_interleaving_reads_other_agents_as_the_future() -> None:
    """Two agents, one step, rewards 1 and 10, no values: the first gets γλ of the second's."""
    reward = torch.tensor([[[1.0, 10.0]]])
    zeros, no = torch.zeros(1, 1, 2), torch.zeros(1, 1, 2, dtype=torch.bool)
    found = interleaved(
        reward, zeros, torch.zeros(1, 2), ~no, no, zeros,
        gamma=0.5, lam=0.5, weight=torch.ones(1, 1, 2),
    )  # fmt: skip
    assert found.advantage.tolist() == [[[1.0 + 0.25 * 10.0, 10.0]]]


def test_with_one_agent_there_is_nothing_to_interleave() -> None:
    torch.manual_seed(0)
    reward, value, final = torch.randn(3, 9, 4, 1)
    last, weight = torch.randn(4, 1), torch.ones(9, 4, 1)
    terminated, truncated = torch.rand(2, 9, 4, 1) < 0.1
    following = torch.cat([value[1:], last[None]])
    final = torch.where(truncated, final, following)
    given = (reward, value, last, terminated, truncated & ~terminated, final)
    a = interleaved(*given, gamma=0.9, lam=0.8, weight=weight)
    b = gae(*given, gamma=0.9, lam=0.8, weight=weight)
    assert torch.allclose(a.advantage, b.advantage)
    assert torch.allclose(a.target, b.target)
