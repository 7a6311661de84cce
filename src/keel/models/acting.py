"""The actor on the hot path: observations in, policy outputs out, as numpy arrays.

A small MLP is run in numpy on views of the parameter matrix: at eight environments that takes about
a tenth of torch's time, which is all overhead there. Everything else goes through torch. The
consistency gate holds both to the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from keel.models.agent import Agent
from keel.models.networks import MLP, Separate
from keel.models.sampling import Array
from keel.types import Tree

Obs = Mapping[str, Array]


class Acted(NamedTuple):
    """What an actor's pass gave beside the policy's outputs."""

    value: Array | None = None
    """`[N]`, where it came for free"""
    memory: dict[str, Array] | None = None
    """the states `[N, H]` to act with next, of networks that remember"""


Act = Callable[[Obs, Array], Acted]
"""Observations `[N, …]`, and where to write the policy's outputs `[N, K]`."""

MAX_NUMPY_HIDDEN = 256


def make_actor(agent: Agent, params: Tensor) -> Act:
    """The fastest way to act with `params`, which must not change while it is in use."""
    network = agent.network
    if agent.memory:
        return _remembering_actor(agent, params)
    if agent.groups == 1 and isinstance(network, Separate) and _is_small(network):
        return _numpy_actor(agent, network, params)
    return _torch_actor(agent, params)


def _is_small(network: Separate) -> bool:
    simple = len(network.encoder.shapes) == 1 and not network.encoder.classes
    widths = [bias.numel() for name, bias in network.actor.named_parameters() if "bias" in name]
    return simple and max(widths) <= MAX_NUMPY_HIDDEN and network.actor.act_name != "gelu"


def _numpy_actor(agent: Agent, network: Separate, params: Tensor) -> Act:
    (key,) = network.encoder.shapes
    views = {name: x.numpy() for name, x in agent.layout.unflatten(params[0].cpu()).items()}
    layers = [
        (views[f"actor.layers.{i}.weight"].T, views[f"actor.layers.{i}.bias"])
        for i in range(len(network.actor.layers))
    ]
    squash = _activation(network.actor)
    log_std = views.get("head.log_std")
    means = layers[-1][1].size
    hidden: list[Array] = []

    def act(obs: Obs, out: Array) -> Acted:
        x = obs[key].reshape(obs[key].shape[0], -1)
        if not hidden or hidden[0].shape[0] != x.shape[0]:
            hidden[:] = [np.empty((x.shape[0], b.size), np.float32) for _, b in layers[:-1]]
        for (weight, bias), y in zip(layers, hidden, strict=False):  # all but the last
            np.matmul(x, weight, out=y, casting="same_kind")
            y += bias
            squash(y, out=y)
            x = y
        output = x @ layers[-1][0]
        output += layers[-1][1]
        out[:, :means] = output
        if log_std is not None:
            out[:, means:] = log_std
        return Acted()

    return act


def _activation(mlp: MLP) -> Callable[..., Array]:
    if mlp.act_name == "tanh":
        return np.tanh
    return lambda x, out: np.maximum(x, np.float32(0.0), out=out)


def _torch_actor(agent: Agent, params: Tensor) -> Act:
    def act(obs: Obs, out: Array) -> Acted:
        tree: Tree = {key: torch.from_numpy(x).to(params.device) for key, x in obs.items()}
        with torch.inference_mode():
            policy, value, _ = agent.outputs(params, tree)
        assert policy is not None
        assert value is not None
        out[:] = policy.cpu().numpy()
        return Acted(value[..., 0].cpu().numpy())

    return act


def _remembering_actor(agent: Agent, params: Tensor) -> Act:
    """One row of each sequence; `obs` holds the states and `starts` as well."""

    def act(obs: Obs, out: Array) -> Acted:
        tree: Tree = {key: torch.from_numpy(x).to(params.device) for key, x in obs.items()}
        tree = {key: x if key in agent.memory else x[:, None] for key, x in tree.items()}
        with torch.inference_mode():
            policy, value, memory = agent.outputs(params, tree)
        assert policy is not None
        assert value is not None
        assert memory is not None
        out[:] = policy[:, 0].cpu().numpy()
        states = {key: x[:, 0].cpu().numpy() for key, x in memory.items()}
        return Acted(value[:, 0, 0].cpu().numpy(), states)

    return act


def blank_memory(agent: Agent, rows: int) -> dict[str, Array]:
    """What a network remembers before anything happened, `[rows, H]` each; nothing without one."""
    return {key: np.zeros((rows, size), np.float32) for key, size in agent.memory.items()}
