"""Compiled kernels that write the observations of developers and of the critic, once a month.

Features stand in the order in which `keel.apps.land.observations` names them.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from keel.apps.land.arrays import FREE
from keel.apps.land.compiling import compiled, inner
from keel.apps.land.kernels import demand_pays, income_share, land_price, turn_of

CASH, MONEY, BUILDINGS, ZONE, DISTANCE, LEVELS = 10_000.0, 1_000.0, 8.0, 200.0, 5.0, 5
"""Units in which features are of magnitude about 1."""
MOST = 3.0
"""Upper bound on ratios to money, which may be close to 0."""


@inner
def ratio(amount, total):
    """Return `amount / total`, at most `MOST`."""
    return min(MOST, amount / total) if total > 0.0 and amount > 0.0 else MOST * (amount > 0.0)


@inner
def write_finances(game, agent, world, state, tables, row):
    """Write features 0 to 3, and 13: money, and the priority of this month."""
    agents, cash = state.cash.shape[1], state.cash[game, agent]
    row[0] = cash / CASH
    row[1] = max(0.0, cash + tables.credit) / CASH
    row[2] = ratio(-cash, tables.credit)
    row[3] = state.bankrupt[game, agent]
    for turn in range(agents):
        if turn_of(game, turn, agents, world, state) == agent:
            row[13] = 1.0 - turn / (agents - 1.0)


@inner
def write_buildings(game, agent, state, tables, row):
    """Write features 4 to 12, and 14: operating and coming buildings, against demand."""
    first, second = tables.demand[agent]
    operating, coming, upkeep = 0.0, 0.0, 0.0
    for parcel in range(state.owner.shape[1]):
        if state.owner[game, parcel] != agent:
            continue
        size, left = state.size[game, parcel], state.left[game, parcel]
        revenue = tables.revenue[agent, size]
        if tables.suffers[agent]:
            revenue *= income_share(state.pollution[game, parcel], tables.least_income)
        row[10 + size] += 1.0 / BUILDINGS
        if left > 0:
            coming += revenue
            row[6 + left] += revenue / first
        else:
            operating += revenue
            upkeep += tables.upkeep[agent, size]
    row[4] = operating / first
    row[5] = operating / second
    row[6] = (operating + coming) / first
    row[14] = (demand_pays(operating, tables.demand[agent], tables.slopes) - upkeep) / MONEY


@inner
def write_choices(game, agent, tables, mask, gain, row):
    """Write features 15 to 20: the best legal choice of each size, and the share of legal ones."""
    parcels = gain.shape[2]
    for size in range(3):
        for parcel in range(parcels):
            if mask[game, agent, 3 * parcel + size]:
                value = gain[game, agent, parcel, size] / tables.scale
                if row[18 + size] == 0.0 or value > row[15 + size]:
                    row[15 + size] = value
                row[18 + size] += 1.0 / parcels


@inner
def write_parcels(game, agent, kinds, world, state, rows):
    """Write features 0 to 17 of the parcels: owner, building, and location."""
    for parcel in range(rows.shape[0]):
        for k in range(rows.shape[1]):
            rows[parcel, k] = 0.0
        owner = state.owner[game, parcel]
        if owner == FREE:
            rows[parcel, 0] = 1.0
        else:
            rows[parcel, 1 if owner == agent else 2 + kinds[owner]] = 1.0
            rows[parcel, 6 + state.size[game, parcel]] = 1.0
            rows[parcel, 9] = state.left[game, parcel] == 0
            rows[parcel, 10] = state.left[game, parcel] / 4.0
        rows[parcel, 11] = world.level[game, parcel] / LEVELS
        rows[parcel, 12] = land_price(game, parcel, world, state) / MONEY
        rows[parcel, 13] = world.zone[game, parcel] / ZONE
        rows[parcel, 14] = state.pollution[game, parcel]
        rows[parcel, 15] = state.prestige[game, parcel]
        rows[parcel, 16] = world.river[game, parcel]
        rows[parcel, 17] = world.hub[game, parcel] / DISTANCE


@inner
def write_offers(game, agent, world, state, tables, mask, gain, rows):
    """Write features 18 to 29: legality, cost against all money, and marginal value, by size."""
    money = state.cash[game, agent] + tables.credit
    for parcel in range(rows.shape[0]):
        price = land_price(game, parcel, world, state) + world.zone[game, parcel]
        for size in range(3):
            if (
                state.owner[game, parcel] != FREE
                or world.level[game, parcel] < tables.least_level[size]
            ):
                break
            outlay, value = tables.cost[agent, size] + price, gain[game, agent, parcel, size]
            rows[parcel, 18 + size] = mask[game, agent, 3 * parcel + size]
            rows[parcel, 21 + size] = ratio(outlay, money)
            rows[parcel, 24 + size] = value / tables.scale
            rows[parcel, 27 + size] = value / outlay


@inner
def write_land(game, world, state, row):
    """Write the critic's features of free land.

    Free parcels of each level, `[5]`; the mean price of those that carry S, M and L, `[3]`; mean
    pollution and prestige.
    """
    parcels = state.owner.shape[1]
    for k in range(10):
        row[k] = 0.0
    free = 0
    for parcel in range(parcels):
        if state.owner[game, parcel] == FREE:
            free += 1
            level = world.level[game, parcel]
            row[level - 1] += 1.0
            if level >= 3:
                row[2 + level] += land_price(game, parcel, world, state) / MONEY
            row[8] += state.pollution[game, parcel]
            row[9] += state.prestige[game, parcel]
    for k in range(3):
        row[5 + k] /= max(1.0, row[2 + k])
    for k in range(5):
        row[k] /= parcels
    for k in range(8, 10):
        row[k] /= max(1, free)


@compiled
def observe(kinds, trades, world, state, tables, mask, gain, own, parcels, critic_state):
    """Write `own` `[E, A, F1]`, `parcels` `[E, A, P, F2]` and `critic_state` `[E, F3]`.

    `kinds` `[A]` numbers the developers' trades among all `trades`; `mask` and `gain`,
    the marginal net present values, are those of this month.
    """
    private = own.shape[2] - 1 - trades
    games, agents = own.shape[:2]
    for game in range(games):
        month = state.month[game] / tables.months
        for agent in range(agents):
            row = own[game, agent]
            for k in range(row.shape[0]):
                row[k] = 0.0
            write_finances(game, agent, world, state, tables, row)
            write_buildings(game, agent, state, tables, row)
            write_choices(game, agent, tables, mask, gain, row)
            for k in range(private):
                critic_state[game, agent * private + k] = row[k]
            row[private] = month
            row[private + 1 + kinds[agent]] = 1.0
            write_parcels(game, agent, kinds, world, state, parcels[game, agent])
            write_offers(game, agent, world, state, tables, mask, gain, parcels[game, agent])
        critic_state[game, agents * private] = month
        write_land(game, world, state, critic_state[game, agents * private + 1 :])
