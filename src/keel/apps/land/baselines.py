"""Ways to play without learning: what a trained policy must be compared with.

Each is a function from games and a generator to actions `[E, A]`, and plays all developers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keel.apps.land.arrays import Array, Month
from keel.apps.land.games import Games
from keel.apps.land.observations import worth
from keel.apps.land.rules import Rules
from keel.errors import InputError

Baseline = Callable[[Games, np.random.Generator], Array]


def wait(games: Games, rng: np.random.Generator) -> Array:
    """Nobody ever builds: every net present value is 0."""
    return np.full((games.count, games.rules.agents), games.rules.wait)


def random_legal(games: Games, rng: np.random.Generator) -> Array:
    """Any legal action, all equally likely."""
    noise = (rng.random(games.mask.shape, np.float32) + 1e-6) * games.mask
    action: Array = noise.argmax(-1)
    return action


def outlays(games: Games) -> Array:
    """`[E, A, P, 3]`: what each building costs today, land and permission included."""
    price = games.land_prices() + games.world.zone
    total: Array = games.tables.cost[None, :, None, :] + price[:, None, :, None]
    return total


def scores(games: Games, by_roi: bool) -> Array:
    """`[E, A, 3P + 1]`: what each action is worth now, or that per money spent; waiting is worth 0,
    and what is illegal −∞."""
    value = worth(games)
    if by_roi:
        value /= outlays(games)
    whole = np.zeros(games.mask.shape)
    whole[..., :-1] = value.reshape(*value.shape[:2], -1)
    whole[~games.mask] = -np.inf
    return whole


def greedy_npv(games: Games, rng: np.random.Generator) -> Array:
    """What brings most now, if anything brings more than waiting; ties go to the first parcel."""
    return _best(scores(games, by_roi=False), games.rules)


def greedy_roi(games: Games, rng: np.random.Generator) -> Array:
    """What brings most for the money; where money is short, that leaves more for the next."""
    return _best(scores(games, by_roi=True), games.rules)


def _best(score: Array, rules: Rules) -> Array:
    best: Array = score.argmax(-1)
    return np.where(score.max(-1) > 0.0, best, rules.wait)


@dataclass(frozen=True)
class Beam:
    """Rolling horizon: every month each developer plans some months ahead, and takes the first step
    of its best plan.

    One developer after the other, it tries `branch` actions in each of `depth` months, keeps the
    `width` best plans, and judges a plan by its net present value (mixed with the others' as the
    welfare of the rules says) when all then play `greedy_roi` to the end. Those who have planned
    before it are taken at their word; the others are expected to play `greedy_roi`.
    """

    width: int = 4
    depth: int = 2
    branch: int = 8

    def __post_init__(self) -> None:
        for name in ("width", "depth", "branch"):
            if getattr(self, name) < 1:
                raise InputError(f"beam: {name} must be at least 1, got {getattr(self, name)}")

    def __call__(self, games: Games, rng: np.random.Generator) -> Array:
        """The actions of all; games may be in different months."""
        action = np.empty((games.count, games.rules.agents), np.int64)
        for month in np.unique(games.state.month):
            rows = np.flatnonzero(games.state.month == month)
            action[rows] = self._plan_all(games.select(rows), rng)
        return action

    def _plan_all(self, games: Games, rng: np.random.Generator) -> Array:
        action = greedy_roi(games, rng)
        for agent in range(games.rules.agents):
            action[:, agent] = self._plan(games, action, agent, rng)
        return action

    def _plan(self, games: Games, action: Array, agent: int, rng: np.random.Generator) -> Array:
        """`[E]`: the first step of this developer's best plan, all of them in the same month."""
        rules, count = games.rules, games.count
        nodes, wishes = games, action
        first, gain, discount = np.full(count, -1), np.zeros(count), 1.0
        best_value, best_first = np.full(count, -np.inf), action[:, agent].copy()
        for _ in range(min(self.depth, rules.months - int(games.state.month[0]))):
            choices = self._choices(nodes, agent)
            parent = np.repeat(np.arange(nodes.count), choices.shape[1])
            nodes, wishes = nodes.select(parent), wishes[parent]
            wishes[:, agent] = choices.reshape(-1)
            first = np.where(first[parent] < 0, wishes[:, agent], first[parent])
            gain = gain[parent] + discount * utility(nodes.step(wishes), rules)[:, agent]
            discount *= rules.gamma
            value = gain + discount * play_out(nodes, greedy_roi, rng)[:, agent]
            kept = _best_of_each(value, count, self.width)
            better = value[kept[:, 0]] > best_value + 1e-9
            best_value = np.where(better, value[kept[:, 0]], best_value)
            best_first = np.where(better, first[kept[:, 0]], best_first)
            nodes, first, gain = nodes.select(kept.ravel()), first[kept.ravel()], gain[kept.ravel()]
            wishes = greedy_roi(nodes, rng)
        return best_first

    def _choices(self, games: Games, agent: int) -> Array:
        """`[E, branch + 1]`: what is best by return on money, and by worth, in turns; and waiting,
        which also fills up where little is worth doing."""
        place = np.full((games.count, games.rules.actions), np.inf)
        for later, by_roi in ((0.0, True), (0.5, False)):
            score = scores(games, by_roi)[:, agent]
            order = np.argsort(-score, axis=-1, kind="stable")
            rank = np.argsort(order, axis=-1, kind="stable")
            place = np.minimum(place, np.where(score > 0.0, rank + later, np.inf))
        chosen = np.argsort(place, axis=-1, kind="stable")[:, : self.branch]
        good = np.isfinite(np.take_along_axis(place, chosen, -1))
        last = np.full((games.count, 1), games.rules.wait)
        return np.hstack([np.where(good, chosen, games.rules.wait), last])


def _best_of_each(value: Array, games: int, width: int) -> Array:
    """`[games, width]`: the rows with the best values of each game, best first."""
    grouped = value.reshape(games, -1)
    order = np.argsort(-grouped, axis=-1, kind="stable")[:, :width]
    rows: Array = order + np.arange(games)[:, None] * grouped.shape[1]
    return rows


def utility(month: Month, rules: Rules) -> Array:
    """`[E, A]`: the money of a month, mixed with the others' as the welfare of the rules says: the
    reward without its faults and its scale."""
    own = month.flow + rules.gamma * month.kept
    mixed: Array = (1.0 - rules.welfare) * own + rules.welfare * own.mean(-1, keepdims=True)
    return mixed


def play_out(games: Games, policy: Baseline, rng: np.random.Generator) -> Array:
    """`[E, A]`: what a policy brings from here to the end, discounted to now; `games` must be in
    the same month, and are not changed."""
    gain, discount = np.zeros((games.count, games.rules.agents)), 1.0
    copies = games.select(np.arange(games.count))
    for _ in range(games.rules.months - int(games.state.month[0])):
        month = copies.step(policy(copies, rng))
        gain += discount * utility(month, games.rules)
        discount *= games.rules.gamma
    return gain


BASELINES: dict[str, Baseline] = {
    "wait": wait,
    "random": random_legal,
    "greedy-npv": greedy_npv,
    "greedy-roi": greedy_roi,
    "beam": Beam(),
}
