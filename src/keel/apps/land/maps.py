"""Seeded maps: where hubs and the river lie, what land costs, and which sizes it can carry."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keel.apps.land import kernels_maps
from keel.apps.land.arrays import World, blank_world
from keel.apps.land.rules import Rules
from keel.errors import InputError, check_choice

HELD_OUT = 1_000_000
"""Maps from this seed on are for judging only: training never draws them."""
MapSet = Literal["train", "held_out"]
Seeds = NDArray[np.int64]


def draw_map(rules: Rules, seed: int) -> World:
    """The map of one seed (a leading axis of 1): land is dear and of a high level near the two
    hubs, and cheaper at the river. The same seed gives the same map always."""
    world = blank_world(rules, 1)
    write_maps(rules, np.zeros(1, np.int64), check_seeds(np.array([seed])), world)
    return world


def write_maps(rules: Rules, games: Seeds, seeds: Seeds, world: World) -> None:
    """The map of each of `seeds` `[K]` into the rows `games` `[K]` of `world`."""
    kernels_maps.draw_maps(games, seeds, rules.rows, rules.columns, rules.agents, world)


def check_seeds(seeds: NDArray[np.int64]) -> Seeds:
    """As int64, or an error if they are not seeds of maps."""
    seeds = np.atleast_1d(np.asarray(seeds))
    if seeds.dtype.kind not in "iu" or (seeds < 0).any():
        raise InputError("seeds: expected integers of at least 0")
    return seeds.astype(np.int64)


def map_seeds(maps: str, count: int, rng: np.random.Generator) -> Seeds:
    """`[count]` seeds drawn from the maps for training, or from those held out."""
    low = HELD_OUT if check_choice("maps", maps, ("train", "held_out")) == "held_out" else 0
    return rng.integers(low, low + HELD_OUT, count)


def held_out(count: int) -> Seeds:
    """`[count]`: the first of the maps that are held out, to be judged on."""
    return HELD_OUT + np.arange(count)
