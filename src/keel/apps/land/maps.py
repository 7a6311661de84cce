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
"""First seed of the held-out maps: training never draws from there on."""
MapSet = Literal["train", "held_out"]
Seeds = NDArray[np.int64]


def draw_map(rules: Rules, seed: int) -> World:
    """Draw the map of one seed; the same seed always gives the same map.

    Land is dear and of a high level near the two hubs, and cheaper at the river.

    Args:
        rules: The variant of the game.
        seed: At least 0; held-out maps begin at `HELD_OUT`.

    Returns:
        The map, with a leading axis of 1.
    """
    world = blank_world(rules, 1)
    write_maps(rules, np.zeros(1, np.int64), check_seeds(np.array([seed])), world)
    return world


def write_maps(rules: Rules, games: Seeds, seeds: Seeds, world: World) -> None:
    """Write the map of each of `seeds` `[K]` into the rows `games` `[K]` of `world`."""
    kernels_maps.draw_maps(games, seeds, rules.rows, rules.columns, rules.agents, world)


def check_seeds(seeds: NDArray[np.int64]) -> Seeds:
    """Return seeds as int64 `[K]`; raise an `InputError` if they are not seeds of maps."""
    seeds = np.atleast_1d(np.asarray(seeds))
    if seeds.dtype.kind not in "iu" or (seeds < 0).any():
        raise InputError("seeds: expected integers of at least 0")
    return seeds.astype(np.int64)


def map_seeds(maps: str, count: int, rng: np.random.Generator) -> Seeds:
    """Draw seeds of maps.

    Args:
        maps: "train" or "held_out".
        count: How many.
        rng: Source of randomness.

    Returns:
        Seeds, `[count]`.
    """
    low = HELD_OUT if check_choice("maps", maps, ("train", "held_out")) == "held_out" else 0
    return rng.integers(low, low + HELD_OUT, count)


def held_out(count: int) -> Seeds:
    """Return the seeds of the first `count` held-out maps, `[count]`."""
    return HELD_OUT + np.arange(count)
