"""Observations of E games: float32, finite, of magnitude about 1."""

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
"""Private features of one developer; the critic sees those of all."""
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


class Observation(NamedTuple):
    """Observation of a month, float32; the arrays are never overwritten."""

    own: Array
    """`[E, A, F1]`: features of the developer itself, named by `OWN`"""
    parcels: Array
    """`[E, A, P, F2]`: features of the parcels for each developer, named by `PARCEL`"""
    state: Array
    """`[E, F3]`: global state for a central critic, named by `state_names`"""
    mask: Array
    """`[E, A, 3P + 1]` bool"""


def state_names(rules: Rules) -> tuple[str, ...]:
    """Return the names of the critic's features: of all developers, the month, and the land."""
    private = (f"{name}: {feature}" for name in rules.names for feature in PRIVATE)
    return (*private, "month", *LAND)


def marginal_npv(games: Games) -> Array:
    """Return the marginal net present value of each building if it is begun now.

    That is the increase of its developer's net present value if nothing else is begun, before
    interest.

    Args:
        games: E games.

    Returns:
        Thousands, `[E, A, P, 3]`; 0 where the size cannot be built.
    """
    out = np.empty((games.count, games.rules.agents, games.rules.parcels, len(SIZES)))
    kernels_marginal_npv.marginal_npv(games.world, games.state, games.tables, out)
    return out


def observe(games: Games) -> Observation:
    """Return the observations of all developers of all games.

    Args:
        games: E games.

    Returns:
        Features and masks of this month.

    Examples:
        >>> from keel.apps.land.games import Games
        >>> [x.shape for x in observe(Games(Rules(), 2))]
        [(2, 3, 26), (2, 3, 48, 30), (2, 74), (2, 3, 145)]
    """
    rules, count = games.rules, games.count
    own = np.empty((count, rules.agents, len(OWN)), np.float32)
    parcels = np.empty((count, rules.agents, rules.parcels, len(PARCEL)), np.float32)
    critic_state = np.empty((count, len(state_names(rules))), np.float32)
    kinds = np.array([list(TRADES).index(name) for name in rules.names])
    kernels_observation.observe(
        kinds, len(TRADES), games.world, games.state, games.tables, games.mask,
        marginal_npv(games), own, parcels, critic_state,
    )  # fmt: skip
    return Observation(own, parcels, critic_state, games.mask)
