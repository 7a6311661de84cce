"""What is seen of E games: float32, finite, of size about 1."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from keel.apps.land import kernels_marginal_npv, kernels_observation
from keel.apps.land.arrays import Array
from keel.apps.land.games import Games
from keel.apps.land.rules import AHEAD, SIZES, TRADES, Rules

PRIVATE = (
    "cash",
    "money with credit",
    "debt of credit",
    "bankrupt",
    "operating of full demand",
    "operating of all demand",
    "operating and coming of full demand",
    *(f"coming in {month}" for month in range(1, AHEAD + 1)),
    *(f"buildings {size}" for size in SIZES),
    "priority",
    "profit a month",
    *(f"best worth {size}" for size in SIZES),
    *(f"legal {size}" for size in SIZES),
)
"""Of one developer; the critic sees those of all."""
OWN = (*PRIVATE, "month", *TRADES)
PARCEL = (
    "free",
    "own",
    *(f"of {trade}" for trade in TRADES),
    *SIZES,
    "operates",
    "months left",
    "level",
    "price",
    "zone",
    "pollution",
    "prestige",
    "river",
    "hub",
    *(f"legal {size}" for size in SIZES),
    *(f"cost {size} of money" for size in SIZES),
    *(f"worth {size}" for size in SIZES),
    *(f"worth {size} of cost" for size in SIZES),
)
LAND = (
    *(f"free level {level}" for level in range(1, 6)),
    *(f"price level {level}" for level in (3, 4, 5)),
    "pollution",
    "prestige",
)


class Sight(NamedTuple):
    """What is seen of a month; float32, and the caller's to keep."""

    own: Array
    """`[E, A, F1]`: what a developer knows of itself, by `OWN`"""
    parcels: Array
    """`[E, A, P, F2]`: the city with a developer's eyes, by `PARCEL`"""
    state: Array
    """`[E, F3]`: for a critic that sees all, by `state_names`"""
    mask: Array
    """`[E, A, 3P + 1]` bool"""


def state_names(rules: Rules) -> tuple[str, ...]:
    """Of the features for the critic: all that developers know, the month, and the land."""
    known = (f"{name}: {feature}" for name in rules.names for feature in PRIVATE)
    return (*known, "month", *LAND)


def worth(games: Games) -> Array:
    """`[E, A, P, 3]`: by how much each building, begun now, would raise its developer's net present
    value if nobody began anything else, in thousands and before interest."""
    out = np.empty((games.count, games.rules.agents, games.rules.parcels, len(SIZES)))
    kernels_marginal_npv.worth(games.world, games.state, games.tables, out)
    return out


def look(games: Games) -> Sight:
    """At all games, through all eyes.

    Examples:
        >>> from keel.apps.land.games import Games
        >>> [x.shape for x in look(Games(Rules(), 2))]
        [(2, 3, 26), (2, 3, 48, 30), (2, 74), (2, 3, 145)]
    """
    rules, count = games.rules, games.count
    own = np.empty((count, rules.agents, len(OWN)), np.float32)
    parcels = np.empty((count, rules.agents, rules.parcels, len(PARCEL)), np.float32)
    whole = np.empty((count, len(state_names(rules))), np.float32)
    kinds = np.array([list(TRADES).index(name) for name in rules.names])
    kernels_observation.look(
        kinds, len(TRADES), games.world, games.state, games.tables, games.mask, worth(games), own,
        parcels, whole,
    )  # fmt: skip
    return Sight(own, parcels, whole, games.mask)
