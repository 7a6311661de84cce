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
from keel.apps.land.observations import OWN, PARCEL, Observation, observe, state_names
from keel.apps.land.recording import GameRecord
from keel.apps.land.rules import Rules, make_rules
from keel.errors import InputError, check_choice, import_extra

Obs = dict[str, Array]


def _base() -> Any:
    """Return PettingZoo's base class, or `object` where PettingZoo is not installed."""
    try:
        return importlib.import_module("pettingzoo").ParallelEnv
    except ImportError:
        return object


Base: Any = _base()


class LandDev(Base):  # type: ignore[misc]
    """Parallel environment of one game: every month each developer begins one building or waits.

    The game ends for all developers at once, after the last month, with `terminated`: there is no
    future to bootstrap from, and the month is among the observations. A bankrupt developer stays,
    and can only wait. With the `gamma` of the rules as discount and the reward "npv", the return of
    a developer times the scale is its net present value.

    Args:
        rules: The variant of the game.
        maps: Draw maps for training, or held-out ones.
        render_mode: None or "rgb_array".
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
        self._observation: Observation | None = None
        self._record: GameRecord | None = None

    @cached_property
    def observation_spaces(self) -> dict[str, spaces.Dict]:
        """Spaces of `own`, `parcels` and `action_mask`, by developer."""
        rules = self.rules
        everything: dict[str, spaces.Space[Any]] = {
            "own": real_box(len(OWN)),
            "parcels": real_box(rules.parcels, len(PARCEL)),
            "action_mask": spaces.Box(0, 1, (rules.actions,), np.int8),
        }
        return {name: spaces.Dict(everything) for name in self.possible_agents}

    @cached_property
    def action_spaces(self) -> dict[str, spaces.Discrete]:
        """Spaces of the actions by developer: `3 * parcel + size`, or wait, which is the last."""
        return {name: spaces.Discrete(self.rules.actions) for name in self.possible_agents}

    @cached_property
    def state_space(self) -> spaces.Box:
        """Space of `state()`."""
        return real_box(len(state_names(self.rules)))

    def observation_space(self, agent: str) -> spaces.Dict:
        """Return the observation space of one developer; the same object every time."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        """Return the action space of one developer; the same object every time."""
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Obs], dict[str, dict[str, Any]]]:
        """Begin a game on a map drawn from `maps`, or on that of the seed `options["map"]`."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        chosen = (options or {}).get("map")
        # Drawn even if not used: the next map must not depend on the option.
        drawn = map_seeds(self.maps, 1, self._rng)
        self._games.begin([0], drawn if chosen is None else [chosen])
        self.agents = list(self.possible_agents)
        self._record = GameRecord.begin(self._games) if self.render_mode else None
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
        """Play one month; an illegal action is refused, and has the effect of waiting."""
        if not self.agents:
            return {}, {}, {}, {}, {}
        if set(actions) != set(self.agents):
            raise InputError(f"actions: expected one for each of {', '.join(self.agents)}")
        month = self._games.step([[int(actions[name]) for name in self.agents]])
        if self._record is not None:
            self._record.append(self._games, month)
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
        observations = self._observe()
        if month.done[0]:
            self.agents = []
        return observations, reward, done, dict.fromkeys(done, False), infos

    def state(self) -> Array:
        """Return the global state for a central critic, `[F3]` float32."""
        if self._observation is None:
            raise InputError("state: reset the environment first")
        state: Array = self._observation.state[0]
        return state

    def render(self) -> Array | None:
        """Return an image of the city, `[height, width, 3]`; None without a `render_mode`."""
        from keel.apps.land.rendering import city_pixels

        return None if self._record is None else city_pixels(self._record)

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def _observe(self) -> dict[str, Obs]:
        observation = self._observation = observe(self._games)
        return {
            name: {
                "own": observation.own[0, k],
                "parcels": observation.parcels[0, k],
                "action_mask": observation.mask[0, k].astype(np.int8),
            }
            for k, name in enumerate(self.possible_agents)
        }


def real_box(*shape: int) -> spaces.Box:
    """Return a space of real numbers."""
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
    """Make `LandDev-v0` as a PettingZoo parallel environment.

    Example: `parallel_env(agents=4, welfare=0.5, maps="held_out", reward="npv")`.

    Args:
        rules: A complete variant, in place of `variant`, `agents` and `changes`.
        variant: "full" or "small".
        agents: Number of developers, or their trades.
        maps: Draw maps for training, or held-out ones.
        render_mode: None or "rgb_array".
        **changes: Other values of the fields of `Rules`.
    """
    import_extra("pettingzoo", "multi-agent")
    if rules is None:
        rules = make_rules(variant, agents, **changes)
    elif changes or agents is not None or variant != "full":
        raise InputError("rules: give them whole, or name what is to change, not both")
    return LandDev(rules, maps, render_mode)
