"""Compiled kernels for the marginal net present value of a building that is begun now.

Greedy players and the features of a parcel are made of it.

"The next months" are this one and the `ahead` after it; what holds in the last of them holds from
then on, as long as nothing more is begun.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from keel.apps.land.arrays import FREE
from keel.apps.land.compiling import compiled, inner
from keel.apps.land.kernels import building_value, demand_pays, income_share, land_price


@inner
def project_neighborhood(game, state, tables, share, prestige):
    """Project pollution and prestige if nothing more is begun.

    Write the `share` `[ahead + 1, P]` of income that pollution leaves in the next months, and
    `prestige` `[P]`, that after the last month.
    """
    months_left = tables.months - state.month[game]
    months, parcels = share.shape
    for parcel in range(parcels):
        prestige[parcel] = state.prestige[game, parcel]
        for month in range(months):
            share[month, parcel] = state.pollution[game, parcel]
    for parcel in range(parcels):
        left = state.left[game, parcel]
        if left == 0 or left > months_left:
            continue
        agent, size = state.owner[game, parcel], state.size[game, parcel]
        for other in range(parcels):
            prestige[other] += tables.near[parcel, other] * tables.adorns[agent, size]
            for month in range(left, months):
                share[month, other] += tables.near[parcel, other] * tables.pollutes[agent, size]
    for month in range(months):
        for parcel in range(parcels):
            share[month, parcel] = income_share(share[month, parcel], tables.least_income)


@inner
def project_holdings(game, agent, world, state, tables, share, capacity, own_land):
    """Project one developer's revenue if nothing more is begun.

    Write `capacity` `[ahead + 1]`, the revenue that meets demand in the next months; and `own_land`
    `[P]`, the value of own land around each parcel, weighted by nearness.
    """
    for month in range(capacity.shape[0]):
        capacity[month] = 0.0
    for parcel in range(own_land.shape[0]):
        own_land[parcel] = 0.0
    suffers = tables.suffers[agent]
    for parcel in range(own_land.shape[0]):
        if state.owner[game, parcel] != agent:
            continue
        for other in range(own_land.shape[0]):
            own_land[other] += tables.near[other, parcel] * world.price[game, parcel]
        revenue = tables.revenue[agent, state.size[game, parcel]]
        for month in range(state.left[game, parcel], capacity.shape[0]):
            capacity[month] += revenue * share[month, parcel] if suffers else revenue


@inner
def operating_weights(size, months_left, tables, weight):
    """Write the discounts of the months in which a building begun now operates.

    `weight` `[ahead + 1]` is the sum of their discounts in each of the next months, and from the
    last of them on.
    """
    start, last = tables.construction[size], weight.shape[0] - 1
    for month in range(weight.shape[0]):
        begin = max(start, month)
        end = months_left if month == last else min(month + 1, months_left)
        weight[month] = max(0.0, tables.annuity[end] - tables.annuity[min(begin, end)])


@inner
def discounted_income(revenue, upkeep, demand, slopes, weight, capacity, share, parcel):
    """Return the discounted income of a building until the end."""
    value = 0.0
    for month in range(weight.shape[0]):
        if weight[month] > 0.0:
            more = demand_pays(capacity[month] + revenue * share[month, parcel], demand, slopes)
            less = demand_pays(capacity[month], demand, slopes)
            value += weight[month] * (more - less - upkeep)
    return value


@inner
def appraise_size(
    game, agent, size, world, state, tables, share, prestige, weight, capacity, own_land, out
):
    """Write the marginal net present value of one size on every parcel, `[P]`."""
    months_left = tables.months - state.month[game]
    cost, start = tables.cost[agent, size], tables.construction[size]
    revenue, upkeep = tables.revenue[agent, size], tables.upkeep[agent, size]
    demand, slopes, suffers = tables.demand[agent], tables.slopes, tables.suffers[agent]
    adorns = tables.adorns[agent, size] if start <= months_left else 0.0
    last, least = tables.discount[months_left], tables.least_level[size]
    building = last * building_value(cost, max(0, months_left - start), tables) - cost
    clean = np.ones((capacity.shape[0], 1))
    earns = discounted_income(revenue, upkeep, demand, slopes, weight, capacity, clean, 0)
    for parcel in range(out.shape[0]):
        if state.owner[game, parcel] != FREE or world.level[game, parcel] < least:
            out[parcel, size] = 0.0
            continue
        if suffers:
            earns = discounted_income(
                revenue, upkeep, demand, slopes, weight, capacity, share, parcel
            )
        price = land_price(game, parcel, world, state) + world.zone[game, parcel]
        land_value = (
            world.price[game, parcel] * (1.0 + prestige[parcel]) + adorns * own_land[parcel]
        )
        out[parcel, size] = building + earns + last * land_value - price


@compiled
def marginal_npv(world, state, tables, out):
    """Write the marginal net present value of each building into `out` `[E, A, P, 3]`.

    That is the increase of its developer's net present value if it is begun now and nothing else
    is; 0 where the size cannot be built. It is exact except for interest, which is left out, and
    for the harm that a trade which pollutes and suffers does to itself; no trade of `TRADES` does
    both.
    """
    games, agents, parcels = out.shape[:3]
    months = tables.ahead + 1
    share, weight = np.empty((months, parcels)), np.empty((3, months))
    capacity, prestige, own_land = np.empty(months), np.empty(parcels), np.empty(parcels)
    for game in range(games):
        project_neighborhood(game, state, tables, share, prestige)
        for size in range(3):
            operating_weights(size, tables.months - state.month[game], tables, weight[size])
        for agent in range(agents):
            project_holdings(game, agent, world, state, tables, share, capacity, own_land)
            for size in range(3):
                appraise_size(
                    game, agent, size, world, state, tables, share, prestige, weight[size],
                    capacity, own_land, out[game, agent],
                )  # fmt: skip
