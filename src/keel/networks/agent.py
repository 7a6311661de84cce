"""The agent: a network whose parameters are one matrix `[G, P]`, a row per independent actor.

With everything in one matrix an optimizer step is a handful of vector operations, a copy is one
copy, and "per agent" (gradient clipping, KL bound, early stop, walk-back) means per row. A single
agent is the case G = 1. Of A agents several may act with the same row: `members` says who does.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from keel.distributions.actions import Dist
from keel.errors import InputError
from keel.networks.actor_critic import FEATURES, Outputs, Part, Scalar, SeparateActorCritic
from keel.types import CRITIC_HIDDEN_STATE, EPISODE_STARTS, MASK, Tree

if TYPE_CHECKING:
    from keel.networks.critics import Critic

UNITS, FRESH_UNITS = "critic_units", (0.0, 1.0, 0.0)
"""The parameter that holds the units of normalized returns (`keel.networks.popart`): shift, scale,
and the number of updates behind them."""


class Evaluation(NamedTuple):
    """Policy and value at rows `[*lead]`."""

    dist: Tree
    """parameters of the policy, `[*lead, K]`"""
    value: Tensor
    """raw critic output, `[*lead, Q]`"""


@dataclass(frozen=True)
class Layout:
    """The place of each parameter in a row of the parameter matrix.

    Args:
        names: of the parameters, in their order.
        shapes: of the parameters, in the same order.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def sizes(self) -> list[int]:
        """Numbers per parameter."""
        return [shape.numel() for shape in self.shapes]

    def unflatten(self, params: Tensor) -> Tree:
        """Return the parameters of one row `[P]`, or of several `[A, P]`, as views `[*lead, …]`."""
        parts = torch.split(params, self.sizes, dim=-1)  # its backward is a single cat
        return {
            name: part.view(*params.shape[:-1], *shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def slice_of(self, name: str) -> slice:
        """Return the columns of one parameter."""
        at = self.names.index(name)
        start = sum(self.sizes[:at])
        return slice(start, start + self.sizes[at])

    def split(self, column: int) -> tuple[Layout, Layout]:
        """Return the layouts of the parameters before a column, and of those from it on."""
        at = sum(1 for i in range(len(self.names)) if sum(self.sizes[:i]) < column)
        return Layout(self.names[:at], self.shapes[:at]), Layout(self.names[at:], self.shapes[at:])

    def columns(self, *prefixes: str) -> Tensor:
        """Return bool `[P]`, true for parameters whose name begins with one of `prefixes`."""
        marks = [
            torch.full((size,), name.startswith(prefixes))
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        return torch.cat(marks)


class Agent:
    """A network, the meaning of its outputs, and the layout of parameters, which it does not hold.

    Args:
        network: maps observation trees to `Outputs`.
        dist: distribution that the policy's outputs parametrise.
        groups: rows G of the parameter matrix `[G, P]`.
        critic: meaning of the critic's outputs; a scalar by default.
        members: `[A]`, the row of the matrix that each agent acts with; by default one agent a row.
        row_names: `[G]`, where there are several rows.
    """

    def __init__(
        self,
        network: nn.Module,
        dist: Dist,
        groups: int = 1,
        critic: Critic | None = None,
        members: Sequence[int] | None = None,
        row_names: Sequence[str] = (),
    ) -> None:
        self.dist = dist
        self.critic: Critic = critic or Scalar()
        self.groups = groups
        self.members = tuple(range(groups)) if members is None else tuple(members)
        """`[A]`: the row of the matrix that each agent acts with"""
        self.row_names = tuple(row_names)
        """`[G]`, where there are several"""
        parameters = _parameters_of(network)
        if self.critic.normalized:
            parameters[UNITS] = nn.Parameter(torch.tensor(FRESH_UNITS))
        self.layout = Layout(tuple(parameters), tuple(p.shape for p in parameters.values()))
        self.initial = torch.cat([p.detach().reshape(-1) for p in parameters.values()])[None]
        self.network = network.requires_grad_(False)
        self.hidden_state_sizes: dict[str, int] = dict(getattr(network, "hidden_state_sizes", {}))
        """Size H of each recurrent state, by its key in the observations"""
        if self.recurrent and groups > 1:
            raise InputError("memory: stacked agents cannot remember; use one group")
        self.critic_from = _where_the_critic_begins(self.layout)
        self.policy_layout, self.critic_layout = self.layout.split(self.critic_from)
        # A separate critic keeps its step when the policy is walked back; one that stands on a
        # shared trunk has to go back with it.
        self.shares = bool(self.layout.columns("trunk").any())
        own = self.layout.columns("critic")
        self.policy_columns = self.layout.columns("") if self.shares else ~own

    @property
    def recurrent(self) -> bool:
        """Whether actor or critic has a hidden state."""
        return bool(self.hidden_state_sizes)

    @property
    def sees_pixels(self) -> bool:
        """Whether convolutions look at images."""
        return any(isinstance(part, nn.Conv2d) for part in self.network.modules())

    @property
    def workers(self) -> int:
        """Number of threads that may take rows through the network side by side."""
        return 1

    def to(self, device: torch.device) -> None:
        """Move everything but the parameters to a device."""
        self.network.to(device)
        self.initial, self.policy_columns = (
            x.to(device) for x in (self.initial, self.policy_columns)
        )

    def outputs(self, params: Tensor, obs: Tree, part: Part = "both") -> Outputs:
        """Run the network.

        Args:
            params: `[G, P]`.
            obs: tree of `[R, …]`; of several agents `[R, A, …]`.
            part: `actor`, `critic` or `both`.
        """
        if self.groups == 1:
            return self._one(params[0], obs, part)
        params = self.of_agents(params)
        if isinstance(self.network, SeparateActorCritic):
            return self._stacked(params, obs, part)
        if getattr(self.network, "one_by_one", False):
            return self._one_by_one(params, obs, part)

        def run(row: Tensor, own_obs: Tree) -> tuple[Tensor, ...]:
            policy, value, _ = self._one(row, own_obs, part)
            return tuple(x for x in (policy, value) if x is not None)

        parts = list(torch.vmap(run, in_dims=(0, 1), out_dims=1)(params, obs))
        policy = None if part == "critic" else parts.pop(0)
        return Outputs(policy, parts[0] if parts else None)

    def _stacked(self, params: Tensor, obs: Tree, part: Part) -> Outputs:
        """Multiply batched by hand: `vmap` takes twice the time for each of many small operations,
        and leaves agents strided where their products want them one after the other.
        """
        assert isinstance(self.network, SeparateActorCritic)
        by_agent = {key: x.movedim(1, 0).contiguous() for key, x in obs.items()}
        policy, value, _ = self.network.pure(self.layout.unflatten(params), by_agent, part)
        return Outputs(
            None if policy is None else policy.movedim(0, 1),
            None if value is None else value.movedim(0, 1),
        )

    def _one_by_one(self, params: Tensor, obs: Tree, part: Part) -> Outputs:
        """Run agents one by one: work of different shapes, or so much that calls do not count."""
        outputs = [
            self._one(row, {key: x[:, a] for key, x in obs.items()}, part)
            for a, row in enumerate(params)
        ]
        policies = [x.policy for x in outputs if x.policy is not None]
        values = [x.value for x in outputs if x.value is not None]
        return Outputs(
            torch.stack(policies, 1) if policies else None,
            torch.stack(values, 1) if values else None,
        )

    def _one(self, row: Tensor, obs: Tree, part: Part) -> Outputs:
        return self.outputs_of(self.layout.unflatten(row), obs, part)

    def outputs_of(self, tree: Tree, obs: Tree, part: Part = "both") -> Outputs:
        """Run the network with parameters by name; a part that is not asked for needs none."""
        result: Outputs
        pure = getattr(self.network, "pure", None)
        if pure is not None:
            result = pure(tree, obs, part)
        else:
            tree = {name: x for name, x in tree.items() if name != UNITS}
            result = torch.func.functional_call(self.network, tree, (obs, part))
        return result

    def named(self, params: Tensor) -> Tree:
        """Return parameters `[G, P]` by name; those of several rows behind the row's name."""
        if self.groups == 1:
            return self.layout.unflatten(params[0])
        return {
            f"{row}.{name}": x
            for row, own in zip(self.row_names, params, strict=True)
            for name, x in self.layout.unflatten(own).items()
        }

    def alone(self) -> Agent:
        """Return the same network as a single agent: one row of the matrix at a time."""
        agent = copy.copy(self)
        agent.groups, agent.members = 1, (0,)
        return agent

    def each_its_own(self) -> Agent:
        """Return the same network with a row for every agent: parameters `[A, P]`."""
        agent = copy.copy(self)
        agent.groups, agent.members = len(self.members), tuple(range(len(self.members)))
        return agent

    def of_agents(self, x: Tensor) -> Tensor:
        """Expand what rows of the matrix have, `[G, …]`, to every agent, `[A, …]`."""
        if self.members == tuple(range(self.groups)):
            return x
        return x[torch.tensor(self.members, device=x.device)]

    def worst(self, x: Tensor) -> Tensor:
        """Return the largest number of agents `[A]` that share a row, `[G]`; NaN wins."""
        if self.members == tuple(range(self.groups)):
            return x
        rows = [x[[*self.who(row)]] for row in range(self.groups)]
        return torch.stack([own.max() if len(own) else x.new_zeros(()) for own in rows])

    def who(self, row: int) -> tuple[int, ...]:
        """Return the agents that act with this row of the matrix."""
        return tuple(a for a, own in enumerate(self.members) if own == row)

    def critic_inputs(self, params: Tensor, obs: Tree) -> Tree:
        """Return the inputs of the critic's own parameters: observations, or the trunk's features.

        There must be one group; the trunk is frozen.
        """
        tree = self.layout.unflatten(params[0].detach())
        view = getattr(self.network, "critic_view", None)
        if view is not None:
            inputs: Tree = view(tree, obs)
            return inputs
        trunk = {k.removeprefix("trunk."): x for k, x in tree.items() if k.startswith("trunk.")}
        with torch.no_grad():
            encoder = getattr(self.network, "critic_encoder", self.network.encoder)
            x = encoder(obs)  # type: ignore[operator]
            if trunk:
                x = torch.func.functional_call(self.network.trunk, trunk, (x,))  # type: ignore[arg-type]
        return {
            FEATURES: x,
            **{key: obs[key] for key in (CRITIC_HIDDEN_STATE, EPISODE_STARTS) if key in obs},
        }

    def critic_outputs(self, own: Tensor, inputs: Tree) -> Tensor:
        """Return outputs `[*lead, Q]` of the critic's parameters `[1, C]`, on `critic_inputs`."""
        named = self.critic_layout.unflatten(own[0])
        value: Tensor
        own_outputs = getattr(self.network, "critic_outputs", None)
        if own_outputs is not None:
            value = own_outputs(named, inputs)
            return value
        tree = {k.removeprefix("critic."): x for k, x in named.items() if k != UNITS}
        arguments: list[Tensor | None] = [inputs[FEATURES]]
        if EPISODE_STARTS in inputs:
            arguments += [inputs.get(CRITIC_HIDDEN_STATE), inputs[EPISODE_STARTS]]
        output = torch.func.functional_call(self.network.critic, tree, tuple(arguments))  # type: ignore[arg-type]
        value = output[0] if isinstance(output, tuple) else output
        return value

    def policy(self, params: Tensor, obs: Tree, temperature: float | Tensor = 1.0) -> Tree:
        """Return the policy's distribution at every row, a tree of `[*lead, K]`."""
        output = self.outputs(params, obs, "actor").policy
        assert output is not None
        return self.dist.params(output, obs.get(MASK), temperature)

    def raw_value(self, params: Tensor, obs: Tree) -> Tensor:
        """Return the critic's raw output at every row, `[*lead, Q]`."""
        value = self.outputs(params, obs, "critic").value
        assert value is not None
        return value

    def value(self, params: Tensor, obs: Tree) -> Tensor:
        """Return the value of every row in units of reward, `[*lead]`."""
        return self.value_of(params, self.raw_value(params, obs))

    def value_of(self, params: Tensor, raw: Tensor) -> Tensor:
        """Return the value in units of reward, `[*lead]`, of raw outputs `[*lead, Q]`."""
        return self.in_reward(params, self.critic.value(raw))

    def in_reward(self, params: Tensor, value: Tensor) -> Tensor:
        """Convert a value in the units of the critic, `[*lead]`, to units of reward."""
        if not self.critic.normalized:
            return value
        from keel.networks import popart

        return popart.in_reward(self.of_agents(params), value)

    def target_of(self, params: Tensor, target: Tensor) -> Tensor:
        """Convert targets in units of reward, `[*lead]`, to the units of the critic."""
        if not self.critic.normalized:
            return target
        from keel.networks import popart

        return popart.in_units(self.of_agents(params), target)

    def evaluate(self, params: Tensor, obs: Tree, temperature: float | Tensor = 1.0) -> Evaluation:
        """Evaluate policy and value at every row, in one pass."""
        policy, value, _ = self.outputs(params, obs)
        assert policy is not None
        assert value is not None
        return Evaluation(self.dist.params(policy, obs.get(MASK), temperature), value)


def load_weights(network: nn.Module, weights: Tree) -> None:
    """Copy parameters by name into a network; the critic's units, which no network has, are left.

    Args:
        network: of an agent.
        weights: by the names of the agent's layout.
    """
    parameters = _held(network) or dict(network.named_parameters())
    with torch.no_grad():
        for name, x in weights.items():
            if name in parameters:
                parameters[name].copy_(x)


def _held(network: nn.Module) -> Tree:
    """Return parameters and buffers of a network from outside, by role; of others nothing."""
    held = getattr(network, "held", None)
    return {} if held is None else held()


def _parameters_of(network: nn.Module) -> Tree:
    """Return what the matrix holds of a network, by name."""
    held = _held(network)
    if held:
        return held
    everything: Tree = dict(network.named_parameters())
    # what is frozen beside adapters stays in the module; a network that was here before is
    # frozen as a whole, and learns as a whole
    return {k: p for k, p in everything.items() if p.requires_grad} or everything


def _where_the_critic_begins(layout: Layout) -> int:
    """Return the critic's first column: its parameters are the last of every network."""
    own = layout.columns("critic")
    start = int((~own).sum())
    if bool(own[:start].any()):
        raise InputError("network: the critic must be the last of its parts")
    return start
