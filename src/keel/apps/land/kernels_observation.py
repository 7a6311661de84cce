"""What developers and the critic see, compiled: written once a month for every game.

Features stand in the order in which `keel.apps.land.observations` names them.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from keel.apps.land.arrays import FREE
from keel.apps.land.compiling import compiled, inner
from keel.apps.land.kernels import demand_pays, land_price, share_left, turn_of

CASH, MONEY, BUILDINGS, ZONE, DISTANCE, LEVELS = 10_000.0, 1_000.0, 8.0, 200.0, 5.0, 5
"""Units in which features are of size about 1."""
MOST = 3.0
"""At which ratios to money that may be all but gone are cut."""


@inner
def ratio(amount, whole):
    """`amount / whole`, at most `MOST`."""
    return min(MOST, amount / whole) if whole > 0.0 and amount > 0.0 else MOST * (amount > 0.0)


@inner
def see_purse(game, agent, world, state, tables, row):
    """0 to 3, and 13: money, and the turn of this month."""
    agents, cash = state.cash.shape[1], state.cash[game, agent]
    row[0] = cash / CASH
    row[1] = max(0.0, cash + tables.credit) / CASH
    row[2] = ratio(-cash, tables.credit)
    row[3] = state.bankrupt[game, agent]
    for turn in range(agents):
        if turn_of(game, turn, agents, world, state) == agent:
            row[13] = 1.0 - turn / (agents - 1.0)


@inner
def see_buildings(game, agent, state, tables, row):
    """4 to 12, and 14: what stands and what is coming, against demand."""
    first, second = tables.demand[agent]
    operating, coming, upkeep = 0.0, 0.0, 0.0
    for parcel in range(state.owner.shape[1]):
        if state.owner[game, parcel] != agent:
            continue
        size, left = state.size[game, parcel], state.left[game, parcel]
        revenue = tables.revenue[agent, size]
        if tables.suffers[agent]:
            revenue *= share_left(state.pollution[game, parcel], tables.least_income)
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
def see_choices(game, agent, tables, mask, worth, row):
    """15 to 20: the best of what is legal for each size, and how many there are."""
    parcels = worth.shape[2]
    for size in range(3):
        for parcel in range(parcels):
            if mask[game, agent, 3 * parcel + size]:
                value = worth[game, agent, parcel, size] / tables.scale
                if row[18 + size] == 0.0 or value > row[15 + size]:
                    row[15 + size] = value
                row[18 + size] += 1.0 / parcels


@inner
def see_parcels(game, agent, kinds, world, state, rows):
    """0 to 17: whose it is, what stands there, and the place."""
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
def see_offers(game, agent, world, state, tables, mask, worth, rows):
    """18 to 29: for each size whether it is legal, its cost against all money, and its worth."""
    money = state.cash[game, agent] + tables.credit
    for parcel in range(rows.shape[0]):
        price = land_price(game, parcel, world, state) + world.zone[game, parcel]
        for size in range(3):
            if (
                state.owner[game, parcel] != FREE
                or world.level[game, parcel] < tables.least_level[size]
            ):
                break
            outlay, value = tables.cost[agent, size] + price, worth[game, agent, parcel, size]
            rows[parcel, 18 + size] = mask[game, agent, 3 * parcel + size]
            rows[parcel, 21 + size] = ratio(outlay, money)
            rows[parcel, 24 + size] = value / tables.scale
            rows[parcel, 27 + size] = value / outlay


@inner
def see_land(game, world, state, row):
    """Free parcels of each level, `[5]`; the mean price of those that carry S, M and L, `[3]`; mean
    pollution and prestige of all that is free."""
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
def look(kinds, trades, world, state, tables, mask, worth, own, parcels, whole):
    """Write `own` `[E, A, F1]`, `parcels` `[E, A, P, F2]` and `whole` `[E, F3]`.

    `kinds` `[A]` numbers the developers' trades among all `trades`; `mask` and `worth` are those of
    this month.
    """
    private = own.shape[2] - 1 - trades
    games, agents = own.shape[:2]
    for game in range(games):
        month = state.month[game] / tables.months
        for agent in range(agents):
            row = own[game, agent]
            for k in range(row.shape[0]):
                row[k] = 0.0
            see_purse(game, agent, world, state, tables, row)
            see_buildings(game, agent, state, tables, row)
            see_choices(game, agent, tables, mask, worth, row)
            for k in range(private):
                whole[game, agent * private + k] = row[k]
            row[private] = month
            row[private + 1 + kinds[agent]] = 1.0
            see_parcels(game, agent, kinds, world, state, parcels[game, agent])
            see_offers(game, agent, world, state, tables, mask, worth, parcels[game, agent])
        whole[game, agents * private] = month
        see_land(game, world, state, whole[game, agents * private + 1 :])
