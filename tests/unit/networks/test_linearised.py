"""Fisher-vector products of every policy against double backward, and the maps they are made of."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from keel.config import Network
from keel.networks.agent import Agent
from keel.networks.build import build_agent
from keel.networks.fisher import fisher_product
from keel.networks.linearized import linear_policy
from keel.networks.recurrent import ACTOR_HIDDEN_STATE, CRITIC_HIDDEN_STATE, EPISODE_STARTS

VECTOR = spaces.Box(-1.0, 1.0, (5,))
PIXELS = spaces.Box(0, 255, (4, 84, 84), np.uint8)
ACTIONS: dict[str, gymnasium.Space[Any]] = {
    "discrete": spaces.Discrete(4),
    "several": spaces.MultiDiscrete([2, 3]),
    "switches": spaces.MultiBinary(3),
    "box": spaces.Box(-1.0, 1.0, (2,)),
}
HIDDEN = Network(hidden=(8, 7))
POLICIES: dict[str, tuple[gymnasium.Space[Any], str, Network]] = {
    **{f"mlp {name}": (VECTOR, name, HIDDEN) for name in ACTIONS},
    "mlp relu": (VECTOR, "discrete", Network(hidden=(8,), activation="relu")),
    "mlp gelu": (VECTOR, "box", Network(hidden=(8,), activation="gelu")),
    "mlp squashed": (VECTOR, "box", Network(hidden=(8,), squash=True)),
    "mlp state std": (VECTOR, "box", Network(hidden=(8,), state_std=True)),
    "mlp remembers": (VECTOR, "discrete", Network(hidden=(8,), recurrent="both", recurrent_size=6)),
    "decoupled": (VECTOR, "discrete", Network(kind="decoupled", hidden=(8,), features=9)),
    "cnn shared": (PIXELS, "discrete", Network(features=16)),
    "cnn separate": (PIXELS, "discrete", Network(features=16, share=False)),
    "cnn small": (PIXELS, "several", Network(cnn="small", features=16, share=False)),
    "cnn box": (PIXELS, "box", Network(cnn="small", features=16)),
    "cnn remembers": (
        PIXELS,
        "discrete",
        Network(cnn="small", features=8, recurrent="actor", recurrent_size=6),
    ),
}


def make(name: str) -> tuple[Agent, Tensor, dict[str, Tensor]]:
    """An agent, its policy's parameters moved from where they begin, and six rows."""
    space, action, config = POLICIES[name]
    agent = build_agent(space, ACTIONS[action], config, 0)
    generator = torch.Generator().manual_seed(1)
    lead = (2, 3) if agent.recurrent else (6,)
    obs: dict[str, Tensor] = {}
    if space is PIXELS:
        obs["obs"] = torch.randint(0, 256, (*lead, 4, 84, 84), generator=generator).byte()
    else:
        obs["obs"] = torch.randn(*lead, 5, generator=generator)
    if agent.recurrent:
        obs[EPISODE_STARTS] = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
        for key in agent.hidden_state_sizes:
            assert key in (ACTOR_HIDDEN_STATE, CRITIC_HIDDEN_STATE)
            obs[key] = torch.randn(2, 6, generator=generator)
    policy = agent.initial[0, : agent.critic_from]
    return agent, policy + 0.1 * torch.randn(policy.shape, generator=generator), obs


def double_backward(
    agent: Agent,
    policy: Tensor,
    obs: dict[str, Tensor],
    vector: Tensor,
    temperature: float,
    weight: Tensor,
) -> Tensor:
    """The second derivative of the mean KL(old‖new), as other libraries take it."""
    leaf = policy.clone().requires_grad_()
    output = agent.outputs_of(agent.policy_layout.unflatten(leaf), obs, "actor").policy
    assert output is not None
    now = agent.dist.params(output, obs.get("action_mask"), temperature)
    old = {key: x.detach() for key, x in now.items()}
    kl = (weight * agent.dist.kl(old, now)).sum() / weight.sum()
    (slope,) = torch.autograd.grad(kl, leaf, create_graph=True)
    (product,) = torch.autograd.grad(slope @ vector, leaf)
    return product


@pytest.mark.parametrize("name", POLICIES)
def test_a_fisher_vector_product_is_that_of_double_backward(name: str) -> None:
    from keel.networks.recurrent import torch_operations

    agent, policy, obs = make(name)
    vector = torch.randn(policy.shape, generator=torch.Generator().manual_seed(2))
    weight = torch.ones(obs["obs"].shape[: 2 if agent.recurrent else 1])
    weight.view(-1)[1] = 0.0
    product = fisher_product(agent, policy, obs, weight, temperature=1.3, damping=0.1)
    with torch_operations():  # the compiled GRU has one derivative only
        expected = double_backward(agent, policy, obs, vector, 1.3, weight) + 0.1 * vector
    error = (product(vector) - expected).norm() / expected.norm()
    assert error < 1e-4
    assert torch.equal(product(vector), product(vector))


@pytest.mark.parametrize("name", POLICIES)
def test_push_and_pull_are_each_others_transpose(name: str) -> None:
    """⟨J v, u⟩ = ⟨v, Jᵀ u⟩, and J v is what finite differences give."""
    agent, policy, obs = make(name)
    linear = linear_policy(agent, policy, obs, 1.0)
    generator = torch.Generator().manual_seed(3)
    vector = torch.randn(policy.shape, generator=generator)
    pushed = linear.push(vector)
    cotangent = {k: torch.randn(x.shape, generator=generator) for k, x in pushed.items()}
    one = sum((pushed[k] * cotangent[k]).sum().item() for k in pushed)
    other = (linear.pull(cotangent) @ vector).item()
    assert one == pytest.approx(other, rel=2e-3, abs=1e-3)


def test_what_a_mask_rules_out_carries_no_curvature() -> None:
    agent, policy, obs = make("mlp discrete")
    obs["action_mask"] = torch.tensor([[1, 0, 1, 1]] * 6).bool()
    vector = torch.randn(policy.shape, generator=torch.Generator().manual_seed(2))
    rows = torch.ones(6)
    product = fisher_product(agent, policy, obs, rows, temperature=1.0, damping=0.0)(vector)
    expected = double_backward(agent, policy, obs, vector, 1.0, torch.ones(6))
    torch.testing.assert_close(product, expected, rtol=1e-3, atol=1e-6)
    last = agent.policy_layout.slice_of("actor.layers.2.bias")
    assert product[last][1] == 0.0


def test_outputs_are_the_policys_own() -> None:
    for name in POLICIES:
        agent, policy, obs = make(name)
        linear = linear_policy(agent, policy, obs, 1.0)
        params = torch.cat([policy, agent.initial[0, agent.critic_from :]])[None]
        for key, x in agent.policy(params, obs).items():
            torch.testing.assert_close(linear.outputs[key], x, rtol=1e-4, atol=1e-5)
