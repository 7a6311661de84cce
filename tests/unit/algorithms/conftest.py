"""Rollouts of three shapes for the regions: steps `[R]`, agents `[R, A]`, tokens `[B, L]`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.algorithms.critic import CriticFit
from keel.algorithms.optimizer import initial_opt_state, make_step
from keel.algorithms.ppo import PPO
from keel.algorithms.trpo import TRPO
from keel.distributions.actions import Categorical, Dist, Gaussian
from keel.experience.batch import Batch, Experience, Targets
from keel.losses.ppo import Objective
from keel.networks.actor_critic import Flatten, Head, SeparateActorCritic
from keel.networks.agent import Agent
from keel.trust_region.certify import Algorithm
from keel.types import AlgorithmState, HyperParams, OptimizerState, UpdateReport

FEATURES = 5
FIT = CriticFit(epochs=2, minibatch=40)


@dataclass
class Setting:
    """An agent and a batch that it sampled itself."""

    agent: Agent
    batch: Batch
    opt_state: OptimizerState

    def of(self, **changes: Any) -> Setting:
        """The same with another batch."""
        return replace(self, batch=self.batch._replace(**changes))

    @property
    def experience(self) -> Experience:
        """The batch, whose targets are the same whatever the critic is."""
        batch = self.batch
        return Experience(batch, lambda _: Targets(batch.advantage, batch.target, batch.old_value))

    def state(self, seed: int = 0, number: int = 0) -> AlgorithmState:
        return AlgorithmState(self.opt_state, torch.Generator().manual_seed(seed), number)

    def update(
        self, algorithm: Algorithm, hparams: HyperParams, *, seed: int = 0, number: int = 0
    ) -> tuple[OptimizerState, UpdateReport]:
        after, report = algorithm.update(self.state(seed, number), self.experience, hparams)
        return after.opt_state, report


def small(agent: Agent, *, compiled: bool = False, **changes: Any) -> PPO:
    """PPO on 96 rows in minibatches of 40: two whole ones and a remainder."""
    chosen = {"epochs": 3, "minibatch": 40, "objective": Objective(), **changes}
    norm = chosen.get("max_grad_norm", PPO.max_grad_norm)
    step = make_step(agent, chosen["objective"], max_grad_norm=norm, compiled=compiled)
    return PPO(agent, step, **chosen)


def natural(agent: Agent, **changes: Any) -> TRPO:
    """TRPO with the whole Fisher matrix; of several agents every one fits its own critic."""
    chosen = {"critic": FIT, "fisher_fraction": 1.0, **changes}
    critic = chosen["critic"]
    step = make_step(agent.alone(), critic.objective, max_grad_norm=critic.max_grad_norm)
    return TRPO(agent, step, **chosen)


def build(lead: tuple[int, ...], groups: int = 1, dist: Dist | None = None) -> Setting:
    """A setting with rows of shape `lead`; several groups own axis 1."""
    generator = torch.Generator().manual_seed(0)
    dist = dist or Categorical(3)
    log_std = torch.zeros(2) if isinstance(dist, Gaussian) else None
    outputs = 2 if isinstance(dist, Gaussian) else dist.outputs
    network = SeparateActorCritic(
        Flatten({"obs": (FEATURES,)}, {}), (16,), "tanh", Head(outputs, log_std), 1, generator
    )
    agent = Agent(network, dist, groups)
    noise = torch.randn(groups, agent.initial.shape[1], generator=generator)
    params = agent.initial.repeat(groups, 1) + 0.1 * noise
    obs = {"obs": torch.randn(*lead, FEATURES, generator=generator)}
    with torch.no_grad():
        behavior = agent.policy(params, obs)
    action = draw(dist, behavior, generator)
    advantage = torch.randn(lead, generator=generator)
    target = torch.randn(lead, generator=generator)
    value = torch.randn(*lead, 1, generator=generator)
    weight = (torch.rand(lead, generator=generator) < 0.9).float()
    batch = Batch(
        obs=obs,
        behavior=behavior,
        action=action,
        log_prob=dist.log_prob(behavior, action),
        weight=weight,
        group_axis=1 if groups > 1 else None,
        advantage=advantage,
        target=target,
        old_value=value,
    )
    return Setting(agent, batch, initial_opt_state(params))


def draw(dist: Dist, params: dict[str, Tensor], generator: torch.Generator) -> Tensor:
    if isinstance(dist, Gaussian):
        noise = torch.randn(params["mean"].shape, generator=generator)
        return params["mean"] + params["log_std"].exp() * noise
    flat = params["logits"].softmax(-1).reshape(-1, params["logits"].shape[-1])
    chosen = torch.multinomial(flat, 1, generator=generator)
    return chosen.reshape(params["logits"].shape[:-1])


SHAPES: dict[str, Callable[[], Setting]] = {
    "steps": lambda: build((96,)),
    "continuous": lambda: build((96,), dist=Gaussian(2)),
    "agents": lambda: build((96, 3), groups=3),
    "tokens": lambda: build((16, 7)),
}


@pytest.fixture(params=SHAPES)
def setting(request: pytest.FixtureRequest) -> Setting:
    return SHAPES[request.param]()


@pytest.fixture
def agents() -> Setting:
    return SHAPES["agents"]()


@pytest.fixture
def steps() -> Setting:
    return SHAPES["steps"]()
