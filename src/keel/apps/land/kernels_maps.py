"""Compiled kernels that draw maps from their seeds: a game of thirty steps needs a new one.

Numbers come from splitmix64 (Steele, Lea and Flood 2014) rather than from numpy, whose generators
cost more to set up than a map to draw.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import numpy as np

from keel.apps.land.compiling import compiled, inner

CHEAP, DEAR = 110.0, 1_100.0
"""Prices of the worst and of the best land."""
ZONE = 200.0
"""Highest cost of a building permission."""
SHARES = np.array([0.1, 0.2, 0.5, 0.75])
"""Shares of the parcels, from the worst on, that are below level 2, 3, 4 and 5."""


@inner
def uniform(stream):
    """Return the next number of a stream, in [0, 1)."""
    stream[0] += np.uint64(0x9E3779B97F4A7C15)
    z = stream[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((z ^ (z >> np.uint64(31))) >> np.uint64(11)) / 9007199254740992.0


@inner
def between(stream, low, high):
    """Return the next number of a stream, uniform in [low, high)."""
    return low + (high - low) * uniform(stream)


@inner
def noise(stream):
    """Return bell-shaped noise of mean 0 and deviation 1: the sum of four uniform numbers."""
    total = uniform(stream) + uniform(stream) + uniform(stream) + uniform(stream)
    return (total - 2.0) * math.sqrt(3.0)


@compiled
def draw_maps(games, seeds, rows, columns, agents, world):
    """Write the map of each seed into its game's rows of `world`."""
    parcels = rows * columns
    good = np.empty(parcels)
    stream = np.empty(1, np.uint64)
    for k in range(games.shape[0]):
        game = games[k]
        stream[0] = np.uint64(seeds[k]) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(7)
        hubs, course = world.hubs[game], world.course[game]
        for h in range(2):
            hubs[h, 0] = between(stream, 0.0, rows - 1.0)
            hubs[h, 1] = between(stream, 0.0, columns - 1.0)
        course[0] = between(stream, 0.3, 0.7) * (rows - 1.0)
        course[1] = between(stream, 0.5, 1.5)
        course[2] = between(stream, 1.5, 3.0)
        course[3] = between(stream, 0.0, 2.0 * math.pi)
        for parcel in range(parcels):
            y, x = parcel // columns, parcel % columns
            hub = min(
                math.hypot(y - hubs[0, 0], x - hubs[0, 1]),
                math.hypot(y - hubs[1, 0], x - hubs[1, 1]),
            )
            near = math.exp(-hub / 2.5)
            water = course[0] + course[1] * math.sin(x / course[2] + course[3])
            river = abs(y - water) < 0.5
            value = near + 0.15 * noise(stream) - (0.15 if river else 0.0)
            world.hub[game, parcel] = hub
            world.river[game, parcel] = river
            world.price[game, parcel] = CHEAP + (DEAR - CHEAP) * min(1.0, max(0.0, value)) ** 1.3
            world.zone[game, parcel] = ZONE * uniform(stream)
            good[parcel] = near + 0.12 * noise(stream)
        for parcel in range(parcels):
            rank = 0
            for other in range(parcels):
                rank += good[other] < good[parcel]
            level = 1
            for share in SHARES:
                level += rank >= share * parcels
            world.level[game, parcel] = level
        world.first[game] = int(agents * uniform(stream))
