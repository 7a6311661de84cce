"""Compiled kernels that advance many games by a month, at 200,000 decisions a second.

`world`, `state`, `tables` and `out` are those of `keel.apps.land.arrays`.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from keel.apps.land.arrays import FREE, CashFlows
from keel.apps.land.compiling import compiled, inner

APPRAISED_MONTHS = 12
"""Months of income by which the legacy reward appraises a building."""
LEAST_NPV, MOST_NPV = -1_500.0, 3_000.0
PROGRESS = 5.0
PENALTY = 500.0
BONUS = np.array([0.0, 1_500.0, 3_700.0])
"""Size bonuses of the legacy reward, reconstructed: with them its range follows from its prices."""


@inner
def demand_pays(capacity, demand, slopes):
    """Return a trade's monthly revenue at a capacity: concave, in three linear parts."""
    first, second = demand
    paid = slopes[0] * min(capacity, first)
    if capacity > first:
        paid += slopes[1] * (min(capacity, second) - first)
    if capacity > second:
        paid += slopes[2] * (capacity - second)
    return paid


@inner
def income_share(pollution, least):
    """Return the share of income that pollution leaves to a trade that suffers."""
    return max(least, 1.0 - pollution)


@inner
def land_price(game, parcel, world, state):
    """Return today's price of land alone."""
    return world.price[game, parcel] * (1.0 + state.prestige[game, parcel])


@inner
def building_value(cost, age, tables):
    """Return the value of a building after the last month."""
    return tables.residual * cost * max(0.0, 1.0 - age / tables.life)


@inner
def turn_of(game, turn, agents, world, state):
    """Return the developer that acts at this turn of the month; priority rotates monthly."""
    return (turn + state.month[game] + world.first[game]) % agents


@inner
def is_legal(game, agent, parcel, size, world, state, tables):
    """Return whether a developer may begin this size on this parcel now."""
    if state.bankrupt[game, agent] or state.owner[game, parcel] != FREE:
        return False
    if world.level[game, parcel] < tables.least_level[size]:
        return False
    price = land_price(game, parcel, world, state) + world.zone[game, parcel]
    return tables.cost[agent, size] + price <= state.cash[game, agent] + tables.credit


@inner
def months_counted(month, size, tables):
    """Return the months of income that the legacy reward counts, though the game may end before."""
    if tables.late_build_npv:
        return APPRAISED_MONTHS
    return min(APPRAISED_MONTHS, max(0, tables.months - month - tables.construction[size]))


