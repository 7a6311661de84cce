"""Rollouts of three shapes for the regions: steps `[R]`, agents `[R, A]`, tokens `[B, L]`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from keel.algorithms.optimizer import Step, initial_opt_state, make_step
from keel.algorithms.ppo import PPO
from keel.distributions.actions import Categorical, Dist, Gaussian
from keel.experience.batch import Rows, TargetFunction, Targets
from keel.losses.ppo import Objective
from keel.networks.actor_critic import Flatten, Head, SeparateActorCritic
from keel.networks.agent import Agent
from keel.trust_region.certify import Certified
from keel.types import HyperParams, OptimizerState, UpdateReport

FEATURES = 5


@dataclass
class Setting:
    """An agent and a rollout that it sampled itself."""

    agent: Agent
    rows: Rows
    targets: TargetFunction
    opt_state: OptimizerState

    def update(
        self,
        region: Certified | PPO,
        hparams: HyperParams,
        *,
        compiled: bool = False,
        seed: int = 0,
        number: int = 0,
    ) -> tuple[OptimizerState, UpdateReport]:
        proximal = region.region if isinstance(region, Certified) else region
        counted = {"number": number} if isinstance(region, Certified) else {}
        return region.update(
            self.agent,
            self.opt_state,
            self.rows,
            self.targets,
            hparams,
            torch.Generator().manual_seed(seed),
            self.step(proximal, compiled),
            **counted,
        )

    def step(self, region: PPO, compiled: bool = False) -> Step:
        return make_step(
            self.agent,
            region.objective,
            group_axis=self.rows.group_axis,
            max_grad_norm=region.max_grad_norm,
            compiled=compiled,
        )


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
    rows = Rows(
        obs=obs,
        behavior=behavior,
        action=action,
        log_prob=dist.log_prob(behavior, action),
        weight=weight,
        group_axis=1 if groups > 1 else None,
    )
    return Setting(
        agent, rows, lambda _: Targets(advantage, target, value), initial_opt_state(params)
    )


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


SMALL = PPO(epochs=3, minibatch=40, objective=Objective())
"""96 rows in minibatches of 40: two whole ones and a remainder."""
