"""What the compiled loops work on: the rules, the maps and the state of E games, as arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keel.apps.land.rules import AHEAD, CONSTRUCTION, LEAST_LEVEL, Rules

Array = NDArray[Any]
Floats = NDArray[np.float64]
FREE = -1
"""The owner of a parcel that nobody has."""


class World(NamedTuple):
    """The maps; they do not change during a game."""

    price: Array
    """`[E, P]` float64: of the land, before anything is built"""
    zone: Array
    """`[E, P]` float64: what permission costs"""
    level: Array
    """`[E, P]` int8: 1 to 5"""
    river: Array
    """`[E, P]` bool: at the water"""
    hub: Array
    """`[E, P]` float64: distance to the nearest hub, in parcels"""
    hubs: Array
    """`[E, 2, 2]` float64: row and column of the two hubs"""
    course: Array
    """`[E, 4]` float64: the river's row is `c0 + c1 sin(column / c2 + c3)`"""
    first: Array
    """`[E]` int64: the developer who is first in the first month"""


class State(NamedTuple):
    """Where E games stand at the beginning of a month."""

    owner: Array
    """`[E, P]` int8: a developer, or `FREE`"""
    size: Array
    """`[E, P]` int8: 0, 1, 2 for S, M, L; 0 where nothing stands"""
    left: Array
    """`[E, P]` int8: months until it operates"""
    age: Array
    """`[E, P]` int16: months that it has operated"""
    prestige: Array
    """`[E, P]` float64: the share by which land has become dearer"""
    pollution: Array
    """`[E, P]` float64: the share of income that is lost here"""
    cash: Array
    """`[E, A]` float64"""
    bankrupt: Array
    """`[E, A]` bool"""
    month: Array
    """`[E]` int64: 0 at the beginning"""


class Tables(NamedTuple):
    """`Rules` for the loops: `[A, 3]` by trade and size, unless it says otherwise."""

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
    """`[P, P]`: how much of what stands on one parcel is felt on another"""
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


class Purse(NamedTuple):
    """How a month's money of one game came about, `[A]`."""

    spent: Array
    """on what was begun"""
    earned: Array
    """by what operates"""
    owed: Array
    """as interest"""
    told: Array
    """by the rewards of note 000 of what was begun"""


class Month(NamedTuple):
    """What a month brought each developer, `[E, A]`; the arrays are the caller's to keep."""

    reward: Array
    """float64"""
    flow: Array
    """float64: cash in less cash out, in thousands"""
    kept: Array
    """float64: what buildings and land are worth the day after the last month, else 0"""
    begun: Array
    """int64: the action that was carried out, or that of waiting"""
    conflict: Array
    """bool: a legal wish that lost to another developer's; it cost nothing"""
    refused: Array
    """bool: an illegal wish; nothing was done"""
    done: Array
    """`[E]` bool: that was the last month"""


def nearness(rules: Rules) -> Floats:
    """`[P, P]`: exp(−distance / reach), 0 on the parcel itself and without externalities."""
    place = np.stack(np.divmod(np.arange(rules.parcels), rules.columns), 1).astype(np.float64)
    distance = np.sqrt(((place[:, None] - place[None]) ** 2).sum(-1))
    felt = np.exp(-distance / rules.reach)
    np.fill_diagonal(felt, 0.0)
    return felt if rules.externalities else np.zeros_like(felt)


def make_tables(rules: Rules) -> Tables:
    """Everything that loops must know of the rules."""

    def table(name: str) -> Floats:
        return np.array([getattr(trade, name) for trade in rules.trades], np.float64)

    powers = rules.gamma ** np.arange(rules.months + AHEAD + 2)
    return Tables(
        cost=table("cost"),
        revenue=table("revenue"),
        upkeep=table("running") + table("rent"),
        pollutes=table("pollutes"),
        adorns=table("adorns"),
        suffers=np.array([trade.suffers for trade in rules.trades]),
        demand=table("demand"),
        slopes=np.array(rules.slopes, np.float64),
        near=nearness(rules),
        construction=np.array(CONSTRUCTION),
        least_level=np.array(LEAST_LEVEL),
        discount=powers,
        annuity=np.append(0.0, np.cumsum(powers)[:-1]),
        months=int(rules.months),
        ahead=AHEAD,
        credit=float(rules.credit),
        interest=float(rules.interest),
        gamma=float(rules.gamma),
        residual=float(rules.residual),
        life=float(rules.life),
        least_income=float(rules.least_income),
        welfare=float(rules.welfare),
        scale=float(rules.scale),
        legacy=rules.reward == "legacy",
        late_build_npv=bool(rules.late_build_npv),
        reward_clip=bool(rules.reward_clip),
    )


def blank_world(rules: Rules, games: int) -> World:
    """Room for the maps of so many games."""
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
    """So many games in their first month."""
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
    """Room for what a month brings."""
    shape = games, rules.agents
    return Month(
        reward=np.empty(shape),
        flow=np.empty(shape),
        kept=np.empty(shape),
        begun=np.empty(shape, np.int64),
        conflict=np.empty(shape, bool),
        refused=np.empty(shape, bool),
        done=np.empty(games, bool),
    )