@inner
def legacy_reward(agent, size, outlay, cash, months, tables):
    """Return the legacy reward in the month a building is begun; waiting pays 0.

    Documented: the sum NPV + progress − budget penalty, and the three ranges. Reconstructed:
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
def appraisal(agent, size, outlay, cash, month, tables):
    """Return what the faulty rewards pay for a building on the day it is begun."""
    if tables.legacy:
        months = months_counted(month, size, tables)
        return legacy_reward(agent, size, outlay, cash, months, tables)
    return APPRAISED_MONTHS * (tables.revenue[agent, size] - tables.upkeep[agent, size])


@inner
def begin_buildings(game, action, world, state, tables, out, flows):
    """Begin the chosen buildings in the priority order of the month."""
    agents = action.shape[1]
    wait = 3 * state.owner.shape[1]
    for agent in range(agents):
        chosen = action[game, agent]
        out.begun[game, agent] = wait
        out.conflict[game, agent] = False
        out.refused[game, agent] = chosen != wait and not is_legal(
            game, agent, chosen // 3, chosen % 3, world, state, tables
        )
    for turn in range(agents):
        agent = turn_of(game, turn, agents, world, state)
        chosen = action[game, agent]
        if chosen == wait or out.refused[game, agent]:
            continue
        parcel, size = chosen // 3, chosen % 3
        if state.owner[game, parcel] != FREE:
            out.conflict[game, agent] = True
            continue
        price = land_price(game, parcel, world, state) + world.zone[game, parcel]
        flows.spent[agent] = tables.cost[agent, size] + price
        flows.appraisal[agent] = appraisal(
            agent, size, flows.spent[agent], state.cash[game, agent], state.month[game], tables
        )
        state.owner[game, parcel] = agent
        state.size[game, parcel] = size
        state.left[game, parcel] = tables.construction[size]
        out.begun[game, agent] = chosen


@inner
def operate(game, state, tables, flows, capacity):
    """Add the income of operating buildings; `capacity` `[A]` is the revenue that meets demand."""
    for parcel in range(state.owner.shape[1]):
        agent = state.owner[game, parcel]
        if agent == FREE or state.left[game, parcel] > 0:
            continue
        size = state.size[game, parcel]
        revenue = tables.revenue[agent, size]
        if tables.suffers[agent]:
            revenue *= income_share(state.pollution[game, parcel], tables.least_income)
        capacity[agent] += revenue
        flows.earned[agent] -= tables.upkeep[agent, size]
        state.age[game, parcel] += 1
    for agent in range(capacity.shape[0]):
        flows.earned[agent] += demand_pays(capacity[agent], tables.demand[agent], tables.slopes)


@inner
def construct(game, state, tables):
    """Advance construction by a month; finished buildings take effect from the next month on."""
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
def settle(game, state, tables, out, flows):
    """Charge interest on the initial debt of the month, and update cash and bankruptcies."""
    for agent in range(state.cash.shape[1]):
        cash = state.cash[game, agent]
        flows.interest[agent] = tables.interest * max(0.0, -cash)
        flow = flows.earned[agent] - flows.spent[agent] - flows.interest[agent]
        out.flow[game, agent] = flow
        state.cash[game, agent] = cash + flow
        if cash + flow < -tables.credit:
            state.bankrupt[game, agent] = True


@compiled
def holdings(game, world, state, tables):
    """Return the value of buildings and land if the game ended now, `[A]`."""
    terminal_value = np.zeros(state.cash.shape[1])
    for parcel in range(state.owner.shape[1]):
        agent = state.owner[game, parcel]
        if agent != FREE:
            cost = tables.cost[agent, state.size[game, parcel]]
            value = building_value(cost, state.age[game, parcel], tables)
            terminal_value[agent] += value + land_price(game, parcel, world, state)
    return terminal_value


@inner
def own_reward(flow, terminal_value, spent, interest, appraised, tables):
    """Return one developer's reward before the welfare mix and the scale."""
    if tables.legacy:
        return appraised
    if tables.late_build_npv:
        flow = appraised - spent - interest
    return flow + tables.gamma * terminal_value


@inner
def reward(game, tables, out, flows):
    """Write the rewards of all developers."""
    agents = out.reward.shape[1]
    mean = 0.0
    for agent in range(agents):
        flow, value = out.flow[game, agent], out.terminal_value[game, agent]
        spent, interest = flows.spent[agent], flows.interest[agent]
        appraised = flows.appraisal[agent]
        out.reward[game, agent] = own_reward(flow, value, spent, interest, appraised, tables)
        mean += out.reward[game, agent] / agents
    for agent in range(agents):
        mixed = (1.0 - tables.welfare) * out.reward[game, agent] + tables.welfare * mean
        scaled = mixed / tables.scale
        out.reward[game, agent] = max(-1.0, min(1.0, scaled)) if tables.reward_clip else scaled


@compiled
def advance(action, world, state, tables, out):
    """Advance every game by one month; `action` `[E, A]`."""
    games, agents = action.shape
    flows = CashFlows(np.empty(agents), np.empty(agents), np.empty(agents), np.empty(agents))
    capacity = np.empty(agents)
    for game in range(games):
        for agent in range(agents):
            flows.spent[agent] = flows.earned[agent] = flows.appraisal[agent] = 0.0
            capacity[agent] = out.terminal_value[game, agent] = 0.0
        begin_buildings(game, action, world, state, tables, out, flows)
        operate(game, state, tables, flows, capacity)
        construct(game, state, tables)
        settle(game, state, tables, out, flows)
        out.done[game] = state.month[game] == tables.months - 1
        if out.done[game]:
            terminal_value = holdings(game, world, state, tables)
            for agent in range(agents):
                out.terminal_value[game, agent] = terminal_value[agent]
        reward(game, tables, out, flows)
        state.month[game] += 1


@compiled
def write_mask(games, world, state, tables, mask):
    """Write the legal actions of each of `games` `[K]` into `mask` `[E, A, 3P + 1]`."""
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
