"""Build the networks of several agents: a row of parameters each, or for those that share one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from keel.config import Agents, Network
from keel.distributions.actions import Dist
from keel.errors import InputError
from keel.keys import AGENT, STATE
from keel.networks.actor_critic import Flatten, SeparateActorCritic, Spaces
from keel.networks.agent import Agent
from keel.networks.build import kind_of, own_network, policy_head, start_state_std
from keel.networks.critics import Critic
from keel.networks.kinds import joined_apart, pointer_network


def build_many(
    parts: Spaces,
    dist: Dist,
    returns: Critic,
    config: Network,
    generator: torch.Generator,
    agents: Sequence[str],
    many: Agents,
) -> Agent:
    """Build a network for every row of parameters; critics may see more than actors."""
    shapes, classes, _ = parts
    kind = kind_of(config, {k: x for k, x in shapes.items() if k != STATE}, dist)
    if kind not in ("mlp", "cnn", "pointer") or config.recurrent != "none":
        raise InputError(
            "network: several agents have networks of kind mlp, cnn or pointer without memory, "
            f"not {kind}" + ("" if config.recurrent == "none" else " with memory")
        )
    rows, members = sharing(agents, many.sharing)
    hidden = {STATE} | (set() if len(rows) < len(agents) else {AGENT})
    actor_shapes = {key: shape for key, shape in shapes.items() if key not in hidden}
    critic_shapes = dict(actor_shapes)
    if many.critic == "central" and STATE in shapes:
        critic_shapes = {STATE: shapes[STATE], **actor_shapes}

    def network() -> nn.Module:
        if kind == "pointer":
            return pointer_network(
                actor_shapes, critic_shapes, classes, dist, returns.outputs, config, generator
            )
        built: nn.Module
        if kind == "cnn" or parts.of([STATE]).images:
            views = parts.of(list(actor_shapes)), parts.of(list(critic_shapes))
            built = joined_apart(
                *views, policy_head(dist, config), returns.outputs, config, generator
            )
        else:
            built = SeparateActorCritic(
                Flatten(actor_shapes, classes),
                config.hidden,
                config.activation,
                policy_head(dist, config),
                returns.outputs,
                generator,
                None if critic_shapes == actor_shapes else Flatten(critic_shapes, classes),
            )
        start_state_std(built, dist, config)
        return built

    return _stack([network() for _ in rows], dist, returns, members, rows)


def own_many(
    observation: spaces.Space[Any],
    action: spaces.Space[Any],
    dist: Dist,
    returns: Critic,
    config: Network,
    seed: int,
    agents: Sequence[str],
    many: Agents,
) -> Agent:
    """Build a network from outside for every row of parameters; it sees what its agent sees."""
    assert isinstance(observation, spaces.Dict)
    if many.critic == "central" and STATE in observation.spaces:
        raise InputError(
            f"network.kind {config.kind}: a network of your own sees what its agent sees; "
            "use agents.critic own"
        )
    rows, members = sharing(agents, many.sharing)
    hidden = {STATE} | (set() if len(rows) < len(agents) else {AGENT})
    seen = {key: space for key, space in observation.spaces.items() if key not in hidden}
    networks = [
        own_network(config.kind, spaces.Dict(seen), action, dist, returns, config, seed + row)
        for row in range(len(rows))
    ]
    return _stack(networks, dist, returns, members, rows)


def _stack(
    networks: Sequence[nn.Module],
    dist: Dist,
    returns: Critic,
    members: tuple[int, ...],
    rows: tuple[str, ...],
) -> Agent:
    """Return one agent of equal networks, a row of parameters each."""
    agents_by_row = [Agent(network, dist, critic=returns) for network in networks]
    agent = Agent(agents_by_row[0].network, dist, len(rows), returns, members, rows)
    agent.initial = torch.cat([one.initial for one in agents_by_row])
    return agent


def sharing(agents: Sequence[str], how: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the rows of parameters by name, and the row of each agent.

    Args:
        agents: names of the agents.
        how: `none`, `all`, or by the kind that a name without its number tells.
    """
    if how == "none":
        return tuple(agents), tuple(range(len(agents)))
    kinds = ["all" if how == "all" else name.rstrip("0123456789").rstrip("_-") for name in agents]
    rows = tuple(dict.fromkeys(kinds))
    return rows, tuple(rows.index(kind) for kind in kinds)
