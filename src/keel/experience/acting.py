"""Acting: observations in, policy outputs (`make_actor`) or actions (`ActionSelector`) out.

A small MLP is run by the loops that also train it (`keel.kernels.mlp`): at eight environments
that takes a twentieth of torch's time, which is all overhead there. Everything else goes through
torch. The consistency gate holds both to the same numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from keel.distributions.actions import Array
from keel.networks.accelerate import actor_obstacle
from keel.networks.actor_critic import Outputs, SeparateActorCritic
from keel.networks.agent import Agent, load_weights
from keel.types import EPISODE_STARTS, MASK, Tree

if TYPE_CHECKING:
    from keel.envs import ObsNormalizer

Obs = Mapping[str, Array]


class Acted(NamedTuple):
    """Results of an actor's pass beside the policy's outputs."""

    value: Array | None = None
    """`[N]`, where it came for free"""
    hidden_state: dict[str, Array] | None = None
    """the states `[N, H]` to act with next, of recurrent networks"""


Act = Callable[[Obs, Array], Acted]
"""Observations `[N, …]`, and where to write the policy's outputs `[N, K]`."""


def make_actor(agent: Agent, params: Tensor) -> Act:
    """Return the fastest way to act with `params`.

    Args:
        agent: the agent that acts.
        params: `[G, P]`; they must not change while the actor is in use.
    """
    if agent.recurrent:
        return _recurrent_actor(agent, params)
    if actor_obstacle(agent):
        return _torch_actor(agent, params)
    compiled = _compiled_actors if agent.groups > 1 else _compiled_actor
    return compiled(agent, params)


def _compiled_actors(agent: Agent, params: Tensor) -> Act:
    """Run agents one after the other: each has its own parameters, and a column of `[N, A, …]`."""
    assert isinstance(agent.network, SeparateActorCritic)
    (key,) = agent.network.encoder.shapes
    acts = [_compiled_actor(agent, row[None]) for row in agent.of_agents(params)]

    def act(obs: Obs, out: Array) -> Acted:
        x = np.ascontiguousarray(np.moveaxis(obs[key], 1, 0))
        for a, one in enumerate(acts):
            own = np.empty((out.shape[0], out.shape[2]), np.float32)
            one({key: x[a]}, own)
            out[:, a] = own
        return Acted()

    return act


def _compiled_actor(agent: Agent, params: Tensor) -> Act:
    from keel.kernels import (
        mlp as kernels,  # numba is a second and 100 MB, which others need not pay
    )

    network = agent.network
    assert isinstance(network, SeparateActorCritic)
    (key,) = network.encoder.shapes
    row = params[0].cpu().numpy()
    start = agent.layout.slice_of("actor.layers.0.weight").start
    sizes = network.actor.sizes
    tanh = network.actor.act_name == "tanh"
    log_std = None
    if network.head.log_std is not None:
        log_std = row[agent.layout.slice_of("head.log_std")]
    activations, width = np.empty(0, np.float32), int(sizes.sum())
    nothing = Acted()

    def act(obs: Obs, out: Array) -> Acted:
        nonlocal activations
        x = obs[key]
        rows = x.shape[0]
        if activations.size != rows * width:
            activations = np.empty(rows * width, np.float32)
        kernels.act(row, start, sizes, tanh, x.reshape(rows, -1), activations, out)
        if log_std is not None:
            out[:, -log_std.size :] = log_std
        return nothing

    return act


def _torch_actor(agent: Agent, params: Tensor) -> Act:
    outputs = _loaded(agent, params)

    def act(obs: Obs, out: Array) -> Acted:
        tree = {key: _tensor(x, params.device) for key, x in obs.items()}
        with torch.inference_mode():
            policy, value, _ = outputs(tree)
            assert policy is not None
            assert value is not None
            value = agent.value_of(params, value)
        out[:] = policy.cpu().numpy()
        return Acted(value.cpu().numpy())

    return act


def _tensor(x: Array, device: torch.device) -> Tensor:
    """Copy into torch's own memory, row by row: how a matrix lies decides how its products round,
    and an observation from a checkpoint lies otherwise than one from the environment. Images stay
    as they are: the network wants them with their channels last."""
    return torch.from_numpy(x if x.ndim == 4 else np.ascontiguousarray(x)).clone().to(device)


def _loaded(agent: Agent, params: Tensor) -> Callable[[Tree], Outputs]:
    """Return the network at `params`, put together once: a rollout calls it hundreds of times."""
    if agent.groups > 1:
        return lambda obs: agent.outputs(params, obs)
    network = copy.deepcopy(agent.network)
    load_weights(network, agent.layout.unflatten(params[0]))
    return network


def _recurrent_actor(agent: Agent, params: Tensor) -> Act:
    """Return an actor for one row of each sequence; `obs` holds hidden states and their resets."""
    outputs = _loaded(agent, params)

    def act(obs: Obs, out: Array) -> Acted:
        tree = {key: _tensor(x, params.device) for key, x in obs.items()}
        tree = {
            key: x if key in agent.hidden_state_sizes else x[:, None] for key, x in tree.items()
        }
        with torch.inference_mode():
            policy, value, hidden_state = outputs(tree)
            assert policy is not None
            assert value is not None
            assert hidden_state is not None
            value = agent.value_of(params, value)
        out[:] = policy[:, 0].cpu().numpy()
        last = {key: x[:, 0].cpu().numpy() for key, x in hidden_state.items()}
        return Acted(value[:, 0].cpu().numpy(), last)

    return act


def initial_hidden_state(agent: Agent, rows: int) -> dict[str, Array]:
    """Return the zero states at the beginning of an episode, `[rows, H]` each; {} if not recurrent.

    Args:
        agent: the agent that acts.
        rows: number of sequences.
    """
    return {
        key: np.zeros((rows, size), np.float32) for key, size in agent.hidden_state_sizes.items()
    }


class ActionSelector:
    """The one way to act with a frozen policy: normalize, run the network, take the mode or draw.

    Args:
        agent: distribution and network of the policy.
        params: `[G, P]`; they must not change while the selector is in use.
        normalizer: of observations; None leaves them raw.
    """

    def __init__(self, agent: Agent, params: Tensor, normalizer: ObsNormalizer | None) -> None:
        self._agent, self._normalizer = agent, normalizer
        self._act = make_actor(agent, params)

    def __call__(
        self,
        obs: Obs,
        lead: tuple[int, ...],
        hidden_state: Mapping[str, Array],
        episode_starts: Array,
        rng: np.random.Generator | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Return actions `[*lead, …]` in the environment's units, and the next hidden states.

        Args:
            obs: `[*lead, …]` each, raw, with the mask if there is one.
            lead: `(N,)`, or `(N, A)` with several agents.
            hidden_state: `[N, H]` each; empty where nothing is recurrent.
            episode_starts: `[N]` bool, rows whose hidden state begins anew.
            rng: draws actions; None takes the likeliest ones.
        """
        dist = self._agent.dist
        normalized = obs if self._normalizer is None else self._normalizer.apply(dict(obs))
        mask = normalized.get(MASK)
        if hidden_state:
            normalized = {**normalized, **hidden_state, EPISODE_STARTS: episode_starts}
        output = np.zeros((*lead, dist.outputs), np.float32)
        hidden_state = self._act(normalized, output).hidden_state or {}
        if rng is None:
            action = dist.mode(output, mask)
        else:
            action = dist.sample(output, mask, 1.0, dist.noise(lead, rng))
        return dist.to_env(action), dict(hidden_state)
