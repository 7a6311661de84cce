"""Optimal joint plan of all developers on a small map, by mixed-integer programming.

Without externalities money is linear in what is begun where and when: revenue is a concave function
of capacity, debt a convex one of cash, and more cash never hurts. So the optimum of the linear
program with whole buildings is the optimum of the game.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from keel.apps.land.arrays import Array, World
from keel.apps.land.games import Games
from keel.apps.land.maps import draw_map
from keel.apps.land.report import net_present_value
from keel.apps.land.rules import CONSTRUCTION, LEAST_LEVEL, SMALL, Rules
from keel.errors import InputError, KeelError

GAP = 0.005
"""Relative gap at which the solver stops."""
MOST_PARCELS = 24
MARGIN = 1e-4
"""Margin of money inside the credit line, so that rounding errors cannot break a plan."""

Term = tuple[int, float]
"""Column of the program, and its coefficient."""


@dataclass(frozen=True)
class Optimum:
    """Best plan of the solver, and the bound on its quality."""

    seed: int
    npv: float
    """Net present value of all developers together, in thousands."""
    bound: float
    """upper bound on the net present value of any plan"""
    gap: float
    """(bound − npv) / npv, at most `GAP` unless time ran out"""
    seconds: float
    actions: Array
    """`[months, A]`: the plan, for `Games.step`"""


@dataclass(frozen=True)
class Choice:
    """Candidate building: developer, parcel, size and month."""

    agent: int
    parcel: int
    size: int
    month: int
    outlay: float

    @property
    def operates(self) -> int:
        """First month of income, which may lie after the end."""
        return self.month + CONSTRUCTION[self.size]


class Program:
    """Mixed-integer linear program of one map.

    Columns: x (0 or 1) for each choice, then for each developer and month `revenue`, `debt`,
    whether it is `bankrupt` after the month (0 or 1), and `cash` before it (one month more); these
    attributes are the numbers of the columns, `[A, months]`.
    """

    def __init__(self, rules: Rules, world: World) -> None:
        self.rules, self.choices = rules, list_choices(rules, world)
        self.price = world.price[0]
        agents, months, first = rules.agents, rules.months, len(self.choices)
        flows = first + np.arange(3 * agents * months).reshape(3, agents, months)
        self.revenue, self.debt, self.bankrupt = flows
        self.cash = first + flows.size + np.arange(agents * (months + 1)).reshape(agents, -1)
        self.columns = first + flows.size + self.cash.size
        self._terms: list[tuple[int, int, float]] = []
        self._low: list[float] = []
        self._high: list[float] = []
        self._constrain()

    def objective(self) -> Array:
        """Return the contribution of each column to the total net present value."""
        rules, gamma = self.rules, self.rules.gamma
        value = np.zeros(self.columns)
        for column, choice in enumerate(self.choices):
            trade, size = rules.trades[choice.agent], choice.size
            operating = range(choice.operates, rules.months)
            upkeep = trade.running[size] + trade.rent[size]
            worn = max(0.0, 1.0 - len(operating) / rules.life)
            residual = rules.residual * trade.cost[size] * worn + self.price[choice.parcel]
            value[column] = gamma**rules.months * residual - gamma**choice.month * choice.outlay
            value[column] -= upkeep * sum(gamma**month for month in operating)
        discounts = np.array([gamma**month for month in range(rules.months)])
        value[self.revenue], value[self.debt] = discounts, -rules.interest * discounts
        return value

    def _add(self, terms: Iterable[Term], low: float, high: float) -> None:
        row = len(self._low)
        self._terms += ((row, column, value) for column, value in terms)
        self._low.append(low)
        self._high.append(high)

    def _constrain(self) -> None:
        for parcel in range(self.rules.parcels):
            here = [i for i, choice in enumerate(self.choices) if choice.parcel == parcel]
            self._add(((i, 1.0) for i in here), 0.0, 1.0)
        for agent, trade in enumerate(self.rules.trades):
            self._add([(self.cash[agent, 0], 1.0)], trade.cash, trade.cash)
            own = [(i, choice) for i, choice in enumerate(self.choices) if choice.agent == agent]
            for month in range(self.rules.months):
                self._demand(agent, month, own)
                self._money(agent, month, own)

    def _demand(self, agent: int, month: int, own: list[tuple[int, Choice]]) -> None:
        """Bound revenue by each of the three lines whose minimum is the demand curve."""
        trade, slopes = self.rules.trades[agent], self.rules.slopes
        first, second = trade.demand
        at_zero = (0.0, (slopes[0] - slopes[1]) * first)
        heights = (*at_zero, at_zero[1] + (slopes[1] - slopes[2]) * second)
        operating = [(i, trade.revenue[c.size]) for i, c in own if c.operates <= month]
        for slope, height in zip(slopes, heights, strict=True):
            terms = [(i, -slope * revenue) for i, revenue in operating]
            self._add([(self.revenue[agent, month], 1.0), *terms], -np.inf, height)

    def _money(self, agent: int, month: int, own: list[tuple[int, Choice]]) -> None:
        """Constrain cash from month to month: one building a month, within the credit line."""
        rules, trade = self.rules, self.rules.trades[agent]
        now, then = self.cash[agent, month : month + 2]
        begun = [(i, choice.outlay) for i, choice in own if choice.month == month]
        upkeep = [
            (i, trade.running[c.size] + trade.rent[c.size]) for i, c in own if c.operates <= month
        ]
        line, deep = MARGIN - rules.credit, self._deepest(agent)
        before = [] if month == 0 else [(self.bankrupt[agent, month - 1], 1.0)]
        after = self.bankrupt[agent, month]
        self._add([*((i, 1.0) for i, _ in begun), *before], 0.0, 1.0)
        spent = ((i, -outlay) for i, outlay in begun)
        self._add([(now, 1.0), *spent, *((b, deep) for b, _ in before)], line, np.inf)
        self._add([(then, 1.0), (after, deep)], line, np.inf)
        self._add([(after, 1.0), *((b, -1.0) for b, _ in before)], 0.0, np.inf)
        earned, owed = self.revenue[agent, month], self.debt[agent, month]
        self._add([(owed, 1.0), (now, 1.0)], 0.0, np.inf)
        flow = [(earned, -1.0), (owed, rules.interest), *begun, *upkeep]
        self._add([(then, 1.0), (now, -1.0), *flow], 0.0, 0.0)

    def _deepest(self, agent: int) -> float:
        """Return a bound on how far below the credit line a bankrupt developer can get.

        That is the upkeep of all it can own, every month, without revenue and with interest.
        """
        rules, trade = self.rules, self.rules.trades[agent]
        upkeep = max(map(sum, zip(trade.running, trade.rent, strict=True)))
        grown = (1.0 + rules.interest) ** rules.months
        return (upkeep * rules.parcels * rules.months + rules.credit) * grown

    def solve(self, seconds: float) -> Any:
        """Solve the program and return scipy's result."""
        rows, columns, values = zip(*self._terms, strict=True)
        shape = len(self._low), self.columns
        matrix = coo_matrix((values, (rows, columns)), shape).tocsr()
        integrality = np.zeros(self.columns)
        integrality[: len(self.choices)] = integrality[self.bankrupt] = 1.0
        low, high = np.zeros(self.columns), np.where(integrality > 0.0, 1.0, np.inf)
        low[self.cash] = -np.inf
        return milp(
            -self.objective(),
            constraints=LinearConstraint(matrix, self._low, self._high),
            integrality=integrality,
            bounds=Bounds(low, high),
            options={"time_limit": seconds, "mip_rel_gap": GAP},
        )


