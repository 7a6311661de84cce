"""Play without learning: legal, and in the order in which it should be good."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from land_toys import build, flat, wishes

from keel.apps.land.baselines import (
    BASELINES,
    Beam,
    greedy_npv,
    greedy_roi,
    outlays,
    play_out,
    random_legal,
    wait,
)
from keel.apps.land.games import Games
from keel.apps.land.maps import held_out
from keel.apps.land.observations import marginal_npv
from keel.apps.land.report import play
from keel.apps.land.rules import FULL, SMALL, make_rules
from keel.errors import InputError

RNG = np.random.default_rng(0)
LIGHT = Beam(width=2, depth=2, branch=4)


@pytest.mark.parametrize("name", [name for name in BASELINES if name != "beam"])
def test_nothing_illegal_is_tried(name: str) -> None:
    for rules in (FULL, SMALL, make_rules(agents=4, credit=0.0)):
        assert play(BASELINES[name], rules, held_out(5)).refused == 0.0


def test_who_waits_has_nothing() -> None:
    report = play(wait, FULL, held_out(3))
    assert (report.total, report.conflicts, sum(report.buildings.values())) == (0.0, 0.0, 0.0)


def test_random_play_takes_every_legal_action_equally_often() -> None:
    games = flat(FULL, count=2000)
    action = random_legal(games, np.random.default_rng(3))
    count = np.bincount(action.ravel(), minlength=145)
    assert count.min() > 0
    assert count.std() < 2.0 * np.sqrt(count.mean())


def test_greedy_takes_the_best_and_then_stops() -> None:
    games = Games(FULL, 4)
    games.begin(np.arange(4), np.arange(4))
    value = np.where(games.mask[..., :-1], marginal_npv(games).reshape(4, 3, -1), -np.inf)
    np.testing.assert_array_equal(greedy_npv(games, RNG), value.argmax(-1))
    ratio = value / outlays(games).reshape(4, 3, -1)
    np.testing.assert_array_equal(greedy_roi(games, RNG), ratio.argmax(-1))
    games.state.month[:] = 29  # what is begun now never operates, and loses a third of its cost
    assert (greedy_npv(games, RNG) == FULL.wait).all()
    assert (greedy_roi(games, RNG) == FULL.wait).all()


def test_outlays_are_what_is_paid() -> None:
    games = Games(FULL, 1)
    games.begin([0], [5])
    games.state.prestige[:] = 0.1
    wish = int(games.mask[0, 1].argmax())
    expected = outlays(games)[0, 1].ravel()[wish]
    assert games.step(wishes(games, education=wish)).flow[0, 1] == pytest.approx(-expected)


def test_money_left_is_worth_having() -> None:
    """On the full game return on money beats worth, and both beat chance."""
    reports = {
        name: play(BASELINES[name], FULL, held_out(20)) for name in BASELINES if name != "beam"
    }
    total = [reports[name].total for name in ("wait", "random", "greedy-npv", "greedy-roi")]
    assert total == sorted(total)
    assert total[3] > 1.5 * total[1]


def test_looking_ahead_beats_greed() -> None:
    seeds = held_out(4)
    assert play(LIGHT, SMALL, seeds).total > play(greedy_roi, SMALL, seeds).total
    short = replace(FULL, months=12)
    report = play(LIGHT, short, seeds[:2])
    assert report.total > play(greedy_roi, short, seeds[:2]).total
    assert report.refused == 0.0


def test_a_beam_sees_what_greed_does_not() -> None:
    """Where all parcels are alike greed wants the first three times over; planners make room."""
    games = flat(replace(FULL, externalities=False))
    best = build(0, 2)
    assert greedy_roi(games, RNG).tolist() == [[best, best, best]]
    assert not games.step(LIGHT(games, RNG)).conflict.any()


def test_a_beam_plays_games_in_different_months_as_it_plays_each() -> None:
    games = Games(SMALL, 3)
    games.begin(np.arange(3), [1, 2, 3])
    for _ in range(4):
        games.step(greedy_roi(games, RNG))
    games.begin([1], [2])
    together = LIGHT(games, RNG)
    for game in range(3):
        np.testing.assert_array_equal(LIGHT(games.select([game]), RNG)[0], together[game])
    assert games.state.month.tolist() == [4, 0, 4]


def test_playing_out_changes_nothing_and_is_the_value_to_the_end() -> None:
    games = flat(replace(FULL, months=3, externalities=False))
    games.step(wishes(games, industry=build(0, 0)))
    value = play_out(games, wait, RNG)
    gamma = FULL.gamma
    assert value[0, 0] == pytest.approx(
        55.0 * (1.0 + gamma) + gamma**2 * (630.0 * (1 - 2 / 240) + 500.0)
    )
    assert games.state.month[0] == 1


def test_a_beam_needs_room() -> None:
    with pytest.raises(InputError, match="beam: depth must be at least 1, got 0"):
        Beam(depth=0)
