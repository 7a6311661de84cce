"""One game, month by month: what pictures are drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from keel.apps.land import kernels
from keel.apps.land.arrays import Array, Month, World
from keel.apps.land.baselines import Baseline
from keel.apps.land.games import Games
from keel.apps.land.rules import Rules


class Scene(NamedTuple):
    """The city at the beginning of a month, or after the last."""

    month: int
    owner: Array
    """`[P]`"""
    size: Array
    left: Array
    price: Array
    """of land, today"""
    cash: Array
    """`[A]`"""
    npv: Array
    """`[A]`: if the game had ended here; after the last month, of the game"""


@dataclass
class Chronicle:
    """The map of one game, and its scenes so far."""

    rules: Rules
    world: World
    """with a leading axis of 1"""
    seed: int
    scenes: list[Scene] = field(default_factory=list)
    paid: Array = field(init=False)
    """`[A]`: cash flows so far, discounted"""

    def __post_init__(self) -> None:
        self.paid = np.zeros(self.rules.agents)

    @classmethod
    def of(cls, games: Games, game: int = 0) -> Chronicle:
        """Begun with the present scene of one of the games."""
        world = World(*(room[[game]] for room in games.world))
        story = cls(games.rules, world, int(games.seeds[game]))
        story._add(games, game)
        return story

    def note(self, games: Games, month: Month, game: int = 0) -> None:
        """Add the scene to which a month has led."""
        self.paid = self.paid + self.rules.gamma ** self.scenes[-1].month * month.flow[game]
        self._add(games, game)

    def _add(self, games: Games, game: int) -> None:
        state, now = games.state, int(games.state.month[game])
        owned = self.rules.gamma**now * kernels.holdings(game, games.world, state, games.tables)
        scene = Scene(
            month=now,
            owner=state.owner[game].copy(),
            size=state.size[game].copy(),
            left=state.left[game].copy(),
            price=games.land_prices()[game],
            cash=state.cash[game].copy(),
            npv=self.paid + owned,
        )
        self.scenes.append(scene)


def record_game(policy: Baseline, rules: Rules, map_seed: int, *, seed: int = 0) -> Chronicle:
    """A whole game of one policy on one map."""
    games, rng = Games(rules, 1), np.random.default_rng(seed)
    games.begin([0], [map_seed])
    story = Chronicle.of(games)
    for _ in range(rules.months):
        month = games.step(policy(games, rng))
        story.note(games, month)
    return story
