"""Arrays that the compiled kernels work on: the rules, the maps and the state of E games."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keel.apps.land.rules import AHEAD, CONSTRUCTION, LEAST_LEVEL, Rules

Array = NDArray[Any]
Floats = NDArray[np.float64]
FREE = -1
"""Owner number of a parcel without an owner."""


class World(NamedTuple):
    """Maps of E games; they do not change during a game."""

    price: Array
    """`[E, P]` float64: price of the land before anything is built"""
    zone: Array
    """`[E, P]` float64: cost of the building permission"""
    level: Array
    """`[E, P]` int8: 1 to 5"""
    river: Array
    """`[E, P]` bool: whether the parcel lies at the water"""
    hub: Array
    """`[E, P]` float64: distance to the nearest hub, in parcels"""
    hubs: Array
    """`[E, 2, 2]` float64: row and column of the two hubs"""
    course: Array
    """`[E, 4]` float64: the river's row is `c0 + c1 sin(column / c2 + c3)`"""
    first: Array
    """`[E]` int64: the developer who is first in the first month"""


class State(NamedTuple):
    """State of E games at the beginning of a month."""

    owner: Array
    """`[E, P]` int8: a developer, or `FREE`"""
    size: Array
    """`[E, P]` int8: 0, 1, 2 for S, M, L; 0 on an empty parcel"""
    left: Array
    """`[E, P]` int8: months until the building operates"""
    age: Array
    """`[E, P]` int16: months that the building has operated"""
    prestige: Array
    """`[E, P]` float64: relative increase of the land price"""
    pollution: Array
    """`[E, P]` float64: share of income that is lost on the parcel"""
    cash: Array
    """`[E, A]` float64"""
    bankrupt: Array
    """`[E, A]` bool"""
    month: Array
    """`[E]` int64: 0 at the beginning"""


class Tables(NamedTuple):
    """`Rules` as arrays for the kernels: `[A, 3]` by trade and size, unless noted otherwise."""

    cost: Array
    revenue: Array
    upkeep: Array
    """running costs and rent"""
    pollutes: Array
    adorns: Array
    suffers: Array
    """`[A]` bool"""
    demand: Array
    """`[A, 2]`"""
    slopes: Array
    """`[3]`"""
    near: Array
    """`[P, P]`: weight with which a building on one parcel affects another parcel"""
    construction: Array
    """`[3]` int64"""
    least_level: Array
    """`[3]` int64"""
    discount: Array
    """`[months + ahead + 2]`: γ^k"""
    annuity: Array
    """`[months + ahead + 2]`: the sum of γ^0 … γ^(k − 1)"""
    months: int
    ahead: int
    credit: float
    interest: float
    gamma: float
    residual: float
    life: float
    least_income: float
    welfare: float
    scale: float
    legacy: bool
    late_build_npv: bool
    reward_clip: bool


class CashFlows(NamedTuple):
    """Cash flows of one month of one game, `[A]` each."""

    spent: Array
    """outlay for the building that was begun"""
    earned: Array
    """income of operating buildings"""
    interest: Array
    """interest on debt"""
    appraisal: Array
    """appraisal that the legacy rewards pay for the building that was begun"""


class Month(NamedTuple):
    """Outcome of one month for each developer, `[E, A]`; the arrays are never overwritten."""

    reward: Array
    """float64"""
    flow: Array
    """float64: cash in less cash out, in thousands"""
    terminal_value: Array
    """float64: value of buildings and land the day after the last month, else 0"""
    begun: Array
    """int64: the action that was carried out, or the wait action"""
    conflict: Array
    """bool: a legal action that lost the parcel to another developer; it cost nothing"""
    refused: Array
    """bool: an illegal action; nothing was done"""
    done: Array
    """`[E]` bool: whether that was the last month"""


def nearness(rules: Rules) -> Floats:
    """Return exp(−distance / reach), `[P, P]`; 0 on the diagonal and without externalities."""
    place = np.stack(np.divmod(np.arange(rules.parcels), rules.columns), 1).astype(np.float64)
    distance = np.sqrt(((place[:, None] - place[None]) ** 2).sum(-1))
    near = np.exp(-distance / rules.reach)
    np.fill_diagonal(near, 0.0)
    return near if rules.externalities else np.zeros_like(near)


def make_tables(rules: Rules) -> Tables:
    """Return the rules as arrays for the kernels."""

    def table(name: str) -> Floats:
        return np.array([getattr(trade, name) for trade in rules.trades], np.float64)

    powers = rules.gamma ** np.arange(rules.months + AHEAD + 2)
    names = ("credit", "interest", "gamma", "residual", "life", "least_income", "welfare", "scale")
    numbers: dict[str, Any] = {name: float(getattr(rules, name)) for name in names}
    by_trade = ("cost", "revenue", "pollutes", "adorns", "demand")
    tables: dict[str, Any] = {name: table(name) for name in by_trade}
    return Tables(
        **tables,
        **numbers,
        upkeep=table("running") + table("rent"),
        suffers=np.array([trade.suffers for trade in rules.trades]),
        slopes=np.array(rules.slopes, np.float64),
        near=nearness(rules),
        construction=np.array(CONSTRUCTION),
        least_level=np.array(LEAST_LEVEL),
        discount=powers,
        annuity=np.append(0.0, np.cumsum(powers)[:-1]),
        months=int(rules.months),
        ahead=AHEAD,
        legacy=rules.reward == "legacy",
        late_build_npv=bool(rules.late_build_npv),
        reward_clip=bool(rules.reward_clip),
    )


def blank_world(rules: Rules, games: int) -> World:
    """Allocate the maps of `games` games."""
    shape = games, rules.parcels
    return World(
        price=np.zeros(shape),
        zone=np.zeros(shape),
        level=np.ones(shape, np.int8),
        river=np.zeros(shape, bool),
        hub=np.zeros(shape),
        hubs=np.zeros((games, 2, 2)),
        course=np.zeros((games, 4)),
        first=np.zeros(games, np.int64),
    )


def blank_state(rules: Rules, games: int) -> State:
    """Return the state of `games` games in their first month."""
    shape = games, rules.parcels
    return State(
        owner=np.full(shape, FREE, np.int8),
        size=np.zeros(shape, np.int8),
        left=np.zeros(shape, np.int8),
        age=np.zeros(shape, np.int16),
        prestige=np.zeros(shape),
        pollution=np.zeros(shape),
        cash=np.tile([trade.cash for trade in rules.trades], (games, 1)).astype(np.float64),
        bankrupt=np.zeros((games, rules.agents), bool),
        month=np.zeros(games, np.int64),
    )


def blank_month(rules: Rules, games: int) -> Month:
    """Allocate the outcome of a month of `games` games."""
    shape = games, rules.agents
    return Month(
        reward=np.empty(shape),
        flow=np.empty(shape),
        terminal_value=np.empty(shape),
        begun=np.empty(shape, np.int64),
        conflict=np.empty(shape, bool),
        refused=np.empty(shape, bool),
        done=np.empty(games, bool),
    )
