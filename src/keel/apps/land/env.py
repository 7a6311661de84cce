"""`LandDev-v0` as a PettingZoo parallel environment."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import spaces

from keel.apps.land.arrays import Array
from keel.apps.land.games import Games
from keel.apps.land.maps import MapSet, map_seeds
from keel.apps.land.observations import OWN, PARCEL, Sight, look, state_names
from keel.apps.land.recording import Chronicle
from keel.apps.land.rules import Rules, make_rules
from keel.errors import InputError, check_choice, import_extra

Obs = dict[str, Array]


def _base() -> Any:
    """PettingZoo is optional, and this file must be importable without it."""
    try:
        return importlib.import_module("pettingzoo").ParallelEnv
    except ImportError:
        return object


Base: Any = _base()


class LandDev(Base):  # type: ignore[misc]
    """One game. Every month each developer begins one building, or waits.

    It ends, for all at once, after the last month: `terminated`, for there is no future that a
    value could speak of, and the month is among the observations. A bankrupt developer stays, and
    can only wait. With the `gamma` of the rules as discount and the reward "npv", the return of a
    developer times the scale is its net present value.
    """

    def __init__(
        self, rules: Rules, maps: MapSet = "train", render_mode: str | None = None
    ) -> None:
        check_choice("maps", maps, ("train", "held_out"))
        if render_mode is not None:
            check_choice("render_mode", render_mode, ("rgb_array",))
        self.metadata: dict[str, Any] = {
            "name": "LandDev-v0",
            "render_modes": ["rgb_array"],
            "render_fps": 3,
            "is_parallelizable": True,
        }
        self.rules, self.maps, self.render_mode = rules, maps, render_mode
        self.possible_agents = list(rules.names)
        self.agents: list[str] = []
        self._games = Games(rules, 1)
        self._rng = np.random.default_rng()
        self._seen: Sight | None = None
        self._story: Chronicle | None = None

    @cached_property
    def observation_spaces(self) -> dict[str, spaces.Dict]:
        """`own`, `parcels` and `action_mask` of each developer."""
        rules = self.rules
        everything: dict[str, spaces.Space[Any]] = {
            "own": _box(len(OWN)),
            "parcels": _box(rules.parcels, len(PARCEL)),
            "action_mask": spaces.Box(0, 1, (rules.actions,), np.int8),
        }
        return {name: spaces.Dict(everything) for name in self.possible_agents}

    @cached_property
    def action_spaces(self) -> dict[str, spaces.Discrete]:
        """`3 * parcel + size`, or wait, which is the last."""
        return {name: spaces.Discrete(self.rules.actions) for name in self.possible_agents}

    @cached_property
    def state_space(self) -> spaces.Box:
        """Of `state()`."""
        return _box(len(state_names(self.rules)))

    def observation_space(self, agent: str) -> spaces.Dict:
        """Of one developer; the same object every time."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        """Of one developer; the same object every time."""
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Obs], dict[str, dict[str, Any]]]:
        """A new game on a map drawn from `maps`, or on that of the seed `options["map"]`."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        chosen = (options or {}).get("map")
        drawn = map_seeds(self.maps, 1, self._rng)  # also if not used: the next must not depend
        self._games.begin([0], drawn if chosen is None else [chosen])
        self.agents = list(self.possible_agents)
        self._story = Chronicle.of(self._games) if self.render_mode else None
        info = {"map": int(self._games.seeds[0])}
        return self._observe(), {name: dict(info) for name in self.agents}

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[
        dict[str, Obs],
        dict[str, float],
        dict[str, bool],
        dict[str, bool],
        dict[str, dict[str, Any]],
    ]:
        """One month; an illegal action is refused, and does what waiting does."""
        if not self.agents:
            return {}, {}, {}, {}, {}
        if set(actions) != set(self.agents):
            raise InputError(f"actions: expected one for each of {', '.join(self.agents)}")
        month = self._games.step([[int(actions[name]) for name in self.agents]])
        if self._story is not None:
            self._story.note(self._games, month)
        reward = {name: float(month.reward[0, k]) for k, name in enumerate(self.agents)}
        done = dict.fromkeys(self.agents, bool(month.done[0]))
        infos = {
            name: {
                "cash_flow": float(month.flow[0, k]),
                "conflict": bool(month.conflict[0, k]),
                "refused": bool(month.refused[0, k]),
            }
            for k, name in enumerate(self.agents)
        }
        seen = self._observe()
        if month.done[0]:
            self.agents = []
        return seen, reward, done, dict.fromkeys(done, False), infos

    def state(self) -> Array:
        """For a critic that sees all; float32."""
        if self._seen is None:
            raise InputError("state: reset the environment first")
        whole: Array = self._seen.state[0]
        return whole

    def render(self) -> Array | None:
        """The city, `[height, width, 3]`; None without a `render_mode`."""
        from keel.apps.land.rendering import city_pixels

        return None if self._story is None else city_pixels(self._story)

    def close(self) -> None:
        """Nothing is open."""

    def _observe(self) -> dict[str, Obs]:
        seen = self._seen = look(self._games)
        return {
            name: {
                "own": seen.own[0, k],
                "parcels": seen.parcels[0, k],
                "action_mask": seen.mask[0, k].astype(np.int8),
            }
            for k, name in enumerate(self.possible_agents)
        }


def _box(*shape: int) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, shape, np.float32)


def parallel_env(
    *,
    rules: Rules | None = None,
    variant: str = "full",
    agents: int | Sequence[str] | None = None,
    maps: MapSet = "train",
    render_mode: str | None = None,
    **changes: Any,
) -> LandDev:
    """`LandDev-v0`: a variant of the game with other fields of `Rules`, or `rules` as they are.

    Example: `parallel_env(agents=4, welfare=0.5, maps="held_out", reward="npv")`.
    """
    import_extra("pettingzoo", "multi-agent")
    if rules is None:
        rules = make_rules(variant, agents, **changes)
    elif changes or agents is not None or variant != "full":
        raise InputError("rules: give them whole, or name what is to change, not both")
    return LandDev(rules, maps, render_mode)
