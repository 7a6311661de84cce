"""The policy's first-order model: what Fisher-vector products are made of.

torch's forward mode computes the network anew for every product. Its activations do not change
between products, so for CNNs they are kept: a product is then one pass of tangents up and one of
cotangents down, twice as fast as a double backward. Everything else goes through torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from keel.functional.natural import Linear, linearize
from keel.networks.actor_critic import MLP
from keel.networks.agent import Agent
from keel.networks.recurrent import torch_operations
from keel.networks.shared import CNN, SharedActorCritic
from keel.types import MASK, Tree


def linear_policy(agent: Agent, policy: Tensor, obs: Tree, temperature: float) -> Linear:
    """Linearize the distribution's parameters at `obs` as a function of the policy's parameters.

    Args:
        agent: a single agent.
        policy: the policy's parameters, `[P]`.
        obs: tree of `[*lead, …]`.
        temperature: of the policy.
    """
    mask = obs.get(MASK)
    outputs = _linear_outputs(agent, policy, obs)
    raw = outputs.outputs["output"]

    def settle(output: Tensor) -> Tree:
        return agent.dist.params(output, mask, temperature)

    settled, transpose = torch.func.vjp(settle, raw)[:2]

    def push(vector: Tensor) -> Tree:
        tangent = outputs.push(vector)["output"]
        pushed: Tree = torch.func.jvp(settle, (raw,), (tangent,))[1]
        return pushed

    def pull(cotangent: Tree) -> Tensor:
        return outputs.pull({"output": transpose(cotangent)[0]})

    return Linear({key: x.detach() for key, x in settled.items()}, push, pull)


def _linear_outputs(agent: Agent, policy: Tensor, obs: Tree) -> Linear:
    stages = _stages(agent)
    if stages is not None:
        return _linear_cnn(agent, stages, policy, obs)
    layout = agent.policy_layout

    def outputs(tree: Tree) -> Tree:
        with torch_operations():
            output = agent.outputs_of(tree, obs, "actor").policy
        assert output is not None
        return {"output": output}

    return linearize(outputs, layout.unflatten(policy))  # type: ignore[arg-type]


class _Stage(NamedTuple):
    """A convolution or a linear layer; a ReLU follows all but the last."""

    name: str
    layer: nn.Conv2d | nn.Linear
    scale: float = 1.0


def _stages(agent: Agent) -> list[_Stage] | None:
    """Return the layers of a policy that is a CNN with a linear head; None for any other."""
    network = agent.network
    if not isinstance(network, SharedActorCritic) or network.head.log_std is not None:
        return None
    trunk, actor = network.trunk, network.actor
    if isinstance(trunk, CNN) and isinstance(actor, MLP):
        parts = [("trunk", trunk), ("actor", actor)]
    elif isinstance(actor, nn.Sequential) and isinstance(actor[0], CNN):
        parts = [("actor.0", actor[0]), ("actor.1", actor[1])]
    else:
        return None
    (cnn_name, cnn), (mlp_name, mlp) = parts
    assert isinstance(cnn, CNN)
    assert isinstance(mlp, MLP)
    stages = []
    for i, layer in enumerate(cnn.convolutions):
        assert isinstance(layer, nn.Conv2d)
        stages.append(_Stage(f"{cnn_name}.convolutions.{i}", layer, cnn.scale if i == 0 else 1.0))
    stages.append(_Stage(f"{cnn_name}.linear", cnn.linear))
    for i, layer in enumerate(mlp.layers):
        assert isinstance(layer, nn.Linear)
        stages.append(_Stage(f"{mlp_name}.layers.{i}", layer))
    return stages


def _linear_cnn(agent: Agent, stages: list[_Stage], policy: Tensor, obs: Tree) -> Linear:
    layout = agent.policy_layout
    tree = layout.unflatten(policy.detach())
    weights = [_weight(tree, stage) for stage in stages]
    encoder: Callable[[Tree], Tensor] = agent.network.encoder  # type: ignore[assignment]
    x = encoder(obs)
    lead = x.shape[:-3]
    x = x.reshape(-1, *x.shape[-3:]).to(memory_format=torch.channels_last).float()
    inputs, activations = [], []  # what each stage takes, and what its ReLU gives
    for stage, weight in zip(stages, weights, strict=True):
        x = _fit(x, stage)
        inputs.append(x)
        x = _apply(x, weight, tree[f"{stage.name}.bias"], stage)
        if stage is not stages[-1]:
            torch.relu_(x)
        activations.append(x)
    last = len(stages) - 1

    def push(vector: Tensor) -> Tree:
        moved = layout.unflatten(vector)
        tangent: Tensor | None = None
        for i, stage in enumerate(stages):
            pushed = _apply(inputs[i], _weight(moved, stage), moved[f"{stage.name}.bias"], stage)
            if tangent is not None:
                pushed += _apply(_fit(tangent, stage), weights[i], None, stage)
            tangent = pushed if i == last else _gate(pushed, activations[i])
        assert tangent is not None
        return {"output": tangent.reshape(*lead, -1)}

    def pull(cotangent: Tree) -> Tensor:
        slope = cotangent["output"].reshape(-1, cotangent["output"].shape[-1])
        gradient: Tree = {}
        for i in range(last, -1, -1):
            stage = stages[i]
            if i < last:
                slope = _gate(_unfit(slope, activations[i]), activations[i])
            slope, weight, bias = _transpose(slope, inputs[i], weights[i], stage, inner=i > 0)
            gradient[f"{stage.name}.weight"] = weight.mul_(stage.scale) if i == 0 else weight
            gradient[f"{stage.name}.bias"] = bias
        return torch.cat([gradient[name].reshape(-1) for name in layout.names])

    return Linear({"output": x.reshape(*lead, -1)}, push, pull)


def _weight(tree: Tree, stage: _Stage) -> Tensor:
    weight = tree[f"{stage.name}.weight"]
    return weight * stage.scale if stage.scale != 1.0 else weight


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None, stage: _Stage) -> Tensor:
    if isinstance(stage.layer, nn.Conv2d):
        return nn.functional.conv2d(x, weight, bias, stage.layer.stride)
    return nn.functional.linear(x, weight, bias)


def _fit(x: Tensor, stage: _Stage) -> Tensor:
    """Lay out a convolution's result as a linear layer takes it: flat, channels last as it lies."""
    if isinstance(stage.layer, nn.Linear) and x.ndim == 4:
        return x.permute(0, 2, 3, 1).flatten(1)
    return x


def _unfit(slope: Tensor, like: Tensor) -> Tensor:
    """Invert `_fit`."""
    if like.ndim != 4 or slope.ndim == 4:
        return slope
    rows, channels, height, width = like.shape
    return slope.reshape(rows, height, width, channels).permute(0, 3, 1, 2)


def _gate(x: Tensor, activation: Tensor) -> Tensor:
    """Apply the derivative of a ReLU that gave `activation` to `x`."""
    gated: Tensor = torch.ops.aten.threshold_backward(x, activation, 0.0)
    return gated


def _transpose(
    slope: Tensor, x: Tensor, weight: Tensor, stage: _Stage, *, inner: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return cotangents of a stage's input (unless it is the first), its weight and its bias."""
    if isinstance(stage.layer, nn.Linear):
        return slope @ weight, slope.T @ x, slope.sum(0)
    below, change, bias = torch.ops.aten.convolution_backward(
        slope,
        x,
        weight,
        [weight.shape[0]],
        stage.layer.stride,
        (0, 0),
        (1, 1),
        False,
        (0, 0),
        1,
        (inner, True, True),
    )
    return below, change, bias
