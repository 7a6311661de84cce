"""Baseline policies that need no learning.

Each is a function from games and a random generator to actions `[E, A]`, and plays all developers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keel.apps.land.arrays import Array, Month
from keel.apps.land.games import Games
from keel.apps.land.observations import marginal_npv
from keel.apps.land.rules import Rules
from keel.errors import InputError

Player = Callable[[Games, np.random.Generator], Array]
"""Function from games and a generator to actions `[E, A]`."""


def wait(games: Games, rng: np.random.Generator) -> Array:
    """Never build: every net present value is 0."""
    return np.full((games.count, games.rules.agents), games.rules.wait)


def random_legal(games: Games, rng: np.random.Generator) -> Array:
    """Draw from the legal actions, all equally likely."""
    noise = (rng.random(games.mask.shape, np.float32) + 1e-6) * games.mask
    action: Array = noise.argmax(-1)
    return action


def outlays(games: Games) -> Array:
    """Return today's cost of each building, land and permission included, `[E, A, P, 3]`."""
    price = games.land_prices() + games.world.zone
    total: Array = games.tables.cost[None, :, None, :] + price[:, None, :, None]
    return total


def scores(games: Games, by_roi: bool) -> Array:
    """Return the marginal net present value of each action, `[E, A, 3P + 1]`.

    Waiting scores 0, illegal actions −∞.

    Args:
        games: E games.
        by_roi: Divide by the outlay: return on investment.
    """
    value = marginal_npv(games)
    if by_roi:
        value /= outlays(games)
    score = np.zeros(games.mask.shape)
    score[..., :-1] = value.reshape(*value.shape[:2], -1)
    score[~games.mask] = -np.inf
    return score


def greedy_npv(games: Games, rng: np.random.Generator) -> Array:
    """Begin the building of the highest marginal net present value; wait if none is positive.

    Ties go to the first parcel.
    """
    return _best(scores(games, by_roi=False), games.rules)


def greedy_roi(games: Games, rng: np.random.Generator) -> Array:
    """Begin the building of the highest return on investment; wait if none is positive.

    Where money is short, that leaves more for the next building.
    """
    return _best(scores(games, by_roi=True), games.rules)


def _best(score: Array, rules: Rules) -> Array:
    best: Array = score.argmax(-1)
    return np.where(score.max(-1) > 0.0, best, rules.wait)


@dataclass(frozen=True)
class Beam:
    """Beam search with a rolling horizon: take the first step of the best plan of some months.

    Developers plan in turn. Each tries `branch` actions in each of `depth` months, keeps the
    `width` best plans, and scores a plan by its net present value (mixed with the others' by the
    welfare share of the rules) when all then play `greedy_roi` to the end. The plans of earlier
    developers are taken as fixed; later ones are expected to play `greedy_roi`.
    """

    width: int = 4
    depth: int = 2
    branch: int = 8

    def __post_init__(self) -> None:
        for name in ("width", "depth", "branch"):
            if getattr(self, name) < 1:
                raise InputError(f"beam: {name} must be at least 1, got {getattr(self, name)}")

    def __call__(self, games: Games, rng: np.random.Generator) -> Array:
        """Return the actions of all developers, `[E, A]`; games may be in different months."""
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
        """Return the first step of one developer's best plan, `[E]`; all games in one month."""
        rules, count = games.rules, games.count
        nodes, actions = games, action
        first, gain, discount = np.full(count, -1), np.zeros(count), 1.0
        best_value, best_first = np.full(count, -np.inf), action[:, agent].copy()
        for _ in range(min(self.depth, rules.months - int(games.state.month[0]))):
            choices = self._choices(nodes, agent)
            parent = np.repeat(np.arange(nodes.count), choices.shape[1])
            nodes, actions = nodes.select(parent), actions[parent]
            actions[:, agent] = choices.reshape(-1)
            first = np.where(first[parent] < 0, actions[:, agent], first[parent])
            gain = gain[parent] + discount * utility(nodes.step(actions), rules)[:, agent]
            discount *= rules.gamma
            value = gain + discount * play_out(nodes, greedy_roi, rng)[:, agent]
            best = _best_of_each(value, count, self.width)
            better = value[best[:, 0]] > best_value + 1e-9
            best_value = np.where(better, value[best[:, 0]], best_value)
            best_first = np.where(better, first[best[:, 0]], best_first)
            beam = best.ravel()
            nodes, first, gain = nodes.select(beam), first[beam], gain[beam]
            actions = greedy_roi(nodes, rng)
        return best_first

    def _choices(self, games: Games, agent: int) -> Array:
        """Return candidate actions, `[E, branch + 1]`.

        The best by return on investment and by marginal net present value alternate. Waiting is the
        last, and fills up where fewer actions have a positive score.
        """
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
    """Return the rows with the best values of each game, best first, `[games, width]`."""
    grouped = value.reshape(games, -1)
    order = np.argsort(-grouped, axis=-1, kind="stable")[:, :width]
    rows: Array = order + np.arange(games)[:, None] * grouped.shape[1]
    return rows


def utility(month: Month, rules: Rules) -> Array:
    """Return the cash flow of a month mixed with the others' by the welfare share, `[E, A]`.

    That is the reward "npv" without its scale.
    """
    own = month.flow + rules.gamma * month.terminal_value
    mixed: Array = (1.0 - rules.welfare) * own + rules.welfare * own.mean(-1, keepdims=True)
    return mixed


def play_out(games: Games, policy: Player, rng: np.random.Generator) -> Array:
    """Return the utility of playing a policy to the end, discounted to now, `[E, A]`.

    Args:
        games: E games in the same month; they are not changed.
        policy: Plays all developers.
        rng: Randomness of the policy.
    """
    gain, discount = np.zeros((games.count, games.rules.agents)), 1.0
    copies = games.select(np.arange(games.count))
    for _ in range(games.rules.months - int(games.state.month[0])):
        month = copies.step(policy(copies, rng))
        gain += discount * utility(month, games.rules)
        discount *= games.rules.gamma
    return gain


BASELINES: dict[str, Player] = {
    "wait": wait,
    "random": random_legal,
    "greedy-npv": greedy_npv,
    "greedy-roi": greedy_roi,
    "beam": Beam(),
}
