"""The exact optimum: the game agrees, brute force agrees, and nobody beats it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from keel.apps.land.baselines import greedy_npv, greedy_roi
from keel.apps.land.games import Games
from keel.apps.land.maps import HELD_OUT, draw_map
from keel.apps.land.optimum import GAP, Optimum, find_optimum, replay
from keel.apps.land.report import net_present_value, percent_of_optimum, play
from keel.apps.land.rules import COUNCIL, FULL, INDUSTRY, SMALL, Rules
from keel.errors import InputError


@pytest.fixture(scope="module")
def optimum() -> Optimum:
    return find_optimum(HELD_OUT + 1)


def test_the_game_plays_the_plan_to_the_same_npv(optimum: Optimum) -> None:
    assert replay(optimum) == pytest.approx(optimum.npv, abs=1e-6)
    assert 0.0 <= optimum.gap <= GAP
    assert optimum.bound == pytest.approx(optimum.npv * (1.0 + optimum.gap))
    assert optimum.actions.shape == (30, 3)


def test_nobody_beats_it(optimum: Optimum) -> None:
    for policy, least in ((greedy_npv, 60.0), (greedy_roi, 70.0)):
        report = play(policy, SMALL, [optimum.seed])
        assert report.total <= optimum.bound
        assert least < percent_of_optimum(report, [optimum]) <= 100.0
    with pytest.raises(InputError, match="optimum: expected those of the maps that were played"):
        percent_of_optimum(report, [])


def tiny(cash: float, credit: float) -> Rules:
    """Three parcels, of which one carries S and one S or M; four months, and money is short."""
    rich = replace(INDUSTRY, cash=cash, revenue=(800.0, 2400.0, 0.0), demand=(900.0, 2700.0))
    poor = replace(COUNCIL, cash=0.7 * cash, revenue=(600.0, 1200.0, 0.0), demand=(700.0, 1400.0))
    return replace(
        SMALL, trades=(rich, poor), rows=1, columns=3, months=4, credit=credit, interest=0.1
    )


def brute_force(rules: Rules, seed: int) -> float:
    """The best of all plans: every legal action of both in every month."""
    level = draw_map(rules, seed).level[0]
    able = [3 * p + k for p in range(3) for k in range(3) if level[p] >= 3 + k] + [rules.wait]
    each = np.array(list(itertools.product(able, repeat=rules.months)))
    first, second = np.divmod(np.arange(len(each) ** 2), len(each))
    games = Games(rules, first.size)
    games.begin(np.arange(first.size), np.full(first.size, seed))
    months = []
    for month in range(rules.months):
        months.append(games.step(np.stack([each[first, month], each[second, month]], 1)))
    return float(net_present_value(months, rules).sum(-1).max())


@pytest.mark.parametrize(
    ("cash", "credit", "seed", "broke"),
    [(3000.0, 0.0, 1, False), (1300.0, 800.0, 2, False), (800.0, 1600.0, 2, True)],
)
def test_brute_force_finds_nothing_better(
    cash: float, credit: float, seed: int, broke: bool
) -> None:
    """In the last of these it pays to go bankrupt: one good building, and interest be damned."""
    rules = tiny(cash, credit)
    best, found = brute_force(rules, seed), find_optimum(seed, rules)
    assert best > 0.0
    assert found.npv == pytest.approx(replay(found, rules), abs=1e-6)
    assert best * (1.0 - GAP) - 1e-3 <= found.npv <= best + 1e-6
    assert found.bound >= best - 1e-3
    games = Games(rules, 1)
    games.begin([0], [seed])
    for action in found.actions:
        games.step(action[None])
    assert games.state.bankrupt.any() == broke


def test_the_optimum_is_only_for_what_is_linear_and_small() -> None:
    with pytest.raises(InputError, match="optimum: only without externalities is the game linear"):
        find_optimum(0, FULL)
    with pytest.raises(InputError, match="optimum: at most 24 parcels, got 48"):
        find_optimum(0, replace(FULL, externalities=False))
