"""Networks from outside: any module of torch as actor and critic.

`network.kind` names or is a callable `(observation_space, action_space)` that returns

- a module whose `forward(obs)` gives `(distribution parameters, value)`,
- a pair of modules `(actor, critic)`, one for each, or
- a module with an attribute `features_dim`, whose `forward(obs)` gives features `[B, F]`: the last
  layers are Keel's.

`obs` is a tensor `[B, *shape]` of the space's dtype, or a dictionary of them for a Dict space. The
distribution is that of the action space: logits for choices; for a Box means `[B, D]` (the
log-stds are then a parameter of Keel's), means and log-stds side by side `[B, 2·D]`, or a pair of
both. A value is `[B]`, `[B, 1]`, or `[B, Q]` for a critic of Q numbers.

What the values alone depend on is the critic; it keeps its step when the policy is walked back.
Buffers and frozen parameters are saved with the weights, and nothing moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from keel.config import Network
from keel.distributions.actions import Dist
from keel.errors import InputError
from keel.networks.actor_critic import FEATURES, MLP, Outputs, Part, widen
from keel.types import MASK, Tree

if TYPE_CHECKING:
    from keel.networks.critics import Critic

ROWS = 3
"""Observations that a new network is tried on."""
RANDOM = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
"""Modules that give other outputs in training: replaying a rollout could not give ratio 1."""


class Weight(NamedTuple):
    """A parameter or a buffer of a network from outside."""

    name: str
    """with its role: `trunk`, `actor`, `head` or `critic`"""
    path: str
    """in the module that holds it"""
    learns: bool


class OwnActorCritic(nn.Module):
    """Modules from outside, as Keel's agents call a network.

    Args:
        whole: gives policy and value of an observation; None where the parts below do.
        trunk: gives what actor and critic see; None: they see the observation.
        actor: gives the policy.
        critic: gives the value.
        shapes: of one observation, by key; one that is called `obs` is given without its name.
    """

    ragged = one_by_one = True
    """Shapes inside are not known."""

    def __init__(
        self,
        whole: nn.Module | None,
        trunk: nn.Module | None,
        actor: nn.Module | None,
        critic: nn.Module | None,
        shapes: dict[str, tuple[int, ...]],
    ) -> None:
        super().__init__()
        self.whole, self.trunk, self.actor, self.critic = whole, trunk, actor, critic
        self.shapes = shapes
        self.head = nn.Module()
        self.weights: tuple[Weight, ...] = ()

    def forward(self, obs: Tree, part: Part = "both") -> Outputs:
        """Run actor and critic, or the part asked for."""
        x, lead = self._observation(obs)
        if self.whole is not None:
            policy, value = self.whole(x)
        else:
            if self.trunk is not None:
                x = self.trunk(x)
            policy = None if part == "critic" else self.actor(x)  # type: ignore[misc]
            value = None if part == "actor" else self.critic(x)  # type: ignore[misc]
        return Outputs(
            None if part == "critic" else self._policy(policy).reshape(*lead, -1),
            None if part == "actor" else value.reshape(*lead, -1),
        )

    def pure(self, params: Tree, obs: Tree, part: Part = "both") -> Outputs:
        """Run with other parameters, by the names of `weights`; what is missing is its own."""
        tree = {
            weight.path: params[weight.name] if weight.learns else params[weight.name].detach()
            for weight in self.weights
            if weight.name in params
        }
        result: Outputs = torch.func.functional_call(self, tree, (obs, part))
        return result

    def critic_view(self, params: Tree, obs: Tree) -> Tree:
        """Return what the critic's own parameters stand on: features of the trunk, or observations.

        A module that gives both at once keeps the policy's parameters for `critic_outputs`.
        """
        if self.trunk is None:
            if self.whole is not None:
                self.load(params)
            return {key: obs[key] for key in self.shapes}
        x, lead = self._observation(obs)
        tree = {
            weight.path.removeprefix("trunk."): params[weight.name]
            for weight in self.weights
            if weight.path.startswith("trunk.")
        }
        with torch.no_grad():
            features = torch.func.functional_call(self.trunk, tree, (x,))
        return {FEATURES: features.reshape(*lead, -1)}

    def critic_outputs(self, own: Tree, inputs: Tree) -> Tensor:
        """Return outputs `[*lead, Q]` of the critic's own parameters, on a `critic_view`."""
        if self.trunk is None:
            value = self.pure(own, inputs, "critic").value
            assert value is not None
            return value
        tree = {name.removeprefix("critic."): x for name, x in own.items()}
        output: Tensor = torch.func.functional_call(self.critic, tree, (inputs[FEATURES],))  # type: ignore[arg-type]
        return output

    def load(self, params: Tree) -> None:
        """Copy parameters by the names of `weights` into the modules."""
        with torch.no_grad():
            for name, x in self.held().items():
                if name in params:
                    x.copy_(params[name])

    def held(self) -> Tree:
        """Return all parameters and buffers by the names of `weights`."""
        held = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {weight.name: held[weight.path] for weight in self.weights}

    def _observation(self, obs: Tree) -> tuple[Any, tuple[int, ...]]:
        """Return the observation as modules from outside see it, with one leading axis."""
        given: Tree = {}
        lead: tuple[int, ...] = ()
        for key, shape in self.shapes.items():
            x = obs[key]
            lead = tuple(x.shape[: x.ndim - len(shape)])
            given[key] = x if len(lead) == 1 else x.reshape(-1, *shape)
        return (given["obs"] if list(given) == ["obs"] else given), lead

    def _policy(self, given: Any) -> Tensor:
        """Return means and log-stds side by side, or logits."""
        if isinstance(given, tuple | list):
            mean, log_std = given
            return torch.cat([mean, log_std.expand_as(mean)], -1)
        log_std = getattr(self.head, "log_std", None)
        policy: Tensor = given if log_std is None else widen(given, log_std)
        return policy


