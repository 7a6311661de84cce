"""The critic's units follow the returns of a rollout after its update, and nothing else moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gymnasium import spaces

from keel.algorithms.optimizer import initial_opt_state
from keel.algorithms.popart import PopArt
from keel.config import Critic, Network
from keel.experience.batch import Batch, Experience, Targets
from keel.losses.ppo import Objective
from keel.networks.agent import Agent
from keel.networks.build import build_agent
from keel.types import AlgorithmState, HyperParams, OptimizerState, UpdateReport

BOX = spaces.Box(-1.0, 1.0, (3,))
OBJECTIVE = Objective()


@dataclass(frozen=True, eq=False)
class Moving:
    """An algorithm that adds 1 to every moment, and 0.5 to the actor's parameters."""

    agent: Agent
    objective: Objective = OBJECTIVE

    def init(self) -> OptimizerState:
        return initial_opt_state(self.agent.initial)

    def update(
        self, state: AlgorithmState, experience: Experience, hparams: HyperParams
    ) -> tuple[AlgorithmState, UpdateReport]:
        given = state.opt_state
        params = torch.where(self.agent.policy_columns, given.params + 0.5, given.params)
        nothing = torch.zeros(1)
        moved = given._replace(params=params, first=given.first + 1.0)
        return AlgorithmState(moved, state.rng, 7), UpdateReport(nothing, nothing, nothing)


def test_units_are_those_of_the_targets_and_values_stay() -> None:
    """Targets 3 and 7 of rows that count: mean 5, standard deviation 2; the third does not."""
    agent = build_agent(BOX, spaces.Discrete(2), Network(hidden=(8,)), 0, Critic(kind="quantile"))
    algorithm = PopArt(Moving(agent))
    assert algorithm.agent is agent
    assert algorithm.objective is OBJECTIVE
    rng = torch.Generator().manual_seed(0)
    obs = {"obs": torch.randn(3, 3, generator=rng)}
    zero, target = torch.zeros(3), torch.tensor([3.0, 7.0, 99.0])
    batch = Batch(obs, {}, zero.long(), zero, torch.tensor([1.0, 1.0, 0.0]), target=target)
    unused: Any = Targets
    state = AlgorithmState(algorithm.init(), rng)
    after, _ = algorithm.update(state, Experience(batch, unused), HyperParams())
    assert after.updates == 7
    assert after.rng is rng
    params = after.opt_state.params
    assert params[0, -3:].tolist() == pytest.approx([5.0, 2.0, 1.0])
    assert torch.equal(after.opt_state.first, state.opt_state.first + 1.0)
    policy = agent.policy_columns.reshape(-1)
    assert torch.equal(params[0, policy], agent.initial[0, policy] + 0.5)
    torch.testing.assert_close(
        agent.value(params, obs), agent.value(agent.initial, obs), rtol=1e-4, atol=1e-4
    )
