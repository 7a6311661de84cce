"""Many games side by side, as arrays: what everything else plays on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keel.apps.land import kernels
from keel.apps.land.arrays import (
    FREE,
    Array,
    Month,
    blank_month,
    blank_state,
    blank_world,
    make_tables,
)
from keel.apps.land.maps import check_seeds, write_maps
from keel.apps.land.rules import Rules
from keel.errors import InputError

Saved = tuple[dict[str, Array], dict[str, Any]]
"""Named arrays, and data that JSON can hold."""


class Games:
    """E games of one variant, with A developers each.

    Examples:
        >>> games = Games(Rules(), 2)
        >>> games.begin([0, 1], [7, 8])  # maps by their seeds
        >>> month = games.step(np.full((2, 3), games.rules.wait))
        >>> month.flow.any(), games.state.month.tolist()
        (np.False_, [1, 1])
    """

    def __init__(self, rules: Rules, count: int) -> None:
        if count < 1:
            raise InputError(f"count: expected at least 1 game, got {count}")
        self.rules, self.count = rules, count
        self.tables = make_tables(rules)
        self.world, self.state = blank_world(rules, count), blank_state(rules, count)
        self.seeds = np.zeros(count, np.int64)
        self.mask = np.zeros((count, rules.agents, rules.actions), bool)
        """`[E, A, 3P + 1]`: what may be done now"""
        self._everyone = np.arange(count)
        self.begin(self._everyone, self.seeds)

    def begin(self, games: ArrayLike, seeds: ArrayLike) -> None:
        """Begin some of the games anew, on the maps of these seeds."""
        rows, maps = np.atleast_1d(np.asarray(games, np.int64)), check_seeds(np.asarray(seeds))
        if rows.shape != maps.shape:
            raise InputError(f"seeds: expected {rows.size}, one for each game, got {maps.size}")
        if rows.size and (rows.min() < 0 or rows.max() >= self.count):
            raise InputError(f"games: expected numbers below {self.count}, got {rows.tolist()}")
        write_maps(self.rules, rows, maps, self.world)
        self.seeds[rows] = maps
        state = self.state
        state.owner[rows] = FREE
        for room in (state.size, state.left, state.age, state.prestige, state.pollution):
            room[rows] = 0
        state.cash[rows] = [trade.cash for trade in self.rules.trades]
        state.bankrupt[rows] = False
        state.month[rows] = 0
        self.mask = self.mask.copy()  # what was seen before stays as it was
        kernels.legal(rows, self.world, state, self.tables, self.mask)

    def step(self, action: ArrayLike) -> Month:
        """One month of all games; `action` `[E, A]` as `Rules.actions` counts them.

        A wish that is not legal is refused, and the month is waited through.
        """
        wishes = np.ascontiguousarray(action, np.int64)
        if wishes.shape != (self.count, self.rules.agents):
            expected = [self.count, self.rules.agents]
            raise InputError(f"action: expected shape {expected}, got {list(wishes.shape)}")
        if wishes.min() < 0 or wishes.max() >= self.rules.actions:
            raise InputError(f"action: expected 0 to {self.rules.wait}")
        if self.state.month.max() >= self.rules.months:
            raise InputError("step: a game is over; begin it anew first")
        month = blank_month(self.rules, self.count)
        kernels.advance(wishes, self.world, self.state, self.tables, month)
        self.mask = np.empty_like(self.mask)
        kernels.legal(self._everyone, self.world, self.state, self.tables, self.mask)
        return month

    def select(self, rows: ArrayLike) -> Games:
        """A copy of some of the games, as often as they are named: to look ahead with."""
        index = np.asarray(rows, np.int64)
        other = object.__new__(Games)
        other.rules, other.tables, other.count = self.rules, self.tables, index.size
        other.world = type(self.world)(*(room[index] for room in self.world))
        other.state = type(self.state)(*(room[index] for room in self.state))
        other.seeds, other.mask = self.seeds[index], self.mask[index]
        other._everyone = np.arange(index.size)
        return other

    def land_prices(self) -> Array:
        """`[E, P]`: of land alone, today."""
        prices: Array = self.world.price * (1.0 + self.state.prestige)
        return prices

    def _rooms(self) -> dict[str, Array]:
        world = {f"world/{name}": room for name, room in self.world._asdict().items()}
        state = {f"state/{name}": room for name, room in self.state._asdict().items()}
        return {**world, **state, "seeds": self.seeds}

    def save(self) -> Saved:
        """Everything that a bit-exact continuation needs."""
        arrays = {name: room.copy() for name, room in self._rooms().items()}
        return arrays, {"count": self.count, "rules": self.rules.digest()}

    def load(self, arrays: Mapping[str, Array], data: Mapping[str, Any]) -> None:
        """Continue where `save` was called, in as many games of the same rules."""
        for what, value in (("count", self.count), ("rules", self.rules.digest())):
            if data.get(what) != value:
                raise InputError(f"load: {what} is {data.get(what)!r} there, {value!r} here")
        rooms = self._rooms()
        for name, room in rooms.items():
            if name not in arrays or arrays[name].shape != room.shape:
                raise InputError(f"load: {name} is missing, or not of shape {list(room.shape)}")
        for name, room in rooms.items():
            room[...] = arrays[name]
        self.mask = np.empty_like(self.mask)
        kernels.legal(self._everyone, self.world, self.state, self.tables, self.mask)