def build_own(
    make: Callable[..., Any],
    observation: Space[Any],
    action: Space[Any],
    dist: Dist,
    returns: Critic,
    config: Network,
    seed: int,
) -> OwnActorCritic:
    """Make a network from outside, try it on zeros, and find what each of its parameters is for.

    Args:
        make: what `network.kind` names.
        observation: as `keel.envs` lays it out; of one of several agents, what it sees.
        action: action space.
        dist: distribution of the action space.
        returns: meaning of the critic's outputs.
        config: settings of the network.
        seed: of the initial weights.

    Raises:
        InputError: in one line, where the network is none that Keel can train.
    """
    name = f"network.kind {getattr(make, '__qualname__', type(make).__qualname__)}"
    if config.recurrent != "none":
        raise InputError(f"{name}: a network of your own goes without network.recurrent")
    if not callable(make):
        raise InputError(f"{name}: expected a callable (observation_space, action_space)")
    parts = _parts(observation)
    shapes = {key: tuple(space.shape or ()) for key, space in parts.items()}
    seen = parts["obs"] if list(parts) == ["obs"] else spaces.Dict(parts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _assemble(name, make(seen, action), shapes, dist, returns).float()
    _refuse_random(name, network)
    sample = {key: _zeros(space) for key, space in parts.items()}
    with torch.enable_grad():
        outputs = _try(name, network, sample, dist, returns, config.log_std)
        network.weights = _weights(network, outputs)
    again = network(sample)
    if not (_equal(outputs.policy, again.policy) and _equal(outputs.value, again.value)):
        raise InputError(
            f"{name}: gives other outputs when it sees the same rows again, so that replaying a "
            "rollout cannot give ratio 1; what is random in it must go"
        )
    if returns.normalized and returns.affine and network.trunk is None:
        raise InputError(
            f"{name}: returns are normalized by moving the critic's last layer, which Keel does "
            "not know here; use critic.normalize off, or return a feature extractor"
        )
    return network


def _refuse_random(name: str, network: nn.Module) -> None:
    for path, part in network.named_modules():
        if isinstance(part, RANDOM) and part.training and getattr(part, "p", 1.0) > 0.0:
            where = path.partition(".")[2] or path
            raise InputError(
                f"{name}: {type(part).__name__} ({where}) in training mode gives other outputs for "
                "the same rows, so that replaying a rollout cannot give ratio 1; remove it, or "
                "call .eval() on it"
            )


def _assemble(
    name: str, made: Any, shapes: dict[str, tuple[int, ...]], dist: Dist, returns: Critic
) -> OwnActorCritic:
    """Return the network of what a callable has returned."""
    if isinstance(made, tuple | list):
        if len(made) != 2 or not all(isinstance(part, nn.Module) for part in made):
            raise InputError(
                f"{name}: expected a pair of modules (actor, critic), got {_kinds(made)}"
            )
        return OwnActorCritic(None, None, made[0], made[1], shapes)
    if not isinstance(made, nn.Module):
        raise InputError(f"{name}: expected a torch.nn.Module or a pair, got {type(made).__name__}")
    width = getattr(made, "features_dim", None)
    if width is None:
        return OwnActorCritic(made, None, None, None, shapes)
    if not isinstance(width, int) or width < 1:
        raise InputError(f"{name}: features_dim: expected a whole number above 0, got {width!r}")
    generator = torch.Generator().manual_seed(torch.initial_seed())
    actor = MLP((width, dist.outputs - dist.log_stds), "relu", generator, last_gain=0.01)
    critic = MLP((width, returns.outputs), "relu", generator, last_gain=1.0)
    return OwnActorCritic(None, made, actor, critic, shapes)


def _try(
    name: str, network: OwnActorCritic, obs: Tree, dist: Dist, returns: Critic, log_std: float
) -> Outputs:
    """Run a new network on zeros; add log-stds where it gives means alone; check what it gives."""
    seen = ", ".join(f"{key} {[ROWS, *shape]}" for key, shape in network.shapes.items())
    x, _ = network._observation(obs)
    try:
        if network.whole is not None:
            both = network.whole(x)
        else:
            features = x if network.trunk is None else network.trunk(x)
            if network.trunk is not None:
                _expect(name, "features", features, ([ROWS, int(network.trunk.features_dim)],))  # type: ignore[arg-type]
            both = network.actor(features), network.critic(features)  # type: ignore[misc]
    except InputError:
        raise
    except Exception as error:  # whatever the code of a module raises
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{name}: its forward failed on {seen}: {type(error).__name__}: {reason}"
        ) from error
    if not isinstance(both, tuple | list) or len(both) != 2:
        raise InputError(
            f"{name}: forward(obs): expected (distribution parameters, value), got {_kinds(both)}; "
            "a feature extractor says its features_dim"
        )
    policy, value = both
    continuous = dist.log_stds > 0
    full, single = [ROWS, dist.outputs], [ROWS, dist.outputs - dist.log_stds]
    if continuous and isinstance(policy, tuple | list) and len(policy) == 2:
        _expect(name, "means", policy[0], (single,))
        _expect(name, "log-stds", policy[1], (single, single[1:]))
    else:
        allowed = (single, full) if continuous else (full,)
        what = "means, or means and log-stds" if continuous else "logits"
        _expect(name, what, policy, allowed)
        if continuous and list(policy.shape) == single:
            start = torch.full((single[1],), log_std)
            network.head.register_parameter("log_std", nn.Parameter(start))
    size = returns.outputs
    _expect(name, "value", value, ([ROWS], [ROWS, 1]) if size == 1 else ([ROWS, size],))
    return network(obs)  # type: ignore[no-any-return]


