"""The compiled loops against numpy, torch and torch's own Adam."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from keel.algorithms.optimizer import BETAS, EPSILON, _adam, _plain_adam, initial_opt_state
from keel.config import Network
from keel.experience.acting import make_actor
from keel.kernels import mlp as kernels
from keel.kernels.steps import adam
from keel.networks.build import build_agent


def test_tanh_is_within_four_ten_millionths() -> None:
    x = np.concatenate([np.linspace(-12, 12, 400_001), [1e30, -1e30, 1e-20]]).astype(np.float32)
    expected = np.tanh(x.astype(np.float64))
    kernels.squash(x, True)
    assert np.abs(x - expected).max() < 4e-7
    assert np.abs(x).max() <= 1.0


@given(st.floats(-5.0, 5.0, width=32))
def test_tanh_is_odd(value: float) -> None:
    pair = np.array([value, -value], np.float32)
    kernels.squash(pair, True)
    assert pair[0] == -pair[1]


def test_what_is_no_number_stays_none() -> None:
    x = np.array([np.nan, np.inf, -np.inf, -3.0], np.float32)
    y = x.copy()
    kernels.squash(x, True)
    kernels.squash(y, False)
    assert np.isnan(x[0])
    assert x[1:3].tolist() == pytest.approx([1.0, -1.0])
    assert np.isnan(y[0])
    assert y[1:].tolist() == [np.inf, 0.0, 0.0]


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("action", [spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,))])
def test_the_compiled_actor_is_the_network(activation: Any, action: Any) -> None:
    network = Network(hidden=(16, 12), activation=activation, log_std=-0.3)
    agent = build_agent(spaces.Box(-1.0, 1.0, (2, 2)), action, network, 0)
    params = agent.initial + 0.2 * torch.randn(agent.initial.shape)
    act = make_actor(agent, params)
    for rows in (5, 8):  # the room grows with the rows
        obs = torch.randn(rows, 2, 2)
        out = np.zeros((rows, agent.dist.outputs), np.float32)
        act({"obs": obs.numpy()}, out)
        expected = agent.outputs(params, {"obs": obs}, "actor").policy
        assert expected is not None
        np.testing.assert_allclose(out, expected.numpy(), atol=2e-6)


def test_three_ways_to_adam_are_one() -> None:
    """torch's optimizer, the general step, the plain one and the compiled one, over five steps."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1, 40, generator=generator)
    reference = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Adam([reference], lr=1e-2, betas=BETAS, eps=EPSILON)
    policy = torch.arange(40) < 20
    general = plain = initial_opt_state(start)
    compiled = np.stack([start[0].numpy(), np.zeros(40), np.zeros(40)]).astype(np.float32)
    for age in range(1, 6):
        gradient = torch.randn(1, 40, generator=generator)
        reference.grad = gradient.clone()
        optimizer.step()
        applied = torch.ones(1, dtype=torch.bool)
        general = _adam(general, gradient, torch.tensor(1e-2), applied, policy)
        plain = _plain_adam(plain, gradient, 1e-2)
        moved = np.empty((3, 40), np.float32)
        ages = np.array([age, age], np.float32)
        row = gradient[0].numpy()
        adam(*compiled, row, 1.0, (1e-2, 1e-2), BETAS, EPSILON, policy.numpy(), ages, moved)
        compiled = moved
    for found in (general.params, plain.params, torch.from_numpy(compiled[:1])):
        torch.testing.assert_close(found, reference.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(general, plain, rtol=1e-5, atol=1e-7)


def test_policy_and_critic_have_learning_rates_of_their_own() -> None:
    """torch's optimizer with two groups of parameters, the general step and the compiled one."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1, 40, generator=generator)
    parts = [torch.nn.Parameter(x.clone()) for x in (start[:, :20], start[:, 20:])]
    groups = [{"params": [part], "lr": lr} for part, lr in zip(parts, (1e-2, 3e-2), strict=True)]
    optimizer = torch.optim.Adam(groups, betas=BETAS, eps=EPSILON)
    policy = torch.arange(40) < 20
    rates = torch.where(policy, 1e-2, 3e-2)
    general = initial_opt_state(start)
    compiled = np.stack([start[0].numpy(), np.zeros(40), np.zeros(40)]).astype(np.float32)
    for age in range(1, 6):
        gradient = torch.randn(1, 40, generator=generator)
        parts[0].grad, parts[1].grad = gradient[:, :20].clone(), gradient[:, 20:].clone()
        optimizer.step()
        general = _adam(general, gradient, rates, torch.ones(1, dtype=torch.bool), policy)
        moved, ages = np.empty((3, 40), np.float32), np.array([age, age], np.float32)
        row = gradient[0].numpy()
        adam(*compiled, row, 1.0, (1e-2, 3e-2), BETAS, EPSILON, policy.numpy(), ages, moved)
        compiled = moved
    expected = torch.cat([part.detach() for part in parts], 1)
    for params in (general.params, torch.from_numpy(compiled[:1])):
        torch.testing.assert_close(params, expected, rtol=1e-5, atol=1e-6)
