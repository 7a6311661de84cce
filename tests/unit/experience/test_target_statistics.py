"""What is told of advantages and targets, by hand: every row ends its episode, so that the target
is its reward, and the critic's values are given."""

from __future__ import annotations

import math

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from keel.config import Advantage, Critic, Network
from keel.distributions.actions import Categorical
from keel.experience.rollout import Rollout
from keel.experience.targets import compute_targets
from keel.networks.actor_critic import Flatten, Head, SeparateActorCritic
from keel.networks.agent import Agent
from keel.networks.build import build_agent

BOX = spaces.Box(-1.0, 1.0, (2,))
ALONE = build_agent(BOX, spaces.Discrete(2), Network(hidden=(4,)), 0, Critic())


def pair() -> Agent:
    """Two agents with a network of their own each."""
    flatten, rng = Flatten({"obs": (2,)}, {}), torch.Generator().manual_seed(0)
    return Agent(
        SeparateActorCritic(flatten, (4,), "tanh", Head(2, None), 1, rng), Categorical(2), 2
    )


def statistics(
    agent: Agent, reward: Tensor, value: Tensor, weight: Tensor, names: tuple[str, ...] = ()
) -> dict[str, float]:
    lead = reward.shape
    rollout = Rollout(
        obs={"obs": torch.zeros(*lead, 2)},
        action=torch.zeros(lead, dtype=torch.int64),
        log_prob=torch.zeros(lead),
        behavior={"logits": torch.zeros(*lead, 2)},
        reward=reward,
        terminated=torch.ones(lead, dtype=torch.bool),
        truncated=torch.zeros(lead, dtype=torch.bool),
        weight=weight,
        last_obs={"obs": torch.zeros(*lead[1:], 2)},
        group_axis=2 if names else None,
        agents=names,
    )
    config = Advantage(normalize="none")
    params = agent.initial.expand(agent.groups, -1)
    return compute_targets(agent, params, rollout, config, value)[1]


def column(*values: float) -> Tensor:
    """`[T, 1]`."""
    return torch.tensor(values)[:, None]


@pytest.mark.parametrize(
    ("values", "explained"),
    [
        ((1.0, 2.0, 3.0), 1.0),
        ((11.0, 12.0, 13.0), 1.0),  # a constant error is no variance
        ((2.0, 2.0, 2.0), 0.0),
        ((1.0, 1.0, 2.0), 2 / 3),  # errors 0, 1, 1: variance ⅓ of 1
        ((3.0, 2.0, 1.0), -3.0),  # errors −2, 0, 2: variance 4
    ],
)
def test_explained_variance_of_targets_one_two_and_three(
    values: tuple[float, ...], explained: float
) -> None:
    """A fourth row that does not count has a target of 99 and a value of −99."""
    told = statistics(
        ALONE, column(1.0, 2.0, 3.0, 99.0), column(*values, -99.0), column(1.0, 1.0, 1.0, 0.0)
    )
    assert told["train/explained_variance"] == pytest.approx(explained, abs=1e-6)
    assert told["train/target_mean"] == 2.0
    assert told["train/target_std"] == 1.0
    assert told["train/value_mean"] == pytest.approx(sum(values) / 3)


def test_of_targets_that_do_not_vary_nothing_can_be_explained() -> None:
    told = statistics(ALONE, column(2.0, 2.0), column(1.0, 3.0), column(1.0, 1.0))
    assert math.isnan(told["train/explained_variance"])


def test_a_single_row_has_no_spread() -> None:
    told = statistics(ALONE, column(2.0, 99.0), column(1.5, 0.0), column(1.0, 0.0))
    assert told["train/advantage_raw_mean"] == 0.5
    assert told["train/advantage_raw_std"] == 0.0


def test_every_agent_has_its_own_explained_variance() -> None:
    """The first explains everything; the second's values 4, 4, 7 for 1, 3, 8 leave errors of −3,
    −1 and 1, variance 4 of 13: 9/13. Of all six targets 1, 2, 3, 1, 3, 8 the variance is 34/5 and
    that of the errors 0, 0, 0, −3, −1, 1 is 19/10: 1 − 19/68."""
    reward = torch.tensor([[[1.0, 1.0]], [[2.0, 3.0]], [[3.0, 8.0]]])
    value = torch.tensor([[[1.0, 4.0]], [[2.0, 4.0]], [[3.0, 7.0]]])
    told = statistics(pair(), reward, value, torch.ones(3, 1, 2), ("a", "b"))
    assert told["train/explained_variance/a"] == pytest.approx(1.0)
    assert told["train/explained_variance/b"] == pytest.approx(9 / 13)
    assert told["train/explained_variance"] == pytest.approx(1 - 19 / 68)


def test_the_spread_of_two_advantages() -> None:
    """Rewards 3 and 1 over values of 0: a standard deviation of √2."""
    two = statistics(ALONE, column(3.0, 1.0), torch.zeros(2, 1), torch.ones(2, 1))
    assert two["train/advantage_raw_std"] == pytest.approx(math.sqrt(2.0))
