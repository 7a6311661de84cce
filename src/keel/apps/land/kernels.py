"""The months of many games at once, compiled: 200,000 decisions a second need loops, not arrays.

`world`, `state`, `tables` and `out` are those of `keel.apps.land.arrays`.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from keel.apps.land.arrays import FREE, Purse
from keel.apps.land.compiling import compiled, inner

APPRAISED = 12
"""Months of income by which note 000 judged a building."""
LEAST_NPV, MOST_NPV = -1_500.0, 3_000.0
PROGRESS = 5.0
PENALTY = 500.0
BONUS = np.array([0.0, 1_500.0, 3_700.0])
"""What note 000's size bonuses must have been like: with them its range follows from its prices."""


@inner
def demand_pays(capacity, demand, slopes):
    """What a trade earns in a month from the revenue it has room for: concave, in three parts."""
    first, second = demand
    paid = slopes[0] * min(capacity, first)
    if capacity > first:
        paid += slopes[1] * (min(capacity, second) - first)
    if capacity > second:
        paid += slopes[2] * (capacity - second)
    return paid


@inner
def share_left(pollution, least):
    """Of the income of one that suffers."""
    return max(least, 1.0 - pollution)


@inner
def land_price(game, parcel, world, state):
    """Of land alone, today."""
    return world.price[game, parcel] * (1.0 + state.prestige[game, parcel])


@inner
def building_worth(cost, age, tables):
    """After the last month."""
    return tables.residual * cost * max(0.0, 1.0 - age / tables.life)


@inner
def turn_of(game, turn, agents, world, state):
    """The developer whose wish is heard at this turn of the month; who is first rotates."""
    return (turn + state.month[game] + world.first[game]) % agents


@inner
def is_legal(game, agent, parcel, size, world, state, tables):
    """Whether this size may be begun here by this developer, now."""
    if state.bankrupt[game, agent] or state.owner[game, parcel] != FREE:
        return False
    if world.level[game, parcel] < tables.least_level[size]:
        return False
    price = land_price(game, parcel, world, state) + world.zone[game, parcel]
    return tables.cost[agent, size] + price <= state.cash[game, agent] + tables.credit


@inner
def months_counted(month, size, tables):
    """Of the twelve by which note 000 judged a building: all, though the game may end before."""
    if tables.late_build_npv:
        return APPRAISED
    return min(APPRAISED, max(0, tables.months - month - tables.construction[size]))


@inner
def legacy_pay(agent, size, outlay, cash, months, tables):
    """Note 000's reward in the month a building is begun; waiting pays 0.

    From the note: the sum NPV + progress − budget penalty, and the three ranges. Reconstructed:
    the NPV is twelve months of revenue less running costs and rent at full demand, undiscounted,
    less what is paid today, plus a bonus for size; progress is 5, 10 or 15 for S, M and L; the
    penalty grows with the share of the credit line that is used after paying.
    """
    income = months * (tables.revenue[agent, size] - tables.upkeep[agent, size])
    npv = min(MOST_NPV, max(LEAST_NPV, income - outlay + BONUS[size]))
    debt = max(0.0, outlay - cash)
    penalty = PENALTY * min(1.0, debt / tables.credit) if debt > 0.0 else 0.0
    return npv + PROGRESS * (size + 1) - penalty


@inner
def told(agent, size, outlay, cash, month, tables):
    """What the faulty rewards say of a building on the day it is begun."""
    if tables.legacy:
        months = months_counted(month, size, tables)
        return legacy_pay(agent, size, outlay, cash, months, tables)
    return APPRAISED * (tables.revenue[agent, size] - tables.upkeep[agent, size])


@inner
def hear_wishes(game, action, world, state, tables, out, purse):
    """Begin what was wished for, in the order of the month."""
    agents = action.shape[1]
    wait = 3 * state.owner.shape[1]
    for agent in range(agents):
        wish = action[game, agent]
        out.begun[game, agent] = wait
        out.conflict[game, agent] = False
        out.refused[game, agent] = wish != wait and not is_legal(
            game, agent, wish // 3, wish % 3, world, state, tables
        )
    for turn in range(agents):
        agent = turn_of(game, turn, agents, world, state)
        wish = action[game, agent]
        if wish == wait or out.refused[game, agent]:
            continue
        parcel, size = wish // 3, wish % 3
        if state.owner[game, parcel] != FREE:
            out.conflict[game, agent] = True
            continue
        price = land_price(game, parcel, world, state) + world.zone[game, parcel]
        purse.spent[agent] = tables.cost[agent, size] + price
        purse.told[agent] = told(
            agent, size, purse.spent[agent], state.cash[game, agent], state.month[game], tables
        )
        state.owner[game, parcel] = agent
        state.size[game, parcel] = size
        state.left[game, parcel] = tables.construction[size]
        out.begun[game, agent] = wish


