"""Rules of the game: trades, buildings, costs, revenues and externalities.

Money is in thousands, time in months. Nothing here changes during a game.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from keel.data import read_beside
from keel.errors import InputError, check_choice

SIZES = ("S", "M", "L")
LEAST_LEVEL = (3, 4, 5)
"""Least level of a parcel for each size."""
CONSTRUCTION = (1, 2, 4)
"""Months from the first payment until a building operates, for each size."""
AHEAD = max(CONSTRUCTION) - 1
"""Months after which everything under construction operates; the first is over when it is seen."""

Reward = Literal["npv", "legacy"]
Triple = tuple[float, float, float]
"""Number for each size: S, M, L."""


@dataclass(frozen=True)
class Trade:
    """Trade of a developer: its buildings, costs, revenues and demand."""

    name: str
    cost: Triple
    revenue: Triple
    """revenue a month, at full demand"""
    running: Triple
    rent: Triple
    cash: float
    """initial cash"""
    demand: tuple[float, float]
    """monthly revenue up to which demand pays in full, and up to which it pays in half"""
    pollutes: Triple = (0.0, 0.0, 0.0)
    """the share of income that an operating building takes from neighbours that suffer"""
    adorns: Triple = (0.0, 0.0, 0.0)
    """the share that an operating building adds to the price of land around it"""
    suffers: bool = False


TRADES = {trade.name: trade for trade in read_beside(__file__, "trades.yaml", list[Trade])}
INDUSTRY, EDUCATION, COUNCIL, HOUSING = TRADES.values()

LEGACY_SCALES = (500.0, 2_000.0, 3_000.0)
"""Divisors of the legacy reward."""


@dataclass(frozen=True)
class Rules:
    """Rules of one variant of the game.

    Examples:
        >>> Rules().actions  # three sizes on each of 48 parcels, or wait
        145
    """

    trades: tuple[Trade, ...] = (INDUSTRY, EDUCATION, COUNCIL)
    rows: int = 6
    columns: int = 8
    months: int = 30
    rate: float = 0.008
    """monthly discount rate"""
    credit: float = 3_000.0
    """credit line: how far cash may fall below 0"""
    interest: float = 0.012
    """monthly interest rate on the debt at the beginning of the month"""
    slopes: Triple = (1.0, 0.5, 0.1)
    """slopes of revenue in the three parts of demand"""
    reach: float = 1.2
    """distance in parcels over which pollution and prestige fall by a factor e"""
    least_income: float = 0.4
    """least share of income of a building that suffers, however polluted"""
    residual: float = 0.7
    """share of its cost that a new building is worth after the last month; land keeps its price"""
    life: float = 240.0
    """months of operation in which that value falls to 0"""
    externalities: bool = True
    """whether neighbours feel pollution and prestige"""
    welfare: float = 0.0
    """share of the reward that is the mean of all developers' own"""
    scale: float = 1_000.0
    """divisor of the rewards"""
    reward: Reward = "npv"
    """"npv": cash flow, whose discounted sum is the net present value; "legacy": the appraisal of a
    building on the day it is begun"""
    late_build_npv: bool = False
    """Fault of the legacy game: a building brings twelve undiscounted months of income on the day
    it is begun, though it may be the last; what it then earns is no longer part of the reward."""
    reward_clip: bool = False
    """Fault of the legacy game: rewards are clipped at ±1."""

    def __post_init__(self) -> None:
        if not 2 <= len(self.trades) <= len(TRADES):
            raise InputError(f"agents: expected 2 to {len(TRADES)}, got {len(self.trades)}")
        if len({trade.name for trade in self.trades}) < len(self.trades):
            raise InputError("agents: each trade may be there once")
        for name in ("rows", "columns", "months", "scale", "reach", "life"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name}: expected more than 0, got {getattr(self, name)}")
        for name in ("rate", "credit", "interest", "residual"):
            if getattr(self, name) < 0.0:
                raise InputError(f"{name}: expected at least 0, got {getattr(self, name)}")
        for name in ("welfare", "least_income"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InputError(f"{name}: expected 0 to 1, got {getattr(self, name)}")
        check_choice("reward", self.reward, ("npv", "legacy"))
        if self.reward == "legacy" and self.scale not in LEGACY_SCALES:
            known = ", ".join(f"{scale:g}" for scale in LEGACY_SCALES)
            raise InputError(
                f"scale: expected one of {known} with reward=legacy, got {self.scale:g}"
            )

    @property
    def agents(self) -> int:
        """Number of developers, A."""
        return len(self.trades)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the developers."""
        return tuple(trade.name for trade in self.trades)

    @property
    def parcels(self) -> int:
        """Number of parcels, P."""
        return self.rows * self.columns

    @property
    def actions(self) -> int:
        """Number of actions: each size on each parcel, `3 * parcel + size`, and wait, the last."""
        return 3 * self.parcels + 1

    @property
    def wait(self) -> int:
        """Action that does nothing; always legal."""
        return 3 * self.parcels

    @property
    def gamma(self) -> float:
        """Discount factor at which the return is the net present value."""
        return 1.0 / (1.0 + self.rate)

    def digest(self) -> str:
        """Return sixteen hexadecimal digits that identify these rules."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


FULL = Rules()
SMALL = Rules(rows=3, columns=4, externalities=False, welfare=1.0)
"""Twelve parcels without externalities, whose optimum a solver finds."""
VARIANTS = {"full": FULL, "small": SMALL}


def make_rules(
    variant: str = "full", agents: int | Sequence[str] | None = None, **changes: Any
) -> Rules:
    """Make the rules of a variant with changes.

    Args:
        variant: "full" or "small".
        agents: Number of developers, the first of `TRADES`, or their names.
        **changes: Other values of the fields of `Rules`.

    Examples:
        >>> make_rules(agents=("industry", "housing"), welfare=0.5).names
        ('industry', 'housing')
    """
    rules = VARIANTS[check_choice("variant", variant, VARIANTS)]
    unknown = set(changes) - set(asdict(rules))
    if unknown:
        check_choice("option", sorted(unknown)[0], asdict(rules))
    if changes.get("reward") == "legacy":
        changes.setdefault("scale", LEGACY_SCALES[-1])
    if isinstance(agents, int):
        changes["trades"] = tuple(TRADES.values())[:agents]
    elif agents is not None:
        changes["trades"] = tuple(TRADES[check_choice("agents", name, TRADES)] for name in agents)
    return replace(rules, **changes)


def legacy_rules(scale: float = 3_000.0) -> Rules:
    """Return the full game with the legacy reward, and the two faults that belong to it.

    Of that reward a formula and three ranges are documented,

        NPV (−1500 … 3000) + progress (0 … 15) − budget penalty (0 … 500),

    and that it was divided by 500, then 2000, then 3000. How the parts were computed is
    reconstructed in `keel.apps.land.kernels.legacy_reward`.

    Args:
        scale: Divisor of the reward, one of `LEGACY_SCALES`.
    """
    return make_rules(reward="legacy", scale=scale, late_build_npv=True, reward_clip=True)
