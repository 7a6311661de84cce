"""What came of a play, in numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from keel.apps.land.arrays import Array
from keel.apps.land.baselines import greedy_roi, random_legal
from keel.apps.land.games import Games
from keel.apps.land.maps import held_out
from keel.apps.land.report import gini, held_out_gap, play, shares
from keel.apps.land.rules import FULL, INDUSTRY, SMALL, make_rules
from keel.errors import InputError


def test_gini_by_hand() -> None:
    """Of 1, 2, 3 the mean difference is 8/9, twice the mean 4: 2/9; who has all of three: 2/3."""
    npv = np.array([[1.0, 2.0, 3.0], [4.0, 4.0, 4.0], [9.0, 0.0, 0.0], [9.0, -5.0, -1.0]])
    assert gini(npv) == pytest.approx([2 / 9, 0.0, 2 / 3, 2 / 3])


def test_shares_by_hand() -> None:
    assert shares(np.array([0, 2, 2, 2])) == {"S": 0.25, "M": 0.0, "L": 0.75}
    assert shares(np.array([], int)) == {"S": 0.0, "M": 0.0, "L": 0.0}


def first_of_each_level(games: Games, rng: np.random.Generator) -> Array:
    """Industry: S on level 3, M on 4 and L on 5, a month each, and an S on level 5 at the end."""
    rules, month = games.rules, int(games.state.month[0])
    action = np.full((games.count, rules.agents), rules.wait)
    wanted = {0: (3, 0), 1: (4, 1), 2: (5, 2), rules.months - 1: (5, 0)}
    if month in wanted:
        level, size = wanted[month]
        free = (games.world.level == level) & (games.state.owner == -1)
        action[:, 0] = 3 * free.argmax(-1) + size
        action[:, 1] = action[:, 0]  # who comes second loses
    return action


def test_a_scripted_game_is_counted_right() -> None:
    report = play(first_of_each_level, FULL, held_out(6), name="script")
    assert report.policy == "script"
    assert report.maps == tuple(range(1_000_000, 1_000_006))
    assert report.sizes == {"S": 0.5, "M": 0.25, "L": 0.25}
    assert report.sizes_by_level["3"] == {"S": 1.0, "M": 0.0, "L": 0.0}
    assert report.sizes_by_level["4"] == {"S": 0.0, "M": 1.0, "L": 0.0}
    assert report.sizes_by_level["5"] == {"S": 0.5, "M": 0.0, "L": 0.5}
    assert sum(report.buildings.values()) == 4.0
    assert report.never_operated == 0.25
    assert (report.conflicts, report.refused) == (4.0, 0.0)
    assert report.npv["council"] == 0.0


def test_totals_means_and_welfare_agree() -> None:
    report = play(greedy_roi, FULL, held_out(3))
    npv = np.array(list(report.npv_by_map.values())).T
    assert report.total_by_map == pytest.approx(npv.sum(-1))
    assert report.total == pytest.approx(npv.sum(-1).mean())
    assert list(report.npv.values()) == pytest.approx(npv.mean(0))
    assert report.gini == pytest.approx(gini(npv).mean())
    assert report.welfare == pytest.approx((npv.mean(-1) * (1.0 - gini(npv))).mean())
    assert report.welfare < report.total / 3


def test_the_npv_is_told_whatever_the_rewards_were() -> None:
    honest = play(greedy_roi, FULL, held_out(2))
    for faults in ({"reward": "legacy"}, {"late_build_npv": True}, {"reward_clip": True}):
        assert play(greedy_roi, make_rules(**faults), held_out(2)).npv == honest.npv


def test_bankruptcies_are_counted() -> None:
    broke = replace(INDUSTRY, cash=0.0)
    rules = replace(SMALL, trades=(broke, SMALL.trades[1]), interest=0.3, credit=2_500.0)
    report = play(random_legal, rules, held_out(20))
    assert 0.0 < report.bankruptcies["industry"] <= 1.0
    assert report.bankruptcies["education"] < report.bankruptcies["industry"]


def test_a_report_is_json_and_the_same_every_time() -> None:
    one, two = (play(random_legal, SMALL, held_out(4), seed=3) for _ in range(2))
    assert json.loads(json.dumps(one.to_dict())) == json.loads(json.dumps(two.to_dict()))
    assert play(random_legal, SMALL, held_out(4), seed=4).total != one.total


def test_the_gap_is_what_is_lost_on_new_maps() -> None:
    report = play(greedy_roi, SMALL, held_out(2))
    worse = replace(report, total=0.9 * report.total)
    assert held_out_gap(report, worse) == pytest.approx(0.1)
    with pytest.raises(InputError, match="seeds: expected at least one map"):
        play(greedy_roi, SMALL, np.zeros(0, int))
