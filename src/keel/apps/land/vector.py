"""`LandDev-v0` as a vectorized environment: all games in one array, without a Python loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from keel.apps.land.arrays import Array
from keel.apps.land.env import parallel_env, real_box
from keel.apps.land.games import Games
from keel.apps.land.maps import MapSet, map_seeds
from keel.apps.land.observations import OWN, PARCEL, observe, state_names
from keel.apps.land.report import gini
from keel.apps.land.rules import SIZES, Rules, make_rules
from keel.envs.protocol import Autoreset, Obs, Saved, Step
from keel.types import AGENT, MASK, STATE

__all__ = ["LandEnvs", "parallel_env", "vector_env"]


class LandEnvs:
    """Vectorized environment of `num_envs` games; a finished game restarts at once on another map.

    Returns of episodes are discounted by the `gamma` of the rules: with the reward "npv" they are
    the developers' net present values over the scale.

    Args:
        rules: The variant of the game.
        num_envs: Number of games.
        maps: Draw maps for training, or held-out ones.
    """

    autoreset: Autoreset = "same_step"
    backend = "land"

    def __init__(self, rules: Rules, num_envs: int, maps: MapSet = "train") -> None:
        self.rules, self.num_envs, self.maps = rules, num_envs, maps
        self.agents = rules.names
        self._games = Games(rules, num_envs)
        self._rng = np.random.default_rng(0)
        self._total, self._npv = np.zeros((2, num_envs, rules.agents))
        self._built = np.zeros((num_envs, len(SIZES)))
        self._sums = {"total": self._total, "npv": self._npv, "built": self._built}
        self.action_space = spaces.Discrete(rules.actions)
        self.observation_space = spaces.Dict(
            {
                "own": real_box(len(OWN)),
                "parcels": real_box(rules.parcels, len(PARCEL)),
                AGENT: spaces.Discrete(rules.agents),
                STATE: real_box(len(state_names(rules))),
            }
        )

    def reset(self, seed: int) -> Obs:
        self._rng = np.random.default_rng(seed)
        for x in self._sums.values():
            x[:] = 0.0
        self._games.begin(np.arange(self.num_envs), self._draw(self.num_envs))
        return observation_dict(self._games)

    def step(self, action: np.ndarray) -> Step:
        discount = self.rules.gamma ** self._games.state.month[:, None]
        month = self._games.step(action)
        self._total += discount * month.reward
        self._npv += discount * (month.flow + self.rules.gamma * month.terminal_value)
        game, agent = (month.begun != self.rules.wait).nonzero()
        kind = game * len(SIZES) + month.begun[game, agent] % len(SIZES)
        self._built += np.bincount(kind, minlength=self._built.size).reshape(self._built.shape)
        over = month.done.nonzero()[0]
        own, measures = self._total[over], None
        if over.size:
            measures = self._measures(over)
            for x in self._sums.values():
                x[over] = 0.0
            self._games.begin(over, self._draw(over.size))
        lead = month.reward.shape
        return Step(
            obs=observation_dict(self._games),
            reward=month.reward.astype(np.float32),
            terminated=np.repeat(month.done[:, None], lead[1], 1),
            truncated=np.zeros(lead, bool),
            ignored=np.zeros(lead, bool),
            final_obs=None,
            episode_index=over,
            episode_return=own.sum(1),
            episode_length=np.full(over.size, self.rules.months),
            agent_return=own,
            episode_measures=measures,
        )

    def _measures(self, over: Array) -> dict[str, Array]:
        """Return metrics of games that ended: value in thousands, and the mix of buildings."""
        npv, built = self._npv[over], self._built[over]
        count = built.sum(1)
        mix = np.where(count[:, None] > 0, built / np.maximum(count, 1.0)[:, None], np.nan)
        return {
            "npv": npv.sum(1),
            "welfare": npv.mean(1) * (1.0 - gini(npv)),
            "buildings": count,
            **{f"share_{name}": mix[:, k] for k, name in enumerate(SIZES)},
        }

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def save(self) -> Saved | None:
        arrays, data = self._games.save()
        sums = {name: x.copy() for name, x in self._sums.items()}
        return arrays | sums, data | {"maps": self._rng.bit_generator.state}

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
        self._games.load(arrays, data)
        for name, x in self._sums.items():
            x[:] = arrays[name]
        self._rng.bit_generator.state = data["maps"]

    def _draw(self, count: int) -> Array:
        return map_seeds(self.maps, count, self._rng)


def observation_dict(games: Games) -> Obs:
    """Return the observations of all developers of all games, as `LandEnvs` gives them."""
    observation, agents = observe(games), games.rules.agents
    return {
        "own": observation.own,
        "parcels": observation.parcels,
        AGENT: np.tile(np.arange(agents), (games.count, 1)),
        STATE: np.repeat(observation.state[:, None], agents, 1),
        MASK: observation.mask.copy(),
    }


def vector_env(
    num_envs: int,
    *,
    variant: str = "full",
    agents: int | Sequence[str] | None = None,
    maps: MapSet = "train",
    **changes: Any,
) -> LandEnvs:
    """Make a vectorized environment of `num_envs` games, with the options of `parallel_env`."""
    return LandEnvs(make_rules(variant, agents, **changes), num_envs, maps)
