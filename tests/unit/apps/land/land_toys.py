"""Games on flat land, where numbers can be worked by hand, and a second way to compute an NPV."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keel.apps.land.arrays import World
from keel.apps.land.games import Games
from keel.apps.land.rules import CONSTRUCTION, Rules

PRICE, ZONE = 500.0, 100.0


def flat(rules: Rules, count: int = 1, first: int = 0) -> Games:
    """Every parcel costs 500 and 100 for permission and carries all sizes; `first` is first."""
    games = Games(rules, count)
    arrays, data = games.save()
    for name, value in (("price", PRICE), ("zone", ZONE), ("level", 5), ("first", first)):
        arrays[f"world/{name}"][:] = value
    games.load(arrays, data)
    return games


def build(parcel: int, size: int) -> int:
    return 3 * parcel + size


def wishes(games: Games, **by_name: int) -> np.ndarray:
    """`[1, A]`: what is named, and waiting."""
    action = np.full((1, games.rules.agents), games.rules.wait)
    for name, wish in by_name.items():
        action[0, games.rules.names.index(name)] = wish
    return action


class Event(NamedTuple):
    """A building that was begun."""

    month: int
    agent: int
    parcel: int
    size: int

    @property
    def operates(self) -> int:
        return self.month + CONSTRUCTION[self.size]


def felt(rules: Rules, here: int, there: int) -> float:
    if here == there or not rules.externalities:
        return 0.0
    (y, x), (v, u) = divmod(here, rules.columns), divmod(there, rules.columns)
    return math.exp(-math.hypot(y - v, x - u) / rules.reach)


def around(rules: Rules, events: Sequence[Event], parcel: int, month: int, what: str) -> float:
    """Pollution or prestige from all that operates in a month."""
    return sum(
        getattr(rules.trades[e.agent], what)[e.size] * felt(rules, e.parcel, parcel)
        for e in events
        if e.operates <= month
    )


def demand(rules: Rules, agent: int, capacity: float) -> float:
    """The integral of a falling staircase."""
    first, second = rules.trades[agent].demand
    edges = (0.0, first, second, math.inf)
    return sum(
        slope * max(0.0, min(capacity, high) - low)
        for slope, low, high in zip(rules.slopes, edges[:-1], edges[1:], strict=True)
    )


def audit(rules: Rules, world: World, events: Sequence[Event]) -> list[float]:
    """The NPV of each developer from the log of events alone: nothing is carried from one month to
    the next but cash, by which interest goes."""
    return [_audit_one(rules, world, events, agent) for agent in range(rules.agents)]


def _audit_one(rules: Rules, world: World, events: Sequence[Event], agent: int) -> float:
    trade, own = rules.trades[agent], [e for e in events if e.agent == agent]
    cash, npv = trade.cash, 0.0
    for month in range(rules.months):
        flow = -rules.interest * max(0.0, -cash)
        capacity = 0.0
        for e in own:
            if e.month == month:
                dearer = 1.0 + around(rules, events, e.parcel, month, "adorns")
                flow -= trade.cost[e.size]
                flow -= world.price[0, e.parcel] * dearer + world.zone[0, e.parcel]
            if e.operates <= month:
                dirt = around(rules, events, e.parcel, month, "pollutes")
                share = max(rules.least_income, 1.0 - dirt) if trade.suffers else 1.0
                capacity += trade.revenue[e.size] * share
                flow -= trade.running[e.size] + trade.rent[e.size]
        flow += demand(rules, agent, capacity)
        cash += flow
        npv += flow / (1.0 + rules.rate) ** month
    for e in own:
        worn = max(0, rules.months - e.operates) / rules.life
        dearer = 1.0 + around(rules, events, e.parcel, rules.months, "adorns")
        kept = rules.residual * trade.cost[e.size] * max(0.0, 1.0 - worn)
        kept += world.price[0, e.parcel] * dearer
        npv += kept / (1.0 + rules.rate) ** rules.months
    return npv
