"""Batch of games as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keel.apps.land import kernels
from keel.apps.land.arrays import (
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
        """`[E, A, 3P + 1]`: legal actions"""
        self._all_games = np.arange(count)
        self.begin(self._all_games, self.seeds)

    def begin(self, games: ArrayLike, seeds: ArrayLike) -> None:
        """Begin some of the games anew.

        Args:
            games: Numbers of the games, `[K]`.
            seeds: Seeds of their maps, `[K]`.
        """
        rows, maps = np.atleast_1d(np.asarray(games, np.int64)), check_seeds(np.asarray(seeds))
        if rows.shape != maps.shape:
            raise InputError(f"seeds: expected {rows.size}, one for each game, got {maps.size}")
        if rows.size and (rows.min() < 0 or rows.max() >= self.count):
            raise InputError(f"games: expected numbers below {self.count}, got {rows.tolist()}")
        write_maps(self.rules, rows, maps, self.world)
        self.seeds[rows] = maps
        for array, first in zip(self.state, blank_state(self.rules, rows.size), strict=True):
            array[rows] = first
        self.mask = self.mask.copy()  # earlier observations share the old array
        kernels.write_mask(rows, self.world, self.state, self.tables, self.mask)

    def step(self, action: ArrayLike) -> Month:
        """Play one month of all games.

        Args:
            action: `[E, A]`, as `Rules.actions` counts them. An illegal action is refused, and has
                the effect of waiting.

        Returns:
            Rewards and cash flows of the month, `[E, A]`.
        """
        actions = np.ascontiguousarray(action, np.int64)
        if actions.shape != (self.count, self.rules.agents):
            expected = [self.count, self.rules.agents]
            raise InputError(f"action: expected shape {expected}, got {list(actions.shape)}")
        if actions.min() < 0 or actions.max() >= self.rules.actions:
            raise InputError(f"action: expected 0 to {self.rules.wait}")
        if self.state.month.max() >= self.rules.months:
            raise InputError("step: a game is over; begin it anew first")
        month = blank_month(self.rules, self.count)
        kernels.advance(actions, self.world, self.state, self.tables, month)
        self._write_masks()
        return month

    def select(self, rows: ArrayLike) -> Games:
        """Return copies of the games in `rows` `[K]`, for lookahead; rows may repeat."""
        index = np.asarray(rows, np.int64)
        other = object.__new__(Games)
        other.rules, other.tables, other.count = self.rules, self.tables, index.size
        other.world = type(self.world)(*(array[index] for array in self.world))
        other.state = type(self.state)(*(array[index] for array in self.state))
        other.seeds, other.mask = self.seeds[index], self.mask[index]
        other._all_games = np.arange(index.size)
        return other

    def land_prices(self) -> Array:
        """Return today's prices of land alone, `[E, P]`."""
        prices: Array = self.world.price * (1.0 + self.state.prestige)
        return prices

    def _named_arrays(self) -> dict[str, Array]:
        world = {f"world/{name}": array for name, array in self.world._asdict().items()}
        state = {f"state/{name}": array for name, array in self.state._asdict().items()}
        return {**world, **state, "seeds": self.seeds}

    def save(self) -> Saved:
        """Return the state that a bit-exact continuation needs."""
        arrays = {name: array.copy() for name, array in self._named_arrays().items()}
        return arrays, {"count": self.count, "rules": self.rules.digest()}

    def load(self, arrays: Mapping[str, Array], data: Mapping[str, Any]) -> None:
        """Continue where `save` was called, in as many games of the same rules."""
        for what, value in (("count", self.count), ("rules", self.rules.digest())):
            if data.get(what) != value:
                raise InputError(f"load: {what} is {data.get(what)!r} there, {value!r} here")
        saved_arrays = self._named_arrays()
        for name, array in saved_arrays.items():
            if name not in arrays or arrays[name].shape != array.shape:
                raise InputError(f"load: {name} is missing, or not of shape {list(array.shape)}")
        for name, array in saved_arrays.items():
            array[...] = arrays[name]
        self._write_masks()

    def _write_masks(self) -> None:
        self.mask = np.empty_like(self.mask)
        kernels.write_mask(self._all_games, self.world, self.state, self.tables, self.mask)
