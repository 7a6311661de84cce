"""The actor on the hot path: observations in, policy outputs out, as numpy arrays.

A small MLP is run in numpy on views of the parameter matrix: at eight environments that takes about
a tenth of torch's time, which is all overhead there. Everything else goes through torch. The
consistency gate holds both to the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from keel.models.agent import Agent
from keel.models.networks import MLP, Separate
from keel.models.sampling import Array
from keel.types import Tree

Obs = Mapping[str, Array]
Act = Callable[[Obs], tuple[Array, Array | None]]
"""Observations `[N, …]` to policy outputs `[N, K]` and, where they come for free, values `[N]`."""

MAX_NUMPY_HIDDEN = 256


def make_actor(agent: Agent, params: Tensor) -> Act:
    """The fastest way to act with `params`, which must not change while it is in use."""
    network = agent.network
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

    def act(obs: Obs) -> tuple[Array, None]:
        x = obs[key].reshape(obs[key].shape[0], -1)
        for weight, bias in layers[:-1]:
            x = squash(x @ weight + bias)
        x = x @ layers[-1][0] + layers[-1][1]
        if log_std is not None:
            x = np.concatenate([x, np.broadcast_to(log_std, (x.shape[0], log_std.shape[0]))], 1)
        return x, None

    return act


def _activation(mlp: MLP) -> Callable[[Array], Array]:
    if mlp.act_name == "tanh":
        return np.tanh
    return lambda x: np.maximum(x, np.float32(0.0))


def _torch_actor(agent: Agent, params: Tensor) -> Act:
    def act(obs: Obs) -> tuple[Array, Array | None]:
        tree: Tree = {key: torch.from_numpy(x).to(params.device) for key, x in obs.items()}
        with torch.inference_mode():
            policy, value = agent.outputs(params, tree, "both")
        assert policy is not None
        assert value is not None
        return policy.cpu().numpy(), value[..., 0].cpu().numpy()

    return act
