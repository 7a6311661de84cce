"""The agent: a network whose parameters are one matrix `[G, P]`, a row per independent actor.

With everything in one matrix an optimizer step is a handful of vector operations, a copy is one
copy, and "per agent" (gradient clipping, KL bound, early stop, walk-back) means per row. A single
agent is the case G = 1. Of A agents several may act with the same row: `members` says who does.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from keel.errors import InputError
from keel.keys import MASK
from keel.models import popart
from keel.models.critics import Critic, Scalar
from keel.models.distributions import Dist
from keel.models.networks import Outputs, Part, SeparateActorCritic
from keel.models.parts import SeparateJoined
from keel.models.pointer import FEATURES, ITEMS, LEGAL, PointerActorCritic
from keel.models.recurrent import CRITIC, STARTS
from keel.types import Tree


class Evaluation(NamedTuple):
    """What the agent says about rows `[*lead]`."""

    dist: Tree
    """parameters of the policy, `[*lead, K]`"""
    value: Tensor
    """raw critic output, `[*lead, Q]`"""


@dataclass(frozen=True)
class Layout:
    """Where each parameter stands in a row of the matrix."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def sizes(self) -> list[int]:
        """Numbers per parameter."""
        return [shape.numel() for shape in self.shapes]

    def unflatten(self, row: Tensor) -> Tree:
        """The parameters of one row `[P]`, as views."""
        parts = torch.split(row, self.sizes)  # its backward is a single cat
        return {
            name: part.view(shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def unstack(self, params: Tensor) -> Tree:
        """The parameters of several rows `[A, P]`, each `[A, *shape]`, as views."""
        parts = torch.split(params, self.sizes, dim=1)
        return {
            name: part.view(len(params), *shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def slice_of(self, name: str) -> slice:
        """The columns of one parameter."""
        at = self.names.index(name)
        start = sum(self.sizes[:at])
        return slice(start, start + self.sizes[at])

    def split(self, column: int) -> tuple[Layout, Layout]:
        """The layouts of what stands before a column, and of what stands from it on."""
        at = sum(1 for i in range(len(self.names)) if sum(self.sizes[:i]) < column)
        return Layout(self.names[:at], self.shapes[:at]), Layout(self.names[at:], self.shapes[at:])

    def columns(self, *prefixes: str) -> Tensor:
        """bool `[P]`: the columns of parameters whose name begins with one of `prefixes`."""
        marks = [
            torch.full((size,), name.startswith(prefixes))
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        return torch.cat(marks)


class Agent:
    """A network, what its outputs mean, and where its parameters lie. Holds no parameters."""

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
        everything = dict(network.named_parameters())
        # what is frozen beside adapters stays in the module; a network that was here before is
        # frozen as a whole, and learns as a whole
        parameters = {k: p for k, p in everything.items() if p.requires_grad} or everything
        if self.critic.normalised:
            parameters[popart.NAME] = nn.Parameter(torch.tensor(popart.FRESH))
        self.layout = Layout(tuple(parameters), tuple(p.shape for p in parameters.values()))
        self.initial = torch.cat([p.detach().reshape(-1) for p in parameters.values()])[None]
        self.network = network.requires_grad_(False)
        self.memory: dict[str, int] = dict(getattr(network, "memory", {}))
        if self.memory and groups > 1:
            raise InputError("memory: stacked agents cannot remember; use one group")
        self.critic_from = _where_the_critic_begins(self.layout)
        self.policy_layout, self.critic_layout = self.layout.split(self.critic_from)
        # A separate critic keeps its step when the policy is walked back; one that stands on a
        # shared trunk has to go back with it.
        self.shares = bool(self.layout.columns("trunk").any())
        own = self.layout.columns("critic")
        self.policy_columns = self.layout.columns("") if self.shares else ~own

    @property
    def workers(self) -> int:
        """Threads that may take rows through the network side by side."""
        return 1

    def to(self, device: torch.device) -> None:
        """Move what does not belong to the parameters."""
        self.network.to(device)
        self.initial, self.policy_columns = (
            x.to(device) for x in (self.initial, self.policy_columns)
        )

    def outputs(self, params: Tensor, obs: Tree, part: Part = "both") -> Outputs:
        """The network at `params` `[G, P]`; several agents have axis 1 of `obs`, `[R, A, …]`."""
        if self.groups == 1:
            return self._one(params[0], obs, part)
        params = self.of_agents(params)
        if isinstance(self.network, PointerActorCritic | SeparateJoined):
            return self._one_by_one(params, obs, part)
        if isinstance(self.network, SeparateActorCritic):
            return self._stacked(params, obs, part)

        def given(row: Tensor, seen: Tree) -> tuple[Tensor, ...]:
            policy, value, _ = self._one(row, seen, part)
            return tuple(x for x in (policy, value) if x is not None)

        found = list(torch.vmap(given, in_dims=(0, 1), out_dims=1)(params, obs))
        policy = None if part == "critic" else found.pop(0)
        return Outputs(policy, found[0] if found else None)

    def _stacked(self, params: Tensor, obs: Tree, part: Part) -> Outputs:
        """Batched products by hand: `vmap` takes twice the time for each of many small operations,
        and leaves agents strided where their products want them one after the other."""
        assert isinstance(self.network, SeparateActorCritic)
        seen = {key: x.movedim(1, 0).contiguous() for key, x in obs.items()}
        policy, value, _ = self.network.pure(self.layout.unstack(params), seen, part)
        return Outputs(
            None if policy is None else policy.movedim(0, 1),
            None if value is None else value.movedim(0, 1),
        )

    def _one_by_one(self, params: Tensor, obs: Tree, part: Part) -> Outputs:
        """Run agents one by one: work of different shapes, or so much that calls do not count."""
        found = [
            self._one(row, {key: x[:, a] for key, x in obs.items()}, part)
            for a, row in enumerate(params)
        ]
        policies = [x.policy for x in found if x.policy is not None]
        values = [x.value for x in found if x.value is not None]
        return Outputs(
            torch.stack(policies, 1) if policies else None,
            torch.stack(values, 1) if values else None,
        )

    def _one(self, row: Tensor, obs: Tree, part: Part) -> Outputs:
        return self.outputs_of(self.layout.unflatten(row), obs, part)

    def outputs_of(self, tree: Tree, obs: Tree, part: Part = "both") -> Outputs:
        """The same from parameters by name; what is not asked for needs none."""
        if isinstance(self.network, SeparateActorCritic | PointerActorCritic):
            return self.network.pure(tree, obs, part)
        tree = {name: x for name, x in tree.items() if name != popart.NAME}
        result: Outputs = torch.func.functional_call(self.network, tree, (obs, part))
        return result

    def named(self, params: Tensor) -> Tree:
        """The parameters `[G, P]` by name; those of several rows behind the name of their row."""
        if self.groups == 1:
            return self.layout.unflatten(params[0])
        return {
            f"{row}.{name}": x
            for row, own in zip(self.row_names, params, strict=True)
            for name, x in self.layout.unflatten(own).items()
        }

    def alone(self) -> Agent:
        """The same network as a single agent: one row of the matrix at a time."""
        agent = copy.copy(self)
        agent.groups, agent.members = 1, (0,)
        return agent

    def each_its_own(self) -> Agent:
        """The same network with a row for every agent: parameters `[A, P]`."""
        agent = copy.copy(self)
        agent.groups, agent.members = len(self.members), tuple(range(len(self.members)))
        return agent

    def of_agents(self, x: Tensor) -> Tensor:
        """What belongs to the rows of the matrix, `[G, …]`, for every agent, `[A, …]`."""
        if self.members == tuple(range(self.groups)):
            return x
        return x[torch.tensor(self.members, device=x.device)]

    def worst(self, x: Tensor) -> Tensor:
        """The largest of what agents have, `[A]`, among those who share a row, `[G]`; NaN wins."""
        if self.members == tuple(range(self.groups)):
            return x
        rows = [x[[*self.who(row)]] for row in range(self.groups)]
        return torch.stack([own.max() if len(own) else x.new_zeros(()) for own in rows])

    def who(self, row: int) -> tuple[int, ...]:
        """The agents that act with this row of the matrix."""
        return tuple(a for a, own in enumerate(self.members) if own == row)

    def critic_inputs(self, params: Tensor, obs: Tree) -> Tree:
        """What the critic's own parameters stand on: observations, or what the trunk makes of them.

        Of one group; the trunk is frozen.
        """
        if isinstance(self.network, PointerActorCritic):
            return self.network.critic_view(obs)
        tree = self.layout.unflatten(params[0].detach())
        trunk = {k.removeprefix("trunk."): x for k, x in tree.items() if k.startswith("trunk.")}
        with torch.no_grad():
            encoder = getattr(self.network, "critic_encoder", self.network.encoder)
            x = encoder(obs)  # type: ignore[operator]
            if trunk:
                x = torch.func.functional_call(self.network.trunk, trunk, (x,))  # type: ignore[arg-type]
        return {FEATURES: x, **{key: obs[key] for key in (CRITIC, STARTS) if key in obs}}

    def critic_outputs(self, own: Tensor, inputs: Tree) -> Tensor:
        """Raw outputs `[*lead, Q]` of the critic's own parameters `[1, C]` on `critic_inputs`."""
        named = self.critic_layout.unflatten(own[0])
        tree = {k.removeprefix("critic."): x for k, x in named.items() if k != popart.NAME}
        given: list[Tensor | None] = [
            inputs[key] for key in (FEATURES, ITEMS, LEGAL) if key in inputs
        ]
        if STARTS in inputs:
            given += [inputs.get(CRITIC), inputs[STARTS]]
        found = torch.func.functional_call(self.network.critic, tree, tuple(given))  # type: ignore[arg-type]
        value: Tensor = found[0] if isinstance(found, tuple) else found
        return value

    def policy(self, params: Tensor, obs: Tree, temperature: float | Tensor = 1.0) -> Tree:
        """The policy's distribution at every row."""
        output = self.outputs(params, obs, "actor").policy
        assert output is not None
        return self.dist.params(output, obs.get(MASK), temperature)

    def raw_value(self, params: Tensor, obs: Tree) -> Tensor:
        """The critic's raw output at every row, `[*lead, Q]`."""
        value = self.outputs(params, obs, "critic").value
        assert value is not None
        return value

    def value(self, params: Tensor, obs: Tree) -> Tensor:
        """The value of every row in units of reward, `[*lead]`."""
        return self.value_of(params, self.raw_value(params, obs))

    def value_of(self, params: Tensor, raw: Tensor) -> Tensor:
        """The value in units of reward, `[*lead]`, of the critic's raw output."""
        value = self.critic.value(raw)
        if not self.critic.normalised:
            return value
        return popart.in_reward(self.of_agents(params), value)

    def target_of(self, params: Tensor, target: Tensor) -> Tensor:
        """A target in units of reward as the critic is to learn it."""
        if not self.critic.normalised:
            return target
        return popart.in_units(self.of_agents(params), target)

    def evaluate(self, params: Tensor, obs: Tree, temperature: float | Tensor = 1.0) -> Evaluation:
        """Policy and value at every row, in one pass."""
        policy, value, _ = self.outputs(params, obs)
        assert policy is not None
        assert value is not None
        return Evaluation(self.dist.params(policy, obs.get(MASK), temperature), value)


def _where_the_critic_begins(layout: Layout) -> int:
    """Its first column: the critic's parameters are the last of every network."""
    own = layout.columns("critic")
    start = int((~own).sum())
    if bool(own[:start].any()):
        raise InputError("network: the critic must be the last of its parts")
    return start
