"""Build the networks of several agents: a row of parameters each, or for those that share one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from keel.config import Agents, Network
from keel.config.common import NETWORKS
from keel.distributions.actions import Dist
from keel.errors import InputError
from keel.networks.actor_critic import Spaces
from keel.networks.agent import Agent
from keel.networks.build import Plan, kind_of, start_state_std
from keel.networks.critics import Critic
from keel.networks.kinds import joined_apart
from keel.networks.own import build_own
from keel.types import AGENT, STATE


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
    sees = [key for key in shapes if key not in hidden]
    critic_sees = [STATE, *sees] if many.critic == "central" and STATE in shapes else sees
    own, critics = (parts.of(keys)._replace(classes=classes) for keys in (sees, critic_sees))
    plan = Plan(own, dist, returns.outputs, config, generator)
    if critic_sees != sees:
        plan = plan._replace(critic_parts=critics)
    joined = kind == "cnn" or (kind == "mlp" and bool(parts.of([STATE]).images))
    build = joined_apart if joined else NETWORKS.get(kind)
    networks = [build(plan) for _ in rows]
    if kind != "pointer":
        for network in networks:
            start_state_std(network, dist, config)
    return _stack(networks, dist, returns, members, rows)


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
    make = NETWORKS.get(config.kind)
    networks = [
        build_own(make, spaces.Dict(seen), action, dist, returns, config, seed + row)
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
