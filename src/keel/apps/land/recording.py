"""Record of one game, month by month, for rendering."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from keel.apps.land import kernels
from keel.apps.land.arrays import Array, Month, World
from keel.apps.land.baselines import Player
from keel.apps.land.games import Games
from keel.apps.land.rules import Rules


class Snapshot(NamedTuple):
    """State of the city at the beginning of a month, or after the last."""

    month: int
    owner: Array
    """`[P]`"""
    size: Array
    left: Array
    price: Array
    """`[P]`: price of land today"""
    cash: Array
    """`[A]`"""
    npv: Array
    """`[A]`: net present value if the game ended here; after the last month, that of the game"""


@dataclass
class GameRecord:
    """Map of one game, and its snapshots so far."""

    rules: Rules
    world: World
    """Map of the game, with a leading axis of 1."""
    seed: int
    snapshots: list[Snapshot] = field(default_factory=list)
    discounted_flow: Array = field(init=False)
    """`[A]`: discounted sum of the cash flows so far"""

    def __post_init__(self) -> None:
        self.discounted_flow = np.zeros(self.rules.agents)

    @classmethod
    def begin(cls, games: Games, game: int = 0) -> GameRecord:
        """Start a record with the present state of one of the games."""
        world = World(*(array[[game]] for array in games.world))
        record = cls(games.rules, world, int(games.seeds[game]))
        record._add(games, game)
        return record

    def append(self, games: Games, month: Month, game: int = 0) -> None:
        """Add the state after a month.

        Args:
            games: The games after the step.
            month: What the step returned.
            game: Which of the games is recorded.
        """
        discount = self.rules.gamma ** self.snapshots[-1].month
        self.discounted_flow = self.discounted_flow + discount * month.flow[game]
        self._add(games, game)

    def _add(self, games: Games, game: int) -> None:
        state, now = games.state, int(games.state.month[game])
        owned = self.rules.gamma**now * kernels.holdings(game, games.world, state, games.tables)
        snapshot = Snapshot(
            month=now,
            owner=state.owner[game].copy(),
            size=state.size[game].copy(),
            left=state.left[game].copy(),
            price=games.land_prices()[game],
            cash=state.cash[game].copy(),
            npv=self.discounted_flow + owned,
        )
        self.snapshots.append(snapshot)


def record_game(policy: Player, rules: Rules, map_seed: int, *, seed: int = 0) -> GameRecord:
    """Play a whole game on one map and record it.

    Args:
        policy: Plays all developers.
        rules: The variant of the game.
        map_seed: Seed of the map.
        seed: Seed of the policy's randomness.

    Returns:
        The record, with `months + 1` snapshots.
    """
    games, rng = Games(rules, 1), np.random.default_rng(seed)
    games.begin([0], [map_seed])
    record = GameRecord.begin(games)
    for _ in range(rules.months):
        month = games.step(policy(games, rng))
        record.append(games, month)
    return record