def list_choices(rules: Rules, world: World) -> list[Choice]:
    """Return every building that the level allows, in every month, for every developer."""
    price, level = world.price[0] + world.zone[0], world.level[0]
    return [
        Choice(agent, parcel, size, month, trade.cost[size] + float(price[parcel]))
        for agent, trade in enumerate(rules.trades)
        for parcel in range(rules.parcels)
        for size in range(3)
        if level[parcel] >= LEAST_LEVEL[size]
        for month in range(rules.months)
    ]


def find_optimum(seed: int, rules: Rules = SMALL, seconds: float = 60.0) -> Optimum:
    """Solve for the plan with the highest total net present value, within `GAP`.

    Args:
        seed: Seed of the map.
        rules: A variant without externalities, of at most `MOST_PARCELS` parcels.
        seconds: Time limit of the solver.
    """
    if rules.externalities:
        raise InputError("optimum: only without externalities is the game linear")
    if rules.parcels > MOST_PARCELS:
        raise InputError(f"optimum: at most {MOST_PARCELS} parcels, got {rules.parcels}")
    begin = time.perf_counter()
    program = Program(rules, draw_map(rules, seed))
    result = program.solve(seconds)
    if result.x is None:
        raise KeelError(f"optimum: no plan within {seconds:g} s: {result.message}")
    actions = np.full((rules.months, rules.agents), rules.wait)
    for column in np.flatnonzero(result.x[: len(program.choices)] > 0.5):
        choice = program.choices[column]
        actions[choice.month, choice.agent] = 3 * choice.parcel + choice.size
    npv, bound = -float(result.fun), -float(result.mip_dual_bound)
    gap = (bound - npv) / abs(npv) if npv else 0.0
    return Optimum(seed, npv, bound, gap, time.perf_counter() - begin, actions)


def replay(optimum: Optimum, rules: Rules = SMALL) -> float:
    """Play an optimal plan in the game and return the total net present value, in thousands.

    Args:
        optimum: Plan, from `find_optimum`.
        rules: Rules of the game.
    """
    games = Games(rules, 1)
    games.begin([0], [optimum.seed])
    months = [games.step(action[None]) for action in optimum.actions]
    return float(net_present_value(months, rules).sum())