def _weights(network: OwnActorCritic, outputs: Outputs) -> tuple[Weight, ...]:
    """Return all parameters and buffers, those of the critic at the end.

    Of a whole module the graph of its outputs tells which parameters the value alone depends on.
    """
    parameters = {k: p for k, p in network.named_parameters() if p.requires_grad}
    of_policy, of_value = (
        dict(zip(parameters, _reached(x, list(parameters.values())), strict=True))
        for x in (outputs.policy, outputs.value)
    )
    weights = []
    for path in parameters:
        first, _, rest = path.partition(".")
        if first == "whole":
            role = "trunk" if of_policy[path] and of_value[path] else "actor"
            role = "critic" if of_value[path] and not of_policy[path] else role
            weights.append(Weight(f"{role}.{rest}", path, learns=True))
        else:
            weights.append(Weight(path, path, learns=True))
    for path, x in (*network.named_parameters(), *network.named_buffers()):
        if path not in parameters and x.is_floating_point():
            first, _, rest = path.partition(".")
            role = "actor" if first == "whole" else first
            weights.append(Weight(f"{role}.{rest}", path, learns=False))
    return tuple(sorted(weights, key=lambda weight: weight.name.startswith("critic.")))


def _reached(output: Tensor | None, parameters: list[nn.Parameter]) -> list[bool]:
    """Return which parameters an output depends on."""
    if output is None or not output.requires_grad or not parameters:
        return [False] * len(parameters)
    gradients = torch.autograd.grad(output.sum(), parameters, retain_graph=True, allow_unused=True)
    return [gradient is not None for gradient in gradients]


def _expect(name: str, what: str, x: Any, allowed: Sequence[list[int]]) -> None:
    if not isinstance(x, Tensor) or list(x.shape) not in allowed:
        got = list(x.shape) if isinstance(x, Tensor) else _kinds(x)
        shapes = " or ".join(map(str, allowed))
        raise InputError(f"{name}: {what}: expected {shapes} for {ROWS} observations, got {got}")


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _kinds(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(type(part).__name__ for part in value)})"
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return type(value).__name__


def _parts(observation: Space[Any]) -> dict[str, Space[Any]]:
    whole = observation.spaces if isinstance(observation, spaces.Dict) else {"obs": observation}
    return {key: space for key, space in whole.items() if key != MASK}


def _zeros(space: Space[Any]) -> Tensor:
    return torch.from_numpy(np.zeros((ROWS, *(space.shape or ())), space.dtype))