@inner
def operate(game, state, tables, purse, capacity):
    """What operating buildings earn; `capacity` `[A]` is the revenue that meets demand."""
    for parcel in range(state.owner.shape[1]):
        agent = state.owner[game, parcel]
        if agent == FREE or state.left[game, parcel] > 0:
            continue
        size = state.size[game, parcel]
        revenue = tables.revenue[agent, size]
        if tables.suffers[agent]:
            revenue *= share_left(state.pollution[game, parcel], tables.least_income)
        capacity[agent] += revenue
        purse.earned[agent] -= tables.upkeep[agent, size]
        state.age[game, parcel] += 1
    for agent in range(capacity.shape[0]):
        purse.earned[agent] += demand_pays(capacity[agent], tables.demand[agent], tables.slopes)


@inner
def construct(game, state, tables):
    """A month of construction; what is finished operates, and is felt, from the next month on."""
    parcels = state.owner.shape[1]
    for parcel in range(parcels):
        if state.left[game, parcel] == 0:
            continue
        state.left[game, parcel] -= 1
        if state.left[game, parcel] > 0:
            continue
        agent, size = state.owner[game, parcel], state.size[game, parcel]
        pollutes, adorns = tables.pollutes[agent, size], tables.adorns[agent, size]
        for other in range(parcels):
            state.pollution[game, other] += tables.near[parcel, other] * pollutes
            state.prestige[game, other] += tables.near[parcel, other] * adorns


@inner
def settle(game, state, tables, out, purse):
    """Interest on the debt with which the month began, cash, and who is bankrupt."""
    for agent in range(state.cash.shape[1]):
        cash = state.cash[game, agent]
        purse.owed[agent] = tables.interest * max(0.0, -cash)
        flow = purse.earned[agent] - purse.spent[agent] - purse.owed[agent]
        out.flow[game, agent] = flow
        state.cash[game, agent] = cash + flow
        if cash + flow < -tables.credit:
            state.bankrupt[game, agent] = True


@compiled
def holdings(game, world, state, tables):
    """`[A]`: what buildings and land would be worth if this were the end."""
    kept = np.zeros(state.cash.shape[1])
    for parcel in range(state.owner.shape[1]):
        agent = state.owner[game, parcel]
        if agent != FREE:
            cost = tables.cost[agent, state.size[game, parcel]]
            worth = building_worth(cost, state.age[game, parcel], tables)
            kept[agent] += worth + land_price(game, parcel, world, state)
    return kept


@inner
def own_reward(flow, kept, spent, owed, promise, tables):
    """One developer's, before the welfare mix and the scale."""
    if tables.legacy:
        return promise
    if tables.late_build_npv:
        flow = promise - spent - owed
    return flow + tables.gamma * kept


@inner
def reward(game, tables, out, purse):
    """Of every developer."""
    agents = out.reward.shape[1]
    mean = 0.0
    for agent in range(agents):
        flow, kept = out.flow[game, agent], out.kept[game, agent]
        spent, owed, promise = purse.spent[agent], purse.owed[agent], purse.told[agent]
        out.reward[game, agent] = own_reward(flow, kept, spent, owed, promise, tables)
        mean += out.reward[game, agent] / agents
    for agent in range(agents):
        mixed = (1.0 - tables.welfare) * out.reward[game, agent] + tables.welfare * mean
        scaled = mixed / tables.scale
        out.reward[game, agent] = max(-1.0, min(1.0, scaled)) if tables.reward_clip else scaled


@compiled
def advance(action, world, state, tables, out):
    """One month of every game; `action` `[E, A]`."""
    games, agents = action.shape
    purse = Purse(np.empty(agents), np.empty(agents), np.empty(agents), np.empty(agents))
    capacity = np.empty(agents)
    for game in range(games):
        for agent in range(agents):
            purse.spent[agent] = purse.earned[agent] = purse.told[agent] = 0.0
            capacity[agent] = out.kept[game, agent] = 0.0
        hear_wishes(game, action, world, state, tables, out, purse)
        operate(game, state, tables, purse, capacity)
        construct(game, state, tables)
        settle(game, state, tables, out, purse)
        out.done[game] = state.month[game] == tables.months - 1
        if out.done[game]:
            kept = holdings(game, world, state, tables)
            for agent in range(agents):
                out.kept[game, agent] = kept[agent]
        reward(game, tables, out, purse)
        state.month[game] += 1


@compiled
def legal(games, world, state, tables, mask):
    """Write into `mask` `[E, A, 3P + 1]` what may be done in each of `games` `[K]`."""
    agents, actions = mask.shape[1:]
    for game in games:
        for parcel in range((actions - 1) // 3):
            free = state.owner[game, parcel] == FREE
            price = land_price(game, parcel, world, state) + world.zone[game, parcel]
            for agent in range(agents):
                money = state.cash[game, agent] + tables.credit
                able = free and not state.bankrupt[game, agent]
                for size in range(3):
                    mask[game, agent, 3 * parcel + size] = (
                        able
                        and world.level[game, parcel] >= tables.least_level[size]
                        and tables.cost[agent, size] + price <= money
                    )
        for agent in range(agents):
            mask[game, agent, actions - 1] = True
