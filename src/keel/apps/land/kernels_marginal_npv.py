"""What a building begun now would bring, compiled: the number that greedy play and the features of
a parcel are made of.

"The next months" are this one and the `ahead` after it; what holds in the last of them holds from
then on, as long as nothing more is begun.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from keel.apps.land.arrays import FREE
from keel.apps.land.compiling import compiled, inner
from keel.apps.land.kernels import building_worth, demand_pays, land_price, share_left


@inner
def foresee(game, state, tables, share, shine):
    """If nothing more is begun: the `share` `[ahead + 1, P]` of income that pollution leaves in the
    next months, and `shine` `[P]`, prestige after the last month."""
    left_over = tables.months - state.month[game]
    months, parcels = share.shape
    for parcel in range(parcels):
        shine[parcel] = state.prestige[game, parcel]
        for month in range(months):
            share[month, parcel] = state.pollution[game, parcel]
    for parcel in range(parcels):
        left = state.left[game, parcel]
        if left == 0 or left > left_over:
            continue
        agent, size = state.owner[game, parcel], state.size[game, parcel]
        for other in range(parcels):
            shine[other] += tables.near[parcel, other] * tables.adorns[agent, size]
            for month in range(left, months):
                share[month, other] += tables.near[parcel, other] * tables.pollutes[agent, size]
    for month in range(months):
        for parcel in range(parcels):
            share[month, parcel] = share_left(share[month, parcel], tables.least_income)


@inner
def look_at_own(game, agent, world, state, tables, share, room, pride):
    """If nothing more is begun: `room` `[ahead + 1]`, the revenue that meets demand in the next
    months; and `pride` `[P]`, the worth of own land as felt from each parcel."""
    for month in range(room.shape[0]):
        room[month] = 0.0
    for parcel in range(pride.shape[0]):
        pride[parcel] = 0.0
    suffers = tables.suffers[agent]
    for parcel in range(pride.shape[0]):
        if state.owner[game, parcel] != agent:
            continue
        for other in range(pride.shape[0]):
            pride[other] += tables.near[other, parcel] * world.price[game, parcel]
        revenue = tables.revenue[agent, state.size[game, parcel]]
        for month in range(state.left[game, parcel], room.shape[0]):
            room[month] += revenue * share[month, parcel] if suffers else revenue


@inner
def months_worth(size, left_over, tables, weight):
    """`weight` `[ahead + 1]`: the sum of discounts of the months that a building begun now would
    operate in each of the next months, and from the last of them on."""
    start, last = tables.construction[size], weight.shape[0] - 1
    for month in range(weight.shape[0]):
        begin = max(start, month)
        end = left_over if month == last else min(month + 1, left_over)
        weight[month] = max(0.0, tables.annuity[end] - tables.annuity[min(begin, end)])


@inner
def earned(revenue, upkeep, demand, slopes, weight, room, share, parcel):
    """By a building until the end, discounted."""
    value = 0.0
    for month in range(weight.shape[0]):
        if weight[month] > 0.0:
            more = demand_pays(room[month] + revenue * share[month, parcel], demand, slopes)
            less = demand_pays(room[month], demand, slopes)
            value += weight[month] * (more - less - upkeep)
    return value


@inner
def appraise_size(game, agent, size, world, state, tables, share, shine, weight, room, pride, out):
    """One size on every parcel `[P]`."""
    left_over = tables.months - state.month[game]
    cost, start = tables.cost[agent, size], tables.construction[size]
    revenue, upkeep = tables.revenue[agent, size], tables.upkeep[agent, size]
    demand, slopes, suffers = tables.demand[agent], tables.slopes, tables.suffers[agent]
    adorns = tables.adorns[agent, size] if start <= left_over else 0.0
    last, least = tables.discount[left_over], tables.least_level[size]
    building = last * building_worth(cost, max(0, left_over - start), tables) - cost
    clean = np.ones((room.shape[0], 1))
    earns = earned(revenue, upkeep, demand, slopes, weight, room, clean, 0)
    for parcel in range(out.shape[0]):
        if state.owner[game, parcel] != FREE or world.level[game, parcel] < least:
            out[parcel, size] = 0.0
            continue
        if suffers:
            earns = earned(revenue, upkeep, demand, slopes, weight, room, share, parcel)
        price = land_price(game, parcel, world, state) + world.zone[game, parcel]
        kept = world.price[game, parcel] * (1.0 + shine[parcel]) + adorns * pride[parcel]
        out[parcel, size] = building + earns + last * kept - price


@compiled
def worth(world, state, tables, out):
    """Write into `out` `[E, A, P, 3]` by how much each building, begun now, raises the net present
    value of its developer if nobody begins anything else; 0 where it cannot stand.

    That is exact but for interest, which is left out, and for the harm that a trade which pollutes
    and suffers does to itself; none of ours does both.
    """
    games, agents, parcels = out.shape[:3]
    months = tables.ahead + 1
    share, weight = np.empty((months, parcels)), np.empty((3, months))
    room, shine, pride = np.empty(months), np.empty(parcels), np.empty(parcels)
    for game in range(games):
        foresee(game, state, tables, share, shine)
        for size in range(3):
            months_worth(size, tables.months - state.month[game], tables, weight[size])
        for agent in range(agents):
            look_at_own(game, agent, world, state, tables, share, room, pride)
            for size in range(3):
                appraise_size(
                    game, agent, size, world, state, tables, share, shine, weight[size], room,
                    pride, out[game, agent],
                )  # fmt: skip
