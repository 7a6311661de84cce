"""Observations and actions between an environment's own form and Keel's arrays `[N, …]`.

A policy that is loaded without its environment needs it: the spaces of a checkpoint say how what
`env.reset` and `env.step` give becomes what the network sees, and how actions go back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, spaces

from keel.envs.multi import AgentsPlan, plan_agents
from keel.envs.protocol import Obs
from keel.envs.space_data import Interface
from keel.envs.spaces import (
    ActionLayout,
    Field,
    ObsLayout,
    action_layout,
    observation_layout,
    open_mask,
)
from keel.errors import InputError
from keel.types import AGENT, MASK, STATE


class Rows(NamedTuple):
    """Observations as Keel has them, and how they came."""

    obs: Obs
    """`[N, …]`, with several agents `[N, A, …]`"""
    lead: tuple[int, ...]
    """`(N,)`, or `(N, A)` with several agents"""
    single: bool
    """whether it was one observation, not a batch of N"""
    names: tuple[Any, ...] | None = None
    """keys of the agents that were there, where observations came by agent"""


@dataclass(frozen=True)
class Translator:
    """Both ways between the form of an environment and Keel's arrays.

    Args:
        interface: what a checkpoint says of the environment.
    """

    interface: Interface

    def read(self, obs: Any, mask: Any = None) -> Rows:
        """Return observations as Keel's arrays.

        Args:
            obs: of one environment, or of N with a leading axis; of several agents by their names
                (PettingZoo), or arrays with an axis of agents.
            mask: the legal actions, where `obs` does not hold them, in the same form.
        """
        if not self.interface.agents:
            return self._read_one(obs, mask)
        names = {str(key) for key in obs} if isinstance(obs, Mapping) else set()
        if names and names <= set(self.interface.agents):
            return self._read_named(obs, mask)
        return self._read_stacked(obs, mask)

    def write(self, action: np.ndarray, rows: Rows) -> Any:
        """Return actions as the environment takes them: clipped, in its shapes and dtypes.

        Args:
            action: `[N, …]`, with several agents `[N, A, …]`.
            rows: what was read.
        """
        if rows.names is not None:
            plan, position = self._plan, self.interface.agents.index
            return {
                name: _first(plan.actions[a].encode(plan.cut(a, action[:, a])), rows.single)
                for name in rows.names
                for a in (position(str(name)),)
            }
        flat = action.reshape(math.prod(rows.lead), *action.shape[len(rows.lead) :])
        encoded = self._actions.encode(flat)
        return _first(encoded.reshape(*rows.lead, *encoded.shape[1:]), rows.single)

    @cached_property
    def _layout(self) -> ObsLayout:
        if self.interface.declared and not self.interface.agents:
            return observation_layout(self.interface.declared[0][0])
        return _as_laid_out(self.interface.observation_space)

    @cached_property
    def _actions(self) -> ActionLayout:
        if self.interface.declared and not self.interface.agents:
            return action_layout(self.interface.declared[0][1])
        return action_layout(self.interface.action_space)

    @cached_property
    def _plan(self) -> AgentsPlan:
        if self.interface.declared:
            return plan_agents(self.interface.declared)
        raise InputError(
            "observations by agent: this run's environment takes and gives arrays with an axis of "
            f"agents; give them so, in the order {', '.join(self.interface.agents)}"
        )

    def _read_one(self, obs: Any, mask: Any) -> Rows:
        if isinstance(obs, Mapping) and MASK in obs and not self._layout.has(MASK):
            mask = obs[MASK] if mask is None else mask
        lead, single = self._lead(obs, 0)
        tree = self._layout.read(obs, () if single else lead)
        if single:
            tree = {key: np.asarray(x)[None] for key, x in tree.items()}
        if mask is not None:
            tree[MASK] = _as_mask(mask, (*lead, self._actions.choices))
        if self.interface.masked and MASK not in tree:
            raise InputError(
                "mask: this run's environment says which actions are legal; give it with every "
                'observation: policy.act(obs, mask=info["action_mask"])'
            )
        if MASK in tree:
            open_mask(tree[MASK], np.ones(lead, bool), self._actions)
        return Rows(tree, lead, single)

    def _lead(self, obs: Any, axes: int) -> tuple[tuple[int, ...], bool]:
        """Return the leading axes, with one of N that is there or added, and whether it was added.

        Args:
            obs: observations.
            axes: leading axes beside that of N.
        """
        field = next(field for field in self._layout.fields if field.key != MASK)
        value = np.asarray(self._layout.pick(obs, field))
        extra = value.ndim - len(field.raw_shape)
        if extra not in (axes, axes + 1) or value.shape[extra:] != field.raw_shape:
            agents = "A, " * axes
            raise InputError(
                f"observation {field.key!r}: expected shape "
                f"{_shape(agents, field.raw_shape)} or {_shape(f'N, {agents}', field.raw_shape)}, "
                f"got {list(value.shape)}"
            )
        single = extra == axes
        return ((1,) if single else ()) + value.shape[:extra], single

    def _read_stacked(self, obs: Any, mask: Any) -> Rows:
        """Read arrays `[A, …]` or `[N, A, …]` as Keel lays them out."""
        given = dict(obs) if isinstance(obs, Mapping) else {"obs": obs}
        mask = given.pop(MASK, None) if mask is None else mask
        lead, single = self._lead(given if not self._layout.plain else obs, 1)
        if lead[1] != len(self.interface.agents):
            raise InputError(
                f"observation: expected {len(self.interface.agents)} agents "
                f"({', '.join(self.interface.agents)}), got {lead[1]}"
            )
        inner = lead[1:] if single else lead
        tree = self._layout.read(given if not self._layout.plain else obs, inner)
        tree = {key: x[None] if single else x for key, x in tree.items()}
        if mask is not None:
            tree[MASK] = _as_mask(mask, (*lead, self._actions.choices))
        elif self.interface.masked:
            raise InputError("mask: this run's agents have masks; give them as mask=, [N, A, K]")
        return Rows(self._with_numbers(tree, lead), lead, single)

    def _read_named(self, obs: Mapping[Any, Any], mask: Any) -> Rows:
        """Read what PettingZoo gives: observations by agent, of those that are there."""
        plan, agents = self._plan, self.interface.agents
        own = {agents.index(str(name)): x for name, x in obs.items()}
        masks = {agents.index(str(name)): x for name, x in (mask or {}).items()}
        at, value = next(iter(own.items()))
        field = next(field for field in plan.layouts[at].fields if field.key != MASK)
        shape = np.shape(plan.layouts[at].pick(value, field))
        single = len(shape) == len(field.raw_shape)
        inner = () if single else shape[:1]
        lead = (*(inner or (1,)), len(agents))
        tree = {
            key: np.zeros((*lead, *(space.shape or ())), space.dtype)
            for key, space in plan.observation.items()
        }
        if self.interface.masked:
            tree[MASK] = np.stack([plan.choices(a) for a in range(len(agents))])[None]
            tree[MASK] = np.repeat(tree[MASK], lead[0], 0)
        for a, one in own.items():
            parts = plan.layouts[a].read(one, inner)
            for key in plan.keys:
                plan.fit(tree[key][:, a], parts[key] if inner else np.asarray(parts[key])[None])
            legal = masks.get(a, parts.get(MASK))
            if legal is not None and self.interface.masked:
                legal = np.asarray(legal, bool).reshape(lead[0], -1)
                tree[MASK][:, a, : legal.shape[1]] &= legal
        if self.interface.masked:
            present = np.array([a in own for a in range(len(agents))])
            for row in tree[MASK]:
                plan.open_masks(row, present)
        return Rows(self._with_numbers(tree, lead), lead, single, tuple(obs))

    def _with_numbers(self, tree: Obs, lead: tuple[int, ...]) -> Obs:
        """Add what Keel knows by itself: numbers of agents; and what no actor looks at."""
        space = self.interface.observation_space
        parts = space.spaces if isinstance(space, spaces.Dict) else {}
        if AGENT in parts:
            tree[AGENT] = np.broadcast_to(np.arange(lead[1]), lead).copy()
        if STATE in parts and STATE not in tree:
            state = parts[STATE]
            tree[STATE] = np.zeros((*lead, *(state.shape or ())), state.dtype)
        return tree


def _first(x: np.ndarray, single: bool) -> Any:
    return x[0] if single else x


def _shape(lead: str, shape: tuple[int, ...]) -> str:
    return f"[{lead}{', '.join(map(str, shape))}]".replace(", ]", "]")


def _as_mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return a mask as a bool array of a shape; an `InputError` if it has another size."""
    array = np.array(mask, bool)
    if array.size != math.prod(shape):
        raise InputError(f"mask: expected shape {list(shape)}, got {list(array.shape)}")
    return array.reshape(shape)


def _as_laid_out(space: Space[Any]) -> ObsLayout:
    """Return the layout of observations that are as `keel.envs` has them."""
    plain = not isinstance(space, spaces.Dict)
    parts = {"obs": space} if plain else dict(space.items())  # type: ignore[attr-defined]
    fields = []
    for key, part in parts.items():
        if plain or key not in (AGENT, STATE):
            shape, dtype = tuple(part.shape or ()), np.dtype(part.dtype)
            fields.append(
                Field(key, shape, dtype, shape, dtype, part, path=() if plain else (key,))
            )
    return ObsLayout(tuple(fields), plain)
